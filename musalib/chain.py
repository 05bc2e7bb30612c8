"""`musalib run`: execute the numbered notebooks in order with Papermill, and continue where a run stopped.

What happened is taken from the exception and the files on disk, never from the executed notebook: after a
kernel died, Papermill's own metadata claims that all its cells completed.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from musalib import runs, store
from musalib.parameters import ParameterError, assigned_names, convert, nearest

LAST_PIPELINE_NUMBER = 19  # notebooks from 20 on are explorers
TYPES = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict}
QUIET_S = 30.0  # longest silence on a screen that is no terminal


@dataclass
class Request:
    """What `musalib run` was asked for; `start` and `only` are notebook numbers or names."""

    profile: str = "tiny"
    run: str | None = None
    start: str | None = None
    only: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    def command(self, start: str) -> str:
        """The command that continues this run at notebook `start`."""
        words = ["musalib", "run", "--profile", self.profile, "--run", str(self.run), "--from", start[:2]]
        for name, value in self.parameters.items():
            words += ["-p", f"{name}={value}"]
        return shlex.join(words)


@dataclass(frozen=True)
class Failure:
    notebook: str
    cell: str
    why: str


def notebooks() -> dict[str, Path]:
    """Stage name -> source notebook, in order."""
    paths = sorted((runs.repository_root() / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    return {p.stem: p for p in paths if int(p.stem[:2]) <= LAST_PIPELINE_NUMBER}


def find_notebook(wanted: str, known: dict[str, Path]) -> str:
    """'06', '6' or '06_rl_multi_turn' -> the stage name."""
    name = wanted.removesuffix(".ipynb")
    for stage in known:
        if name == stage or name.zfill(2) == stage[:2]:
            return stage
    raise ParameterError(f"no notebook {wanted!r}{nearest(name, known)}")


def chosen(request: Request, known: dict[str, Path]) -> list[str]:
    """The stages to execute, in order."""
    if request.only is not None and request.start is not None:
        raise ParameterError("--from and --only exclude each other")
    stages = list(known)
    if request.only is not None:
        return [find_notebook(request.only, known)]
    return stages[stages.index(find_notebook(request.start, known)) :] if request.start else stages


def declared(notebook: Path) -> dict[str, Any]:
    """Parameters of a notebook: name -> type, from its cell tagged `parameters` (`int | None` when None is given)."""
    cells = store.read_json(notebook)["cells"]
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise ParameterError(
            f"{notebook.name} must have exactly one cell tagged 'parameters', has {len(tagged)}"
        )
    source = "".join(tagged[0]["source"])
    found: dict[str, Any] = dict.fromkeys(assigned_names(source))
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = TYPES[ast.unparse(node.annotation)]
            empty = isinstance(node.value, ast.Constant) and node.value.value is None
            found[node.target.id] = kind | None if empty else kind
    return found


def distribute(given: dict[str, Any], stages: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Each `-p` value to every notebook that declares it. Unknown names and wrong types stop before anything runs."""
    tables = {stage: declared(path) for stage, path in stages.items()}
    known = {name for table in tables.values() for name in table}
    for name in given:
        if name in ("run", "profile"):
            raise ParameterError(f"use --{name} instead of -p {name}=...")
        if name not in known:
            raise ParameterError(f"no notebook has a parameter {name!r}{nearest(name, known)}")
    return {
        stage: {n: convert(n, v, table[n]) for n, v in given.items() if n in table}
        for stage, table in tables.items()
    }


def run_chain(request: Request) -> int:
    """Run the chain; 0 when every notebook finished, 1 when one failed. Wrong use raises before anything starts."""
    from musalib.profiles import get_profile

    get_profile(request.profile)
    known = notebooks()
    stages = chosen(request, known)
    parameters = distribute(request.parameters, known)
    request.run = request.run or f"{request.profile}-{time.strftime('%Y%m%d-%H%M%S')}"
    given = dict(sorted({n: v for table in parameters.values() for n, v in table.items()}.items()))
    run = runs.Run(request.run, {"profile": request.profile, **given})
    status = "stopped"
    try:
        with screen(run) as out:
            failure = execute_all(run, request, stages, parameters, out)
            everything_done = all(run.is_done(stage) for stage in known)
            status = "failed" if failure else "done" if everything_done else "partial"
            out.close_with(report(run, request, failure))
    finally:
        run.close(status)
    return 1 if failure else 0


def execute_all(
    run: runs.Run, request: Request, stages: list[str], parameters: dict, out: Screen
) -> Failure | None:
    for number, stage in enumerate(stages, 1):
        head = f"[{number}/{len(stages)}] {stage}"
        if run.is_done(stage):
            out.line(f"{head}: done before, skipped")
            continue
        run.begin(stage)
        out.start(head)
        started = time.monotonic()
        values = {"run": request.run, "profile": request.profile, **parameters[stage]}
        failure = execute(notebooks()[stage], run.notebook(stage), values, out)
        wall_s = time.monotonic() - started
        run.finish(stage, wall_s, failure.why if failure else None)
        out.line(f"{head}: {'FAILED after' if failure else 'done in'} {wall_s:.0f} s")
        if failure:
            return failure
    return None


