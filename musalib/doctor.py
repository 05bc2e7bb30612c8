"""`musalib doctor`: what this machine has, what it lacks, and the line that fixes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from musalib import runs

OLDEST_GCC = 11
LEAST_DISK_GIB = 3.0


@dataclass(frozen=True)
class Check:
    """`ok` is None for a warning: it works, but less well."""

    name: str
    ok: bool | None
    found: str
    fix: str = ""


def run_quietly(*command: str) -> tuple[int, str]:
    """Exit status and output; 127 when the program is not there or does not answer within 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout + done.stderr


def compiler() -> Check:
    fix = f"install g++ {OLDEST_GCC} or newer: apt install g++, dnf install gcc-c++, or conda install gxx"
    status, text = run_quietly("g++", "-dumpfullversion")
    if status != 0:
        return Check("compiler", False, "g++ was not found", fix)
    version = text.strip().splitlines()[0]
    recent = int(re.match(r"\d+", version).group()) >= OLDEST_GCC if re.match(r"\d+", version) else False
    return Check("compiler", recent, f"g++ {version}, {shutil.which('g++')}", "" if recent else fix)


def python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, f"{version}, {sys.executable}", "" if ok else "use Python 3.11 or newer")


def package(name: str, fix: str = "make setup") -> Check:
    try:
        return Check(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, False, "not installed", fix)


def ninja() -> Check:
    beside = Path(sys.executable).with_name("ninja")
    found = str(beside) if beside.exists() else shutil.which("ninja")
    return Check(
        "ninja", bool(found), found or "not found", "" if found else "pip install ninja (make setup does)"
    )


def isolation() -> Check:
    """Which sandbox a candidate would get."""
    if shutil.which("bwrap") and run_quietly("bwrap", "--ro-bind", "/", "/", "--unshare-all", "true")[0] == 0:
        return Check("isolation", True, "bubblewrap")
    status, _ = run_quietly(
        "unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "true"
    )
    if status == 0:
        return Check("isolation", True, "user, mount, pid and network namespaces (unshare)")
    fix = "install bubblewrap, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1)"
    return Check("isolation", None, "no namespaces: candidates run with limits only", fix)


def disk() -> Check:
    root = runs.runs_root()
    free = shutil.disk_usage(root if root.exists() else Path.cwd()).free / 2**30
    ok = free >= LEAST_DISK_GIB
    return Check(
        "disk", ok, f"{free:.1f} GiB free", "" if ok else f"free {LEAST_DISK_GIB:.0f} GiB or set MUSALIB_RUNS"
    )


def kernel() -> Check:
    """The interpreter behind the kernel called python3: it has to be this one."""
    try:
        from jupyter_client.kernelspec import KernelSpecManager

        argv = KernelSpecManager().get_kernel_spec("python3").argv
    except Exception as error:  # no kernelspec, or a damaged one
        return Check("kernel", False, f"no python3 kernel ({error})", "make setup")
    used = sys.executable if Path(argv[0]).name.startswith("python") and "/" not in argv[0] else argv[0]
    ok = used == sys.executable
    return Check(
        "kernel", ok, f"python3 runs {used}", "" if ok else "python -m ipykernel install --sys-prefix"
    )


CHECKS: tuple[Callable[[], Check], ...] = (
    compiler,
    python,
    lambda: package("torch"),
    lambda: package("transformers"),
    lambda: package("trl"),
    lambda: package("papermill"),
    ninja,
    kernel,
    isolation,
    disk,
)


def report() -> bool:
    """Print one line per check, with the fix below what fails; True when everything needed is there."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    marks = {True: ("ok", "green"), False: ("missing", "bold red"), None: ("warning", "yellow")}
    checks = [check() for check in CHECKS]
    for check in checks:
        word, style = marks[check.ok]
        console.print(Text(f"{word:<8}", style), Text(f"{check.name:<13}{check.found}"), sep="")
        if check.fix:
            console.print(Text(f"{'':<21}-> {check.fix}", style))
    return all(check.ok is not False for check in checks)
