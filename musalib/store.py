"""One reader and one writer per kind of artefact: json, jsonl and parquet.

A file is either replaced as a whole (json, parquet: written beside it, then renamed) or appended line by line
(jsonl). After a kill a jsonl file may end in half a line; readers skip that line and `JsonlWriter` cuts it off
before it appends, so a run can always continue from what is on disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it becomes `path` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: str | Path) -> Iterator[Path]:
    """Like `replacing` for a whole folder: complete or absent. What `path` held before is lost."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(path, ignore_errors=True)
    temporary.rename(path)


def _umask() -> int:
    """The process's umask, which `mkstemp` ignores and a published file should follow."""
    value = os.umask(0)
    os.umask(value)
    return value


def write_text(path: str | Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="surrogateescape")


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=True) + "\n")


def read_json(path: str | Path) -> Any:
    """ValueError, naming the file, when it is not JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def read_jsonl(path: str | Path) -> list[Any]:
    """All records; a torn last line (no newline, not JSON) is skipped, a broken line elsewhere is an error."""
    lines = Path(path).read_bytes().split(b"\n")
    torn = len(lines) - 1
    records = []
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == torn:
                break
            raise ValueError(f"{path}, line {number + 1}: not valid JSON: {error}") from error
    return records


def write_jsonl(path: str | Path, records: Iterable[Any]) -> int:
    """Replace `path` by these records; returns how many there were."""
    lines = [json.dumps(record) + "\n" for record in records]
    write_text(path, "".join(lines))
    return len(lines)


def cut_torn_line(path: str | Path) -> int:
    """Drop what follows the last newline (a write cut short by a kill) in one step; returns the bytes dropped."""
    path = Path(path)
    if not path.exists():
        return 0
    content = path.read_bytes()
    keep = content.rfind(b"\n") + 1
    if keep < len(content):
        os.truncate(path, keep)
    return len(content) - keep


class JsonlWriter:
    """Append records, each written and flushed as one line, so that a kill loses at most the last one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(self.path)
        self._stream = self.path.open("ab", buffering=0)

    def append(self, record: Any) -> None:
        line = memoryview((json.dumps(record) + "\n").encode())
        while line:  # an unbuffered write may be partial when the disk is nearly full
            line = line[self._stream.write(line) :]

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_parquet(path: str | Path, frame: pd.DataFrame) -> None:
    with replacing(path) as temporary:
        frame.to_parquet(temporary, index=False)


def read_parquet(path: str | Path) -> pd.DataFrame:
    import pandas as pd

    return pd.read_parquet(path)


def sha256(path: str | Path) -> str:
    """Hash of a file's content, in hexadecimal."""
    with Path(path).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
