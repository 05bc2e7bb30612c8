"""How different two implementations are, and which ones to keep: the clustering behind diversity-preserving RFT.

The paper names the features and discloses neither algorithm nor thresholds. Here a candidate is described by its
`Structure` (all equal: same cluster) and, within a cluster, by the token triples of its native source with names,
numbers and comments normalised away. Representatives are picked farthest first: another cluster always counts as
farther than any difference within one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from musalib.python_source import parse

TOKEN = re.compile(r"[A-Za-z_]\w*|\d[\w.]*|<<<|>>>|::|->|[-+*/%&|^=!<>]=|&&|\|\||\+\+|--|<<|>>|[^\s\w]")
CONTROL = ("for", "while", "if", "else", "switch")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# names that carry structure; every other name is numbered by first use
STRUCTURAL = """
for while do if else switch return break continue auto const void bool int int32_t int64_t long float double size_t std
torch Tensor max min fmax fmin fmaxf fminf exp expf log logf log1p log1pf sqrt sqrtf tanh tanhf abs fabs fabsf pow powf
accumulate transform for_each copy reduce __global__ __device__ __shared__ __syncthreads __shfl_down_sync
__shfl_xor_sync atomicAdd atomicMax threadIdx blockIdx blockDim gridDim
"""
KEPT_NAMES = frozenset(STRUCTURAL.split())


def choose_pool(responses: Sequence[str], min_pool: int = 4, max_pool: int = 8) -> list[str]:
    """At most `max_pool` representatives, farthest first from the first response.

    One per cluster; only while there are fewer than `min_pool`, also different ones of the same cluster.
    Responses that differ in names, numbers, comments or layout only count as one.
    """
    distinct: dict[tuple[Structure, tuple[str, ...]], str] = {}
    for response in responses:
        distinct.setdefault((Structure.of(response), normal_tokens(native_source(response))), response)
    waiting = list(distinct)
    pool: list[tuple[Structure, tuple[str, ...]]] = waiting[:1]
    waiting = waiting[1:]
    while waiting and len(pool) < max_pool:
        nearness = [min(distance(key, chosen) for chosen in pool) for key in waiting]
        farthest = max(range(len(waiting)), key=lambda i: (nearness[i], -i))
        if nearness[farthest] < 1.0 and len(pool) >= min_pool:
            break  # every cluster has its representative
        pool.append(waiting.pop(farthest))
    return [distinct[key] for key in pool]


def distance(one: tuple[Structure, tuple[str, ...]], other: tuple[Structure, tuple[str, ...]]) -> float:
    """1 for another cluster, plus the Jaccard distance of token triples, which lies in [0, 1)."""
    a, b = (set(zip(key[1], key[1][1:], key[1][2:], strict=False)) for key in (one, other))
    overlap = len(a & b) / max(len(a | b), 1)
    return (one[0] != other[0]) + 0.999 * (1.0 - overlap)


@dataclass(frozen=True)
class Structure:
    """What makes two implementations different in kind, following the paper's list of cluster features."""

    topology: str  # node types of the Python module's tree
    functions: int  # native functions and lambdas: kernel count
    loops: str  # loops and branches, e.g. "for(for>if(?))for()"; separate passes show as separate loops
    reduction: tuple[
        str, ...
    ]  # how values are combined: "+=", "max", "double", "accumulate", "shuffle", "atomic"
    launch: tuple[str, ...]  # grid and block expressions
    shared_memory: bool

    @classmethod
    def of(cls, response: str) -> Structure:
        source = native_source(response)
        tokens = normal_tokens(source)
        words = set(tokens)
        functions, loops = outline(tokens)
        marks = {
            "+=": "+=" in words,
            "max": bool(words & {"max", "fmax", "fmaxf"}),
            "min": bool(words & {"min", "fmin", "fminf"}),
            "double": "double" in words,
            "accumulate": bool(words & {"accumulate", "reduce"}),
            "shuffle": any(word.startswith("__shfl") for word in words),
            "atomic": any(word.startswith("atomic") for word in words),
        }
        return cls(
            topology=topology(response),
            functions=functions,
            loops=loops,
            reduction=tuple(name for name, present in marks.items() if present),
            launch=tuple(re.findall(r"<<< (.*?) >>>", " ".join(tokens))),
            shared_memory="__shared__" in words,
        )


def python_tree(response: str) -> ast.Module | None:
    """The response (or its last fenced block) as a syntax tree; None when it is not Python."""
    blocks = re.findall(r"```(?:python|py)?\n(.*?)```", response, re.DOTALL)
    try:
        return parse(blocks[-1] if blocks else response)
    except (SyntaxError, ValueError):
        return None


def topology(response: str) -> str:
    """Node types in order, without names and values: equal for renamed copies."""
    tree = python_tree(response)
    return "" if tree is None else " ".join(type(node).__name__ for node in ast.walk(tree))


def native_source(response: str) -> str:
    """The C++ or CUDA text: string constants of the module that hold code; all of it when it is no Python."""
    tree = python_tree(response)
    if tree is None:
        return response
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return "\n".join(text for text in strings if "{" in text and "(" in text)


def normal_tokens(source: str) -> tuple[str, ...]:
    """Tokens without comments; numbers become N, names that carry no structure are numbered by first use."""
    numbered: dict[str, str] = {}
    tokens = []
    for token in TOKEN.findall(COMMENT.sub(" ", source)):
        if token[0].isdigit():
            token = "N"
        elif (token[0].isalpha() or token[0] == "_") and token not in KEPT_NAMES:
            token = numbered.setdefault(token, f"v{len(numbered)}")
        tokens.append(token)
    return tuple(tokens)


def outline(tokens: Sequence[str]) -> tuple[int, str]:
    """Number of function and lambda bodies, and the loops and branches with what their braces hold.

    `>` joins a loop or branch to the single statement under it, `?` marks a conditional expression.
    """
    functions, shape = 0, []
    heads: list[str] = []  # the token before each open parenthesis
    braces: list[bool] = []  # whether each open brace belongs to a loop or branch
    head = ""  # of the parenthesis closed last
    for before, token in zip(["", *tokens], tokens, strict=False):
        if before == ")" and head in CONTROL and token in CONTROL:
            shape.append(">")
        if token in CONTROL or token == "?":
            shape.append(token)
        elif token == "(":
            heads.append(before)
        elif token == ")" and heads:
            head = heads.pop()
        elif token == "{":
            control = before == "else" or (before == ")" and head in CONTROL)
            functions += before == ")" and not control
            shape.append("(" if control else "")
            braces.append(control)
        elif token == "}" and braces:
            shape.append(")" if braces.pop() else "")
    return functions, "".join(shape)
