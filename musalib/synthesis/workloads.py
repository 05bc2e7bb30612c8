"""Synthetic tasks as typed programs: an optional matmul, a chain of pointwise operators, an optional row tail.

A program is its operator composition, and the splits are disjoint by that composition: which split a program
belongs to is a hash of its key, so that no list has to be kept and no later draw can leak.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from musalib.synthesis.operators import OPERATORS, names
from musalib.tasks import Task

# small on purpose: load_inline passes no -O, so a fused kernel beats eager mode only where dispatch costs dominate;
# rows, cols and the inner length of a matmul all differ, so that swapped ones show
SHAPES = ((4, 16), (2, 32), (3, 20))
INNER = 6
SPLITS = {"train": 36, "rl": 32, "tune": 14, "final": 18}  # per cent of the compositions
DEPTH_WEIGHTS = {1: 0.06, 2: 0.30, 3: 0.34, 4: 0.30}
FAMILIES = ("elementwise", "reduction", "normalisation", "matmul")
REDUCTIONS = ("sum", "mean", "amax")
LARGEST = 50.0  # bound on every intermediate: keeps exp and its like inside float32 for other seeds too

TASK_SOURCE = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, {arguments}):
{lines}\
        return x


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""


@dataclass(frozen=True)
class Program:
    """`head` is "x", "xy" (a second input for binary operators) or "matmul" (x @ w first); `tail` works on rows."""

    head: str
    ops: tuple[str, ...]
    tail: str | None = None

    def __post_init__(self) -> None:
        if self.head not in ("x", "xy", "matmul"):
            raise ValueError(f"head must be x, xy or matmul, got {self.head!r}")
        for name in self.steps:
            if name not in OPERATORS:
                raise ValueError(f"unknown operator {name!r}; known: {', '.join(OPERATORS)}")
        binary = any(OPERATORS[name].kind == "binary" for name in self.ops)
        if binary != (self.head == "xy"):
            raise ValueError(f"{self.key}: binary operators need head 'xy' and only they do")

    @property
    def steps(self) -> tuple[str, ...]:
        """All operators in order, matmul and tail included."""
        return (
            *(["matmul"] if self.head == "matmul" else []),
            *self.ops,
            *([self.tail] if self.tail else []),
        )

    @property
    def depth(self) -> int:
        return len(self.steps)

    @property
    def key(self) -> str:
        return ".".join([self.head, *self.ops, *([self.tail] if self.tail else [])])

    @property
    def rare(self) -> bool:
        return any(OPERATORS[name].rare for name in self.steps)

    @property
    def family(self) -> str:
        if self.head == "matmul":
            return "matmul"
        if self.tail is None:
            return "elementwise"
        return "reduction" if self.tail in REDUCTIONS else "normalisation"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the chain's tensor."""
        return SHAPES[_hash(self.key, "shape") % len(SHAPES)]

    @property
    def arguments(self) -> tuple[str, ...]:
        return {"x": ("x",), "xy": ("x", "y"), "matmul": ("x", "w")}[self.head]


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("/".join(parts).encode()).digest()[:8], "big")


def split_of(program: Program) -> str:
    """The split a composition belongs to, by hash."""
    place = _hash(program.key, "split") % 100
    for split, share in SPLITS.items():
        if place < share:
            return split
        place -= share
    raise AssertionError("split shares must add up to 100")


def input_shapes(program: Program) -> list[tuple[int, int]]:
    rows, cols = program.shape
    if program.head == "matmul":
        return [(rows, INNER), (INNER, cols)]
    return [(rows, cols)] * len(program.arguments)


def task_of(program: Program) -> Task:
    """KernelBench-style task; `meta` holds the program, its operators, depth, family and split."""
    lines = "".join(f"        x = {OPERATORS[name].expression}\n" for name in program.steps)
    inputs = ", ".join(f"torch.randn({rows}, {cols})" for rows, cols in input_shapes(program))
    source = TASK_SOURCE.format(arguments=", ".join(program.arguments), lines=lines, inputs=inputs)
    meta = {
        "head": program.head,
        "ops": list(program.ops),
        "tail": program.tail,
        "steps": list(program.steps),
        "depth": program.depth,
        "family": program.family,
        "rare": program.rare,
        "split": split_of(program),
    }
    return Task(id=program.key, source=source, level=min(program.depth, 3), suite="synthetic", meta=meta)


