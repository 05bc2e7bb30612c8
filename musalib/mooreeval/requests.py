"""`load_inline` calls as records: what a candidate asks to build, and what of it is refused before a compiler runs.

`literal_requests` reads calls with literal arguments from candidate source, so that builds can start early. That is
only a hint: what is built for a candidate is what its process asks for at run time.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from musalib.mooreeval import cpp_source
from musalib.mooreeval.toolchain import OPTIMISATION
from musalib.python_source import PARSE_ERRORS, parse

SAFE_FLAG = re.compile(
    r"-(O[0-3sgz]?|Ofast|march=[\w.-]+|mtune=[\w.-]+|m(avx|sse|fma)[\w.-]*|f[\w-]+(=[\w.-]+)?|W[\w-]+(=\w+)?|D\w+(=[\w.]+)?|std=(c|gnu)\+\+\w+|pthread|lm|lgomp|fopenmp|w|g\d?)$"
)
UNSAFE_FLAG = re.compile(
    r"-f(plugin|dump|profile|sanitize|save|instrument|callgraph|stack-usage|opt-info)|-f[\w-]+=.*[/]"
)
FIELDS = {
    "cpp_sources": "cpp",
    "functions": "functions",
    "extra_cflags": "cflags",
    "extra_ldflags": "ldflags",
}
IGNORED = {"name", "verbose", "build_directory", "with_cuda", "keep_intermediates"}


@dataclass(frozen=True)
class BuildRequest:
    """The arguments of one `load_inline` call. `functions` None means that the source binds itself."""

    cpp: tuple[str, ...]
    functions: tuple[str, ...] | None
    cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    cuda: tuple[str, ...] = ()
    error_handling: bool = True
    implicit_headers: bool = True
    python_module: bool = True

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.__dict__, sort_keys=True, default=list).encode()).hexdigest()[
            :24
        ]

    @property
    def source(self) -> str:
        return "\n".join(self.cpp)

    @property
    def optimisation(self) -> str:
        return self.cflags[0] if self.cflags else ""

    @property
    def simple_flags(self) -> bool:
        """No flags, or one -O level: what the light path has precompiled headers for."""
        return not (self.ldflags or self.include or self.cuda) and self.python_module and self.implicit_headers and (
            not self.cflags or (len(self.cflags) == 1 and self.cflags[0] in OPTIMISATION)
        )  # fmt: skip


def refusal(request: BuildRequest) -> tuple[str, str] | None:
    """(category, message) when the request itself cannot be built here: flags that run or read things, foreign paths."""
    if request.cuda:
        return "compile_error:backend", "cuda_sources need the cuda backend; this verdict is for cpu"
    for flag in (*request.cflags, *request.ldflags):
        if not SAFE_FLAG.match(flag) or UNSAFE_FLAG.search(flag):
            return "compile_error:flags", f"compiler flag {flag!r} is not accepted"
    if request.include:
        return "compile_error:flags", "extra_include_paths are not accepted"
    for part in request.cpp:
        for name in cpp_source.scan(part).includes:
            if name.startswith(("/", ".")) or ".." in name:
                return "compile_error:missing_header", f"fatal error: {name}: No such file or directory"
    return None


def literal_requests(source: str) -> list[BuildRequest]:
    try:
        tree = parse(source)
    except PARSE_ERRORS:
        return []
    constants = {
        target.id: node.value
        for node in tree.body if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and _called(node) == "load_inline"
            and (request := _read(node, constants))
        ):
            found.append(request)
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _read(node: ast.Call, constants: dict[str, ast.expr]) -> BuildRequest | None:
    values: dict[str, Any] = {}
    named = [
        *zip(("name", "cpp_sources", "cuda_sources", "sycl_sources", "functions"), node.args, strict=False)
    ]
    named += [(k.arg, k.value) for k in node.keywords]
    for name, expression in named:
        if name in IGNORED:
            continue
        if name not in FIELDS:
            return None
        try:
            value = _value(expression, constants)
        except ValueError:
            return None
        if isinstance(value, dict):
            value = list(value)
        values[FIELDS[name]] = (value,) if isinstance(value, str) else tuple(value or ())
    if (
        not values.get("cpp")
        or not values.get("functions")
        or not all(isinstance(x, str) for v in values.values() for x in v)
    ):
        return None
    return BuildRequest(**values)


def _value(node: ast.expr, constants: dict[str, ast.expr], depth: int = 0) -> Any:
    if isinstance(node, ast.Name) and node.id in constants and depth < 8:
        return _value(constants[node.id], constants, depth + 1)
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_value(x, constants, depth + 1) for x in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and depth < 32:
        return _value(node.left, constants, depth + 1) + _value(node.right, constants, depth + 1)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise ValueError("not a literal") from error
