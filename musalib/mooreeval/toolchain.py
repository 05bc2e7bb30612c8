"""What is built once per machine: the shim, the precompiled headers, the list of names the headers use.

Everything lies in one folder per (compiler, torch, Python, sources of this package), so a new torch or an edited
header gets a new folder and never meets an old precompiled file. Building takes about half a minute of CPU time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
BUILD_VERSION = "1"  # raise it when how the files below are built changes
LIGHT_FLAGS = ("-std=c++20", "-fPIC", "-fopenmp", "-fvisibility=hidden")
OPTIMISATION = ("", "-O0", "-O1", "-O2", "-O3", "-Ofast")  # each has its own precompiled light header


class ToolchainError(RuntimeError):
    """The machine cannot build; the message says what to install. Never a verdict on a candidate."""


def cache_root() -> Path:
    """`$MUSALIB_CACHE`, else `$XDG_CACHE_HOME/musalib`, else `~/.cache/musalib`."""
    if explicit := os.environ.get("MUSALIB_CACHE"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "musalib"


def compiler_environment() -> dict[str, str]:
    """Environment of every compiler call: no ccache, English messages, nothing else of the caller's settings."""
    keep = {
        k: v
        for k, v in os.environ.items()
        if k in ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "CPATH", "MUSALIB_CASE")
    }
    return {**keep, "CCACHE_DISABLE": "1", "LC_ALL": "C", "GCC_COLORS": ""}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file, so that two processes never build the same thing at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Toolchain:
    compiler: str
    folder: Path  # what is built from this package's sources
    shared: Path  # the real headers, precompiled: independent of this package's sources, 0.8 GB

    @classmethod
    def locate(cls, root: Path | None = None) -> Toolchain:
        """Find the compiler and name the folder; builds nothing. Raises ToolchainError without a compiler."""
        compiler = os.environ.get("CXX") or "g++"
        path = shutil.which(compiler)
        if path is None:
            raise ToolchainError(
                f"no C++ compiler: {compiler!r} is not on PATH. Install g++ >= 11 (Debian: apt-get install g++) or set CXX"
            )
        version = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=False
        ).stdout.splitlines()[:1]
        digest = hashlib.sha256()
        for part in (path, *version, metadata.version("torch"), sys.version, BUILD_VERSION, *LIGHT_FLAGS):
            digest.update(part.encode())
        shared = (root or cache_root()) / f"headers-{digest.hexdigest()[:16]}"
        for source in sorted(NATIVE.rglob("*.*")):
            digest.update(source.read_bytes())
        return cls(path, (root or cache_root()) / f"toolchain-{digest.hexdigest()[:16]}", shared)

    @cached_property
    def torch_root(self) -> Path:
        """Folder of the torch package, found without importing torch (2 s)."""
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise ToolchainError("torch is not installed in this environment: run `make setup`")
        return Path(spec.origin).parent

    @cached_property
    def full_flags(self) -> list[str]:
        """Compile flags as `load_inline` writes them into build.ninja on a CPU build of torch."""
        include = self.torch_root / "include"
        return [
            "-DTORCH_EXTENSION_NAME=musa_ext", "-DTORCH_API_INCLUDE_EXTENSION_H",
            "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include"),
            "-isystem", sysconfig.get_paths()["include"], "-fPIC", "-std=c++20", "-fopenmp",
        ]  # fmt: skip

    @cached_property
    def full_link_flags(self) -> list[str]:
        lib = self.torch_root / "lib"
        return ["-shared", f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]

    @property
    def shim(self) -> Path:
        return self.folder / "musa_shim.so"

    @property
    def full_include(self) -> Path:
        return self.shared / "full"

    def light_include(self, optimisation: str) -> Path:
        return self.folder / f"light{optimisation or '-none'}"

    @cached_property
    def header_names(self) -> frozenset[str]:
        """Every identifier in the preprocessed real header: names a batched candidate must not define."""
        return frozenset((self.shared / "header_names.txt").read_text().split())

    def run(
        self, arguments: list[str], timeout_s: float, cwd: Path | None = None, program: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One call of the compiler (or of `program`). At the deadline the driver and its children (cc1plus, as, ld) die together."""
        command = [program or self.compiler, *arguments]
        process = subprocess.Popen(
            command, cwd=cwd, env=compiler_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> Toolchain:
        """Build what is missing. Safe to call from several processes; each step is replaced atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if (self.folder / "ready").exists():
            return self
        with locked(self.folder / "lock"):
            if (self.folder / "ready").exists():
                return self
            say("preparing the compiler cache (once per machine, about a minute) ...")
            self._build_shim()
            with locked(self.shared / "lock"):
                self._build_full()
            for optimisation in ("", "-O2"):
                self.prepare_light(optimisation, hold_lock=False)
            (self.folder / "ready").touch()
        return self

    def prepare_light(self, optimisation: str, hold_lock: bool = True) -> Path:
        """Precompiled light header for one -O level; about a second, then shared."""
        include = self.light_include(optimisation)
        target = include / "torch/extension.h.gch"
        if not target.exists():
            with locked(self.folder / "lock") if hold_lock else contextlib.nullcontext():
                if not target.exists():
                    header = NATIVE / "light/torch/extension.h"
                    flags = [*LIGHT_FLAGS, *([optimisation] if optimisation else [])]
                    self._build(["-w", *flags, "-x", "c++-header", str(header)], target)
        return include

    def _build_shim(self) -> None:
        lib = self.torch_root / "lib"
        source = str(NATIVE / "shim.cpp")
        self._build(
            [
                "-w",
                "-O2",
                *self.full_flags,
                source,
                *self.full_link_flags,
                f"-Wl,-rpath,{lib}",
                "-Wl,-soname,musa_shim.so",
            ],
            self.shim,
        )

    def _build_full(self) -> None:
        header = str(self.torch_root / "include/torch/extension.h")
        self._build(
            ["-w", *self.full_flags, "-x", "c++-header", header], self.full_include / "torch/extension.h.gch"
        )
        target = self.shared / "header_names.txt"
        if target.exists():
            return
        names = self.run([*self.full_flags, "-E", "-P", "-x", "c++", header], 300).stdout
        partial = target.with_suffix(".part")
        partial.write_text("\n".join(sorted(set(re.findall(r"[A-Za-z_]\w*", names)))))
        partial.replace(target)

    def _build(self, arguments: list[str], target: Path) -> None:
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        done = self.run([*arguments, "-o", str(partial)], 1200)
        if done.returncode != 0:
            raise ToolchainError(
                f"cannot build {target.name}: {first_error(done.stderr) or done.stderr[-500:]}"
            )
        partial.replace(target)


def first_error(text: str) -> str | None:
    return next((line for line in text.splitlines() if "error" in line or "No space" in line), None)