def program_of(task: Task) -> Program:
    """The program a synthetic task was made from."""
    return Program(task.meta["head"], tuple(task.meta["ops"]), task.meta["tail"])


def _run(program: Program, skip: int | None = None) -> list[torch.Tensor]:
    """Values after every step on fixed inputs; `skip` leaves out one step (never matmul)."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in input_shapes(program)]
    names_in_scope = {"torch": torch, "F": F, **dict(zip(program.arguments, values, strict=True))}
    trace = []
    for index, name in enumerate(program.steps):
        if index != skip:  # expressions are constants of this package, not generated text
            names_in_scope["x"] = eval(OPERATORS[name].expression, names_in_scope)
        trace.append(names_in_scope["x"])
    return trace


@functools.cache
def well_posed(program: Program) -> bool:
    """Finite, bounded, spread out, and no step can be left out unnoticed: otherwise a wrong line would pass."""
    trace = _run(program)
    if any(not torch.isfinite(x).all() or x.abs().max() > LARGEST for x in trace):
        return False
    result = trace[-1]
    if result.std() < 0.02:
        return False
    for index, name in enumerate(program.steps):
        if name == "matmul":
            continue
        without = _run(program, skip=index)[-1]
        if without.shape == result.shape and (without - result).abs().mean() < 0.02 * result.abs().mean():
            return False
    return True


def draw_program(rng: random.Random, depth: int) -> Program:
    """One random program of the given depth; not necessarily well posed."""
    head = rng.choices(("plain", "matmul"), (0.85, 0.15))[0]
    tail = rng.choice(names("tail")) if rng.random() < 0.4 else None
    room = depth - (head == "matmul") - (tail is not None)
    if room < 0:
        head, tail, room = "plain", tail, depth - (tail is not None)
    pool = names("unary") if head == "matmul" else names("unary") + names("binary")
    ops = tuple(rng.choice(pool) for _ in range(room))
    if head == "plain":
        head = "xy" if any(OPERATORS[name].kind == "binary" for name in ops) else "x"
    return Program(head, ops, tail)


def sample_programs(
    split: str,
    n: int,
    seed: int,
    depths: Sequence[int] = (1, 2, 3, 4),
    operators: Collection[str] = tuple(OPERATORS),
) -> list[Program]:
    """`n` distinct well-posed programs of one split; the same arguments always give the same list.

    `operators` are those that may occur. Short depths hold few compositions: once one is exhausted the others
    fill the list.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    rng = random.Random(_hash(split, str(seed), "programs"))
    weights = [DEPTH_WEIGHTS[depth] for depth in depths]
    seen, chosen, allowed = set(), [], set(operators)
    for _ in range(400 * n + 20_000):
        if len(chosen) == n:
            return chosen
        program = draw_program(rng, rng.choices(depths, weights)[0])
        if program in seen or not allowed.issuperset(program.steps) or split_of(program) != split:
            continue
        seen.add(program)
        if len(set(program.ops)) == len(program.ops) and well_posed(program):
            chosen.append(program)
    if len(chosen) == n:
        return chosen
    raise ValueError(
        f"split {split!r} holds only {len(chosen)} programs of depths {tuple(depths)}, {n} were asked for"
    )


def check_disjoint(splits: dict[str, Iterable[Program]]) -> None:
    """Raise ValueError naming a composition that occurs in two splits."""
    owner: dict[Program, str] = {}
    for split, programs in splits.items():
        for program in set(programs):
            if program in owner:
                raise ValueError(f"composition {program.key} is in both {owner[program]!r} and {split!r}")
            owner[program] = split
