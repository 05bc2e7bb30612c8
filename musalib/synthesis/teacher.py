"""The template teacher: complete `ModelNew` modules with native C++ for a program, right or unreliable.

One C++ statement per line. Structures differ in loop nest and number of functions: "flat" and "nested" loops in
one function, a "lambda" applied per element, a separate "kernel" function called by a host function.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from musalib.synthesis.operators import OPERATORS
from musalib.synthesis.workloads import Program

STRUCTURES = ("flat", "nested", "lambda", "kernel")

MODULE = '''\
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cpp_source = r"""
{cpp}\
"""

ext = load_inline(name="musa_fused_rows", cpp_sources=cpp_source, functions=["musa_fused_rows"])


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, {arguments}):
        return ext.musa_fused_rows({arguments})
'''

SETUP = {
    "x": """\
    const int64_t rows = x.size(0), cols = x.size(1);
    auto buf = torch::empty({rows, cols});
    float* b = buf.data_ptr<float>();
    const float* a = x.data_ptr<float>();
""",
    "xy": """\
    const int64_t rows = x.size(0), cols = x.size(1);
    auto buf = torch::empty({rows, cols});
    float* b = buf.data_ptr<float>();
    const float* a = x.data_ptr<float>();
    const float* y_ptr = y.data_ptr<float>();
""",
    "matmul": """\
    const int64_t rows = x.size(0), inner = x.size(1), cols = w.size(1);
    auto buf = torch::empty({rows, cols});
    float* b = buf.data_ptr<float>();
    const float* a = b;
    const float* x_ptr = x.data_ptr<float>();
    const float* w_ptr = w.data_ptr<float>();
""",
}

FLAT = (
    "    for (int64_t i = 0; i < rows * cols; ++i) {\n        float v = a[i];\n",
    "        b[i] = v;\n    }\n",
)
NESTED = (
    "    for (int64_t r = 0; r < rows; ++r)\n    for (int64_t c = 0; c < cols; ++c) {\n"
    "        const int64_t i = r * cols + c;\n        float v = a[i];\n",
    "        b[i] = v;\n    }\n",
)
LOAD_Y = "        float u = y_ptr[i];\n"


@dataclass(frozen=True)
class Draft:
    """Choices behind one answer: the structure and, per step of the program, its C++ text and whether it is right."""

    structure: str
    texts: tuple[str, ...]
    right: tuple[bool, ...]


def _choose(name: str, rng: random.Random, wrong_share: float) -> tuple[str, bool]:
    operator = OPERATORS[name]
    right = rng.random() >= wrong_share
    return rng.choice(operator.right if right else operator.wrong), right


def draft(program: Program, rng: random.Random, unreliable: bool, structure: str | None = None) -> Draft:
    """Draw an answer; `unreliable` writes each step wrongly with its operator's `wrong_share`."""
    structure = structure or rng.choice(STRUCTURES)
    if structure not in STRUCTURES:
        raise ValueError(f"structure must be one of {', '.join(STRUCTURES)}, got {structure!r}")
    chosen = [
        _choose(name, rng, OPERATORS[name].wrong_share if unreliable else 0.0) for name in program.steps
    ]
    return Draft(structure, tuple(text for text, _ in chosen), tuple(right for _, right in chosen))


def revise(program: Program, first: Draft, rng: random.Random, patience: float = 0.5) -> Draft:
    """A second try after feedback: wrong steps are redrawn at `patience` times their wrong share, the rest stays.

    Rare operators keep their full wrong share: feedback must not teach what the corpus is meant to lack.
    """
    texts, right = list(first.texts), list(first.right)
    for index, name in enumerate(program.steps):
        if not right[index]:
            share = OPERATORS[name].wrong_share * (1.0 if OPERATORS[name].rare else patience)
            texts[index], right[index] = _choose(name, rng, share)
    return replace(first, texts=tuple(texts), right=tuple(right))


def _chain(structure: str, binary: bool, lines: str) -> tuple[str, str]:
    """(functions before the host function, statements inside it) that apply the pointwise lines."""
    load = LOAD_Y if binary else ""
    if structure in ("flat", "nested"):
        begin, end = FLAT if structure == "flat" else NESTED
        return "", begin + load + lines + end
    if structure == "lambda":
        parameters, arguments = ("float v, float u", "a[i], y_ptr[i]") if binary else ("float v", "a[i]")
        return "", (
            f"    auto chain = []({parameters}) {{\n{lines}        return v;\n    }};\n"
            f"    for (int64_t i = 0; i < rows * cols; ++i) b[i] = chain({arguments});\n"
        )
    parameters, arguments = ("const float* y_ptr, ", "y_ptr, ") if binary else ("", "")
    begin = f"void musa_chain_kernel(const float* a, {parameters}float* b, int64_t n) {{\n"
    loop = FLAT[0].replace("rows * cols", "n") + load + lines + FLAT[1]
    return f"{begin}{loop}}}\n\n", f"    musa_chain_kernel(a, {arguments}b, rows * cols);\n"


def render(program: Program, answer: Draft) -> str:
    """The complete Python module of a draft."""
    texts = dict(enumerate(answer.texts))
    matmul = texts.pop(0) if program.head == "matmul" else ""
    tail = texts.pop(len(answer.texts) - 1) if program.tail else "    return buf;\n"
    lines = "".join(f"        {text}\n" for text in texts.values())
    functions, body = _chain(answer.structure, program.head == "xy", lines)
    parameters = ", ".join(f"torch::Tensor {name}" for name in program.arguments)
    host = f"torch::Tensor musa_fused_rows({parameters}) {{\n{SETUP[program.head]}{matmul}{body}{tail}}}\n"
    return MODULE.format(cpp=functions + host, arguments=", ".join(program.arguments))


def write_candidate(program: Program, rng: random.Random, style: str | None = None) -> str:
    """A correct module; `style` fixes its structure, one of `STRUCTURES`."""
    return render(program, draft(program, rng, unreliable=False, structure=style))


def write_unreliable(program: Program, rng: random.Random) -> str:
    """A module of the base corpus: each step wrong with its operator's documented share."""
    return render(program, draft(program, rng, unreliable=True))
