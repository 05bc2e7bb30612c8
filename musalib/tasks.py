"""A task: one KernelBench-style reference program, read and checked without running it."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from musalib.python_source import PARSE_ERRORS, parse

REQUIRED_FUNCTIONS = ("get_inputs", "get_init_inputs")


class TaskError(ValueError):
    """The task itself is unusable: an error of the caller, never a verdict on a candidate."""


@dataclass(frozen=True)
class Task:
    """`source` defines `class Model(nn.Module)`, `get_inputs()` and `get_init_inputs()`.

    It may also define `get_input_groups()`, a list of input lists (several shapes or dtypes); every group is
    tested. `tolerance` replaces the judge's own tolerance when given. `meta` is free JSON (operators, depth).
    """

    id: str
    source: str
    level: int = 1
    suite: str = "custom"
    tolerance: float | None = None
    meta: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise TaskError(f"a task id must be a non-empty string, got {self.id!r}")
        if not isinstance(self.source, str):
            raise TaskError(f"task {self.id}: source must be Python text, got {type(self.source).__name__}")
        tolerance = self.tolerance
        if tolerance is not None and not (isinstance(tolerance, (int, float)) and tolerance >= 0):
            raise TaskError(f"task {self.id}: tolerance must be a number >= 0 or None, got {tolerance!r}")
        check_source(self.source, self.id)

    @classmethod
    def from_file(cls, path: str | Path, **fields: Any) -> Task:
        path = Path(path)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskError(f"cannot read task file {path}: {error}") from error
        return cls(id=fields.pop("id", path.stem), source=source, **fields)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Task:
        known = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(record, dict):
            raise TaskError(
                f"a task record must be an object with id and source, got {type(record).__name__}"
            )
        if missing := {"id", "source"} - record.keys():
            raise TaskError(f"a task record needs {sorted(missing)}")
        return cls(**{name: value for name, value in record.items() if name in known})


def check_source(source: str, name: str = "task") -> None:
    """Raise TaskError with the line and the reason when `source` is no KernelBench-style module."""
    try:
        tree = parse(source)
    except PARSE_ERRORS as error:
        line = getattr(error, "lineno", None)
        raise TaskError(f"{name}: not valid Python{f' (line {line})' if line else ''}: {error}") from error
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "Model" not in classes:
        found = f"; it defines {', '.join(sorted(classes))}" if classes else ""
        raise TaskError(f"{name}: a task must define `class Model(nn.Module)` at top level{found}")
    for function in REQUIRED_FUNCTIONS:
        if function not in functions:
            raise TaskError(f"{name}: a task must define `{function}()` at top level")


def load_tasks(path: str | Path) -> list[Task]:
    """Tasks from a jsonl file (one record per line) or a single .py file."""
    path = Path(path)
    if path.suffix == ".py":
        return [Task.from_file(path)]
    tasks = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read tasks from {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            tasks.append(Task.from_dict(json.loads(line)))
        except (json.JSONDecodeError, TaskError) as error:
            raise TaskError(f"{path}, line {number}: {error}") from error
    return tasks


def iter_ids(tasks: Iterable[Task]) -> Iterator[str]:
    """Ids in order; a doubled id is an error, because results are keyed by it."""
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise TaskError(f"task id {task.id!r} occurs twice")
        seen.add(task.id)
        yield task.id
