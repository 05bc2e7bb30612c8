"""A process that has imported torch once and forks one sandboxed child per job (`python -m musalib.mooreeval.zygote`).

It never sees an expected output, never initialises a device and stays single-threaded, so a fork is safe and costs
milliseconds where an import costs seconds. Per job it forks twice: the first child makes the process namespace and
reports how its own child ended, over a descriptor that candidate code never holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from musalib.mooreeval import sandbox, wire


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the judge, which then closes this process
    keep = [Path(p) for p in settings["keep"]]
    isolation = sandbox.enter_outer(keep) if settings["isolate"] else "plain"

    import torch  # after the namespaces: threads must not exist before them

    torch.set_num_threads(1)
    from musalib.mooreeval import runner

    runner.warm_up(settings["shim"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stderr was for a failed start; nobody reads it from here on
    control.sendall((json.dumps({"ready": True, "isolation": isolation, "torch": torch.__version__}) + "\n").encode())
    serve(control, settings, isolation)


def serve(control: socket.socket, settings: dict, isolation: str) -> None:
    while True:
        readable, _, _ = select.select([control], [], [], 0.5)
        reap()
        if not readable:
            continue
        try:
            text, fds = wire.receive_fds(control, 2)
        except OSError:
            return
        if not text:  # the judge is gone
            return
        if len(fds) != 2:
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            supervise(fds[0], fds[1], settings, isolation)  # does not return
        for fd in fds:
            os.close(fd)


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def supervise(channel_fd: int, status_fd: int, settings: dict, isolation: str) -> None:
    """Make the namespaces, fork the job, report its process number and its end. Never returns."""
    code = 1
    try:
        sandbox.die_with_parent()
        if isolation == "namespaces":
            sandbox.unshare(sandbox.CLONE_NEWNS | sandbox.CLONE_NEWPID | sandbox.CLONE_NEWIPC)
        pid = os.fork()
        if pid == 0:
            os.close(status_fd)
            job(channel_fd, settings, isolation)
        os.close(channel_fd)
        os.write(status_fd, f"pid {pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        if isolation == "plain":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        os.write(status_fd, f"end {status}\n".encode())
        code = 0
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(status_fd, f"fault {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def job(channel_fd: int, settings: dict, isolation: str) -> None:
    """The sandboxed process: candidate or reference code runs below this line. Never returns."""
    try:
        sandbox.die_with_parent()
        os.setsid()
        sandbox.enter_job(isolation, [Path(p) for p in settings["keep"]])
        work = Path("/tmp/job" if isolation == "namespaces" else settings["scratch"])
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, channel_fd)
        os.closerange(channel_fd + 1, 4096)
        sandbox.limit(settings["memory_bytes"], settings["cpu_seconds"])
        sandbox.drop_privileges()
        from musalib.mooreeval import runner

        runner.serve(socket.socket(fileno=channel_fd))
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