def execute(source: Path, target: Path, values: dict[str, Any], out: Screen) -> Failure | None:
    """One notebook through Papermill, in a kernel of this very interpreter that no other user can talk to."""
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    import papermill
    from traitlets.config import Config

    try:
        with tempfile.TemporaryDirectory(prefix="musalib-") as private:
            # unix sockets in a private folder: no ports that could collide, nothing readable from outside
            sockets = {"transport": "ipc", "connection_file": f"{private}/kernel.json"}
            papermill.execute_notebook(
                str(source),
                str(target),
                parameters=values,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                log_output=True,
                cwd=str(runs.repository_root()),
                config=Config({"KernelManager": sockets}),
                extra_arguments=["--log-level=50"],  # what the kernel logs about itself is for no reader here
            )
    except papermill.PapermillExecutionError as error:
        first = next((line for line in error.source.splitlines() if line.strip()), "")
        return Failure(
            source.stem, f"cell {error.cell_index + 1}: {first.strip()}", explain(error.ename, error.evalue)
        )
    except KeyboardInterrupt:
        return Failure(source.stem, out.cell, "stopped by a signal (Ctrl-C or a kill)")
    except Exception as error:  # a dead kernel arrives as nbclient's RuntimeError, a full disk as OSError
        return Failure(source.stem, out.cell, explain(type(error).__name__, str(error)))
    return None


def explain(name: str, text: str) -> str:
    """An exception in plain words; ours are already advice."""
    if name == "DeadKernelError":
        return "the notebook's process died without a word; usually the machine ran out of memory"
    if name == "MemoryError":
        return "out of memory"
    if name == "OSError" and "No space left" in text:
        return "the disk is full; free some space (musalib doctor shows how much there is)"
    lines = [line for line in text.strip().splitlines() if line.strip()]
    message = " ".join(lines[:3])
    ours = ("ParameterError", "RunError", "TaskError", "MissingInput", "PolicyError", "ToolchainError")
    return message if name in ours and message else f"{name}: {message}".rstrip(": ")


def report(run: runs.Run, request: Request, failure: Failure | None) -> list[str]:
    """The last lines on screen."""
    if failure is None:
        results = run.path / "artifacts" / "results.json"
        shown = store.read_json(results) if results.exists() else {}
        lines = [f"{kind:<8} {runs.shown(path)}" for kind, path in shown.items()]
        return [*lines, f"run      {runs.shown(run.path)}"]
    return [
        f"FAILED   {failure.notebook}, {failure.cell}",
        f"why      {failure.why}",
        f"log      {runs.shown(run.path / 'run.log')}   notebook {runs.shown(run.notebook(failure.notebook))}",
        f"continue {request.command(failure.notebook)}",
    ]


class Screen(logging.Handler):
    """Papermill's log goes to run.log; the screen gets a line per notebook and, now and then, the newest output."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.cell = "before its first cell"
        self._log = log.open("a", encoding="utf-8", errors="replace")
        self._shown = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().rstrip()
        if text.startswith("Executing Cell"):
            self.cell = f"cell {text.split()[2].rstrip('-')}"
        self._write(text)
        if text.startswith(("Executing Cell", "Ending Cell")):
            return
        if time.monotonic() - self._shown > QUIET_S and (lines := text.splitlines()):
            self._show(f"    {self.cell}: {lines[-1][:100]}")

    def start(self, head: str) -> None:
        self.cell = "before its first cell"
        self.line(f"{head} ...")

    def line(self, text: str) -> None:
        self._write(text)
        self._show(text)

    def close_with(self, lines: list[str]) -> None:
        for text in lines:
            self.line(text)

    def _write(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        self._log.write("".join(f"{stamp} {line}\n" for line in text.splitlines()))
        self._log.flush()

    def _show(self, text: str) -> None:
        self._shown = time.monotonic()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._log.close()
        super().close()


@contextlib.contextmanager
def screen(run: runs.Run) -> Iterator[Screen]:
    """A Screen attached to Papermill's logger, with SIGTERM treated like Ctrl-C so that no kernel stays behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    out = Screen(run.path / "run.log")
    logger = logging.getLogger("papermill")
    before = logger.level, logger.propagate, signal.signal(signal.SIGTERM, interrupt)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(out)
    try:
        out._write(json.dumps({"run": run.name, **run.manifest["parameters"]}))
        yield out
    finally:
        logger.removeHandler(out)
        logger.setLevel(before[0])
        logger.propagate = before[1]
        signal.signal(signal.SIGTERM, before[2])
        out.close()
