"""Typed notebook parameters: a misspelt or mistyped one stops the notebook at once and names its neighbour.

Papermill injects whatever it is given and only warns about names that the notebook does not know. So the cell
after the parameters reads them into a dataclass:

    cfg = read_parameters(globals(), SFTParameters)
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Config = TypeVar("Config")

PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
INJECTED = "# Parameters"  # first line of the cell that Papermill adds


class UsageError(ValueError):
    """Asked for in a way that cannot work; the message says what to do instead."""


class ParameterError(UsageError):
    """A parameter that does not exist, is missing or has the wrong type."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice for a misspelt name: '; did you mean "seed"?' or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known) or 'none'}"


def read_parameters(namespace: Mapping[str, Any], config_class: type[Config]) -> Config:
    """The dataclass `config_class` filled from a notebook's `globals()`.

    In a notebook the parameters are the annotated names (`seed: int = 0`) and everything in the cell Papermill
    injected; in a plain mapping they are all public names with a plain value. ParameterError when one of them is
    no field of `config_class`, a field without default is absent, or a value does not fit its field's type.
    """
    fields = {f.name: f for f in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    for name in written_names(namespace):
        if name not in fields:
            raise ParameterError(f"unknown parameter {name!r}{nearest(name, fields)}")
    hints = typing.get_type_hints(config_class)
    values = {name: convert(name, namespace[name], hints[name]) for name in fields if name in namespace}
    for name, f in fields.items():
        if name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise ParameterError(f"parameter {name!r} is missing; add it to the cell tagged 'parameters'")
    return config_class(**values)


def written_names(namespace: Mapping[str, Any]) -> list[str]:
    """Names that somebody wrote down as parameters, in order of appearance."""
    if isinstance(namespace.get("In"), list):
        names = [name for source in namespace["In"] for name in assigned_names(source)]
        return [name for name in dict.fromkeys(names) if name in namespace]
    return [n for n, value in namespace.items() if not n.startswith("_") and isinstance(value, PLAIN)]


def assigned_names(source: str) -> list[str]:
    """Annotated top-level names of a cell; in the cell injected by Papermill, the plain assignments too."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # IPython syntax: certainly not a parameters cell
        return []
    injected = source.lstrip().startswith(INJECTED)
    targets: list[ast.expr] = []
    for node in body:
        if isinstance(node, ast.AnnAssign):
            targets.append(node.target)
        elif injected and isinstance(node, ast.Assign):
            targets += node.targets
    return [target.id for target in targets if isinstance(target, ast.Name)]


def convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`. Text is read where it can only mean one thing: "1e-6" for a float."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    for kind in (typing.get_origin(h) or h for h in allowed):
        if kind is float and (number := as_number(value)) is not None:
            return float(number)
        if kind is int and (number := as_number(value)) is not None and number == int(number):
            return int(number)
        if kind in (bool, str, dict) and isinstance(value, kind):
            return value
        if kind in (list, tuple) and isinstance(value, list | tuple):
            return kind(value)
    wanted = " or ".join("None" if h is type(None) else getattr(h, "__name__", str(h)) for h in allowed)
    fix = "; write True or False without quotes" if bool in allowed else ""
    raise ParameterError(f"parameter {name!r} must be {wanted}, got {type(value).__name__} {value!r}{fix}")


def as_number(value: Any) -> float | int | None:
    """A finite number given as such or as text ("1e-6" is text in YAML); None when it is neither."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return number if number == number and abs(number) != float("inf") else None


def parse_assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """`-p key=value` pairs: Python literals where they parse (3, 1e-6, True, [1, 2]), text otherwise."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ParameterError(f"expected key=value, got {pair!r}")
        if name in values:
            raise ParameterError(f"parameter {name!r} is given twice")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError):
            values[name] = text
    return values
