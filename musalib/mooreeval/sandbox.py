"""Namespaces, mounts and limits around code that nobody has read.

Covered: no network; own process numbers (the whole tree dies with its first process, double forks and SIGTERM-immune
ones included); everything mounted read-only with private /tmp, /var/tmp and /dev/shm; no capabilities; limits on
address space, file size, core files and CPU time. Where namespaces are refused the level drops to `plain` (limits and
a process-group kill only) and the verdict says so. Not covered: kernel bugs, CPU side channels, a fork bomb's share
of the process table within the deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE, MS_BIND = 1, 2, 4, 0x4000, 1 << 18, 0x1000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_DUMPABLE = 1, 38, 24, 4
SYS_MOUNT_SETATTR = 442  # the same number on every architecture
AT_RECURSIVE, MOUNT_ATTR_RDONLY = 0x8000, 1
PRIVATE_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class SandboxError(OSError):
    """A namespace or mount was refused."""


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise SandboxError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encode = lambda text: text.encode() if text is not None else None  # noqa: E731
    _check(
        libc.mount(encode(source), encode(target), encode(kind), ctypes.c_ulong(flags), encode(data)),
        f"mount {target}",
    )


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_outer(keep: list[Path]) -> str:
    """Once per zygote: no network, a read-only view of the file system, private temporary folders.

    `keep` are folders that must stay visible (read-only) although they may lie under a private folder. Returns the
    isolation level: `namespaces` or `plain`.
    """
    try:
        flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
        if os.geteuid() == 0:
            unshare(flags)
        else:
            uid, gid = os.geteuid(), os.getegid()
            unshare(flags | CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        mount("none", "/", None, MS_REC | MS_PRIVATE)
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
        _check(
            libc.syscall(SYS_MOUNT_SETATTR, -100, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes)),
            "read-only view",
        )
        mask_private_folders(keep, "4g")  # after the line above: these stay writable
        # the last step is a trial run of what every job will need
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                unshare(CLONE_NEWNS | CLONE_NEWPID)
                os._exit(0)
            os._exit(1)
        return "namespaces" if os.waitpid(pid, 0)[1] == 0 else "plain"
    except OSError:
        return "plain"


def mask_private_folders(keep: list[Path], size: str) -> None:
    """A fresh tmpfs over each shared temporary folder; `keep` folders below it are bound back."""
    handles = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in _under_private(keep)}
    for folder in PRIVATE_FOLDERS:
        if os.path.isdir(folder):
            mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode=1777")
    for path, handle in handles.items():
        path.mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", str(path), None, MS_BIND | MS_REC)
        os.close(handle)


def _under_private(keep: list[Path]) -> list[Path]:
    """Folders to bind back, outermost first, each once."""
    inside = sorted(
        {p.resolve() for p in keep if any(p.resolve().is_relative_to(f) for f in PRIVATE_FOLDERS)}
    )
    return [p for p in inside if not any(q != p and p.is_relative_to(q) for q in inside)]


def next_child_in_own_pid_namespace(home: int) -> None:
    """The next fork gives the first process of a new process namespace. `home` is this process's own namespace.

    Going home first lets one parent do this again and again.
    """
    _check(libc.setns(home, CLONE_NEWPID), "setns")
    unshare(CLONE_NEWPID)


def enter_job(isolation: str, keep: list[Path]) -> None:
    """First process of one job, already in its own process namespace: private /proc, /tmp and mounts."""
    if isolation == "namespaces":
        unshare(CLONE_NEWNS)
        mask_private_folders(keep, "1g")
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)


def drop_privileges() -> None:
    """No capability survives, and none can be gained: a job cannot remount, trace others or open a raw socket."""
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    libc.capset(header, (ctypes.c_uint32 * 6)())


def limit(memory_bytes: int, cpu_seconds: int, file_bytes: int = 256 << 20) -> None:
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_STACK, 64 << 20),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (value, value))
