"""`musalib verify-batch`: read jobs, judge them as a stream, append each verdict the moment it is there.

A job is a line {"id", "task", "candidate"}; task is a path or source, candidate a path or text. A kill loses at
most the verdicts that were still under way: the same command with --resume judges exactly those.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from musalib import store
from musalib.parameters import UsageError
from musalib.tasks import Task, TaskError

if TYPE_CHECKING:
    from musalib.mooreeval import EvalConfig

REPORT_S = 10.0  # between progress lines where stderr is no terminal
MOST_SHOWN = 5  # broken lines named in one error


@dataclass(frozen=True)
class Job:
    id: str
    task: Task
    candidate: str | bytes


def read_jobs(path: str | Path) -> list[Job]:
    """Every job of the file. UsageError that names the lines when some cannot be used: nothing has been judged then."""
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"cannot read jobs from {path}: {error.strerror}") from error
    jobs: dict[str, Job] = {}
    tasks: dict[str, Task] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            job = read_job(json.loads(line), path.parent, tasks)
            if job.id in jobs:
                raise UsageError(f"id {job.id!r} occurs twice; verdicts are kept by id")
            jobs[job.id] = job
        except ValueError as error:
            problems.append(f"{path}, line {number}: {error}")
    if problems:
        more = f"\n... and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
        raise UsageError("\n".join(problems[:MOST_SHOWN]) + more)
    return list(jobs.values())


def read_job(record: object, folder: Path, tasks: dict[str, Task]) -> Job:
    """One line as a Job; `tasks` keeps what was parsed before, as many jobs share one task."""
    names = ("id", "task", "candidate")
    if not isinstance(record, dict) or any(not isinstance(record.get(name), str) for name in names[1:]):
        raise UsageError('a job is {"id": ..., "task": "path or source", "candidate": "path or text"}')
    if not isinstance(record.get("id"), str | int):
        raise UsageError("a job needs an id, a string or an integer")
    written = record["task"]
    if written not in tasks:
        tasks[written] = read_task(written, folder)
    return Job(str(record["id"]), tasks[written], read_response(record["candidate"], folder))


def read_task(text: str, folder: Path) -> Task:
    file = existing_file(text, folder)
    if file is not None:
        return Task.from_file(file)
    if is_path(text):
        raise TaskError(f"there is no task file {text}")
    return Task(id="inline", source=text)


def read_response(text: str, folder: Path) -> str | bytes:
    file = existing_file(text, folder)
    if file is None:
        if is_path(text):
            raise UsageError(f"there is no candidate file {text}")
        return text
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read candidate {file}: {error.strerror}") from error


def is_path(text: str) -> bool:
    """One short line that ends like a file name; sources and responses have several lines."""
    return "\n" not in text and len(text) < 4096 and text.endswith((".py", ".txt", ".md"))


def existing_file(text: str, folder: Path) -> Path | None:
    """The file a job means: seen from the working directory, else from the folder of the jobs file."""
    if "\n" in text or "\0" in text or not 0 < len(text) < 4096:
        return None
    for path in (Path(text), folder / text):
        try:
            if path.is_file():
                return path
        except OSError:  # too long for a file name: then it is text
            return None
    return None


def finished_ids(out: Path, resume: bool) -> set[str]:
    """Ids whose verdict `out` already holds. A torn last line is cut off and `infra` verdicts are judged again."""
    if not out.exists() or not out.stat().st_size:
        return set()
    if not resume:
        raise UsageError(f"{out} exists; add --resume to continue it or name another --out")
    store.cut_torn_line(out)
    try:
        records = store.read_jsonl(out)
        kept = [r for r in records if not str(r["category"]).startswith("infra")]
        if len(kept) < len(records):
            store.write_jsonl(out, kept)
        return {str(record["id"]) for record in kept}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{out} holds something else than verdicts ({error}); name another --out") from error


def default_store() -> Path:
    """Verdicts kept between batches, so that a candidate seen before costs nothing (`--no-cache`: not used)."""
    from musalib.mooreeval.toolchain import cache_root

    return cache_root() / "verdicts.sqlite"


def judge(
    jobs: list[Job], out: Path, backend: str, config: Callable[[], EvalConfig], before: int
) -> Counter[str]:
    """Judge `jobs` and append {"id", ...verdict} lines to `out`; returns how often each kind of verdict came."""
    counts: Counter[str] = Counter()
    with store.JsonlWriter(out) as writer:
        if not jobs:
            return counts
        from musalib.mooreeval import MooreEval

        with MooreEval(backend, config()) as evaluator, progress(len(jobs), before) as advance:
            for index, verdict in evaluator.verify_stream([(job.task, job.candidate) for job in jobs]):
                writer.append({"id": jobs[index].id, **verdict.to_dict()})
                counts[verdict.kind] += 1
                advance()
    return counts


@contextmanager
def progress(total: int, before: int) -> Iterator[Callable[[], None]]:
    """A bar with rate and remaining time on a terminal, a line every few seconds elsewhere; always on stderr."""
    if not sys.stderr.isatty():
        yield line_progress(total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    class Rate(ProgressColumn):
        def render(self, task: Task) -> str:
            return f"{task.speed or 0:.1f}/s"

    columns = (
        TextColumn("judging"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        if before:
            bar.console.print(f"{before} verdicts were there before")
        row = bar.add_task("judging", total=total)
        yield lambda: bar.advance(row)


def line_progress(total: int) -> Callable[[], None]:
    started = shown = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, shown
        done += 1
        now = time.monotonic()
        if done == total or now - shown > REPORT_S:
            shown = now
            rate = done / max(now - started, 1e-9)
            left = (total - done) / rate
            print(f"{done}/{total} judged, {rate:.1f}/s, {left:.0f} s left", file=sys.stderr, flush=True)

    return advance
