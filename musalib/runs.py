"""Run folders: where a run's notebooks, artefacts, manifest and log live, and when a stage counts as done.

papermill_runs/<run>/NN_name.ipynb   executed copies
                     artifacts/<stage>/...
                     manifest.json   parameters, commit, versions, device, stages; the status is written last
                     run.log
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from musalib import store
from musalib.parameters import UsageError

FORMAT = 1  # of run folders; a folder of another format is refused, never guessed at
PACKAGES = (
    "musalib",
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "datasets",
    "tokenizers",
    "numpy",
    "pandas",
)
NOT_OUTPUTS = ("checkpoint", ".")  # files and folders whose names start so are working state, not results


class RunError(UsageError):
    """The run folder cannot be used as asked; the message says what to do instead."""


def repository_root() -> Path:
    """The folder that holds `notebooks/`, wherever Jupyter or the command was started."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "notebooks").is_dir() else Path.cwd()


def runs_root() -> Path:
    """`papermill_runs/`, or the folder named by MUSALIB_RUNS (for a disk with more room)."""
    return Path(os.environ.get("MUSALIB_RUNS") or repository_root() / "papermill_runs")


def shown(path: str | Path) -> str:
    """A path as people should read it: relative to the working directory when it lies below."""
    path = Path(path).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise RunError(f"a run name has letters, digits, '.', '_' and '-', got {name!r}")
    return name


def folder_of(name: str) -> Path:
    return runs_root() / check_name(name)


def artifacts_of(name: str, stage: str) -> Path:
    return folder_of(name) / "artifacts" / stage


class Run:
    """One run folder. Opening checks its format and parameters; `begin`/`finish` keep the manifest."""

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        """Create the folder or open it again. RunError when it belongs to another format or other parameters."""
        self.name = name
        self.path = folder_of(name)
        self.manifest_path = self.path / "manifest.json"
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = acquire(self.path / ".lock", f"run {name!r}")
        self.manifest = {"format": FORMAT, "run": name, "parameters": parameters, "stages": {}}
        if self.manifest_path.exists():
            try:
                self.manifest = check_manifest(self.manifest_path, parameters)
            except RunError:
                self._lock.close()
                raise
        self.manifest |= environment() | {"status": "running"}
        self.save()

    def save(self) -> None:
        store.write_json(self.manifest_path, self.manifest)

    def notebook(self, stage: str) -> Path:
        return self.path / f"{stage}.ipynb"

    def is_done(self, stage: str) -> bool:
        """Finished before, and every output is still there with the content it had then."""
        entry = self.manifest["stages"].get(stage, {})
        return entry.get("status") == "done" and all(map(self._unchanged, entry["outputs"]))

    def _unchanged(self, output: dict[str, Any]) -> bool:
        path = self.path / output["path"]
        return (
            path.is_file()
            and path.stat().st_size == output["bytes"]
            and store.sha256(path) == output["sha256"]
        )

    def begin(self, stage: str) -> None:
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.manifest["stages"][stage] = {"status": "running", "started": started}
        self.save()

    def finish(self, stage: str, wall_s: float, error: str | None = None) -> None:
        """Record outputs first; `status` is the last thing known about a stage."""
        files = [self.notebook(stage), *result_files(self.path / "artifacts" / stage)]
        entry = self.manifest["stages"][stage]
        entry["wall_s"] = round(wall_s, 2)
        entry["outputs"] = [describe(path, self.path) for path in files if path.is_file()]
        if error is not None:
            entry["error"] = error
        entry["status"] = "done" if error is None else "failed"
        self.save()

    def close(self, status: str) -> None:
        stages = self.manifest["stages"].values()
        self.manifest["wall_s"] = round(sum(entry.get("wall_s", 0.0) for entry in stages), 2)
        self.manifest["status"] = status
        self.save()
        self._lock.close()


def check_manifest(path: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """The manifest, if it is of this format and of the same parameters."""
    folder = shown(path.parent)
    try:
        manifest = store.read_json(path)
        found, before = manifest["format"], manifest["parameters"]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}/manifest.json is damaged ({error}); choose another --run name") from error
    if found != FORMAT:
        raise RunError(
            f"{folder} has run format {found}, this version reads {FORMAT}; choose another --run name"
        )
    if before != parameters:
        raise RunError(
            f"{folder} was made with other parameters ({differences(before, parameters)}); "
            "repeat those or choose another --run name"
        )
    return manifest


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """'seed was 0, now 3', for every entry that differs."""
    names = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    return ", ".join(f"{n} was {before.get(n, 'not set')!r}, now {now.get(n, 'not set')!r}" for n in names)


def acquire(path: Path, what: str, wait_s: float = 5.0) -> IO[str]:
    """An exclusive lock, freed when this process ends. Waits a little for a killed run's last kernel to go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = path.open("a")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream
        except OSError:
            if time.monotonic() > deadline:
                stream.close()
                raise RunError(f"{what} is in use by another process; wait for it or end it first") from None
            time.sleep(0.2)


def result_files(folder: Path) -> list[Path]:
    """Files of a stage that count as its outputs, sorted; checkpoints and hidden files do not."""
    inside = (p for p in folder.rglob("*") if p.is_file())
    return sorted(
        p for p in inside if not any(part.startswith(NOT_OUTPUTS) for part in p.relative_to(folder).parts)
    )


def describe(path: Path, root: Path) -> dict[str, Any]:
    return {"path": str(path.relative_to(root)), "bytes": path.stat().st_size, "sha256": store.sha256(path)}


def environment() -> dict[str, Any]:
    """Commit, versions and device, read without importing anything heavy."""
    return {"commit": git_state(), "versions": versions(PACKAGES), "device": device()}


def git_state() -> dict[str, Any]:
    """{"hash", "dirty"}; both None outside a git checkout."""

    def git(*words: str) -> str | None:
        command = ["git", "-C", str(repository_root()), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain")
    return {"hash": git("rev-parse", "--verify", "HEAD"), "dirty": None if status is None else bool(status)}


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def device() -> dict[str, Any]:
    """CPU model and the cores this process may use, memory in GiB."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model.group(1).strip() if model else platform.machine()
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "memory_GiB": round(memory, 1)}
