"""Read `load_inline` calls with literal arguments from candidate source, so that builds can start early.

Only a hint: what is built for a candidate is what its process asks for at run time. A call that cannot be read
statically is simply built later.
"""

from __future__ import annotations

import ast
from typing import Any

from musalib.mooreeval.build import BuildRequest
from musalib.python_source import PARSE_ERRORS, parse

FIELDS = {
    "cpp_sources": "cpp",
    "functions": "functions",
    "extra_cflags": "cflags",
    "extra_ldflags": "ldflags",
}
IGNORED = {"name", "verbose", "build_directory", "with_cuda", "keep_intermediates"}


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
