"""A process that has imported torch once and forks one sandboxed child per job (`python -m musalib.mooreeval.zygote`).

It never sees an expected output, never initialises a device and stays single-threaded, so a fork is safe and costs
milliseconds where an import costs seconds. How a job ended is reported from here, over a descriptor that candidate
code never holds.
"""

from __future__ import annotations

import contextlib
import gc
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
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C belongs to the judge, which then closes this process
    keep = [Path(p) for p in settings["keep"]]
    isolation = sandbox.enter_outer(keep) if settings["isolate"] else "plain"

    import torch  # after the namespaces: threads must not exist before them

    torch.set_num_threads(1)
    from musalib.mooreeval import runner

    runner.warm_up(settings["shim"])
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of this process
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 2
    )  # stderr was for a failed start; nobody reads it from here on
    control.sendall(
        (json.dumps({"ready": True, "isolation": isolation, "torch": torch.__version__}) + "\n").encode()
    )
    serve(control, settings, isolation)


def serve(control: socket.socket, settings: dict, isolation: str) -> None:
    """Fork on request and report each job's process number and end, until the judge closes the control channel."""
    home = os.open("/proc/self/ns/pid", os.O_RDONLY)
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, status descriptor)
    while True:
        readable, _, _ = select.select([control, *running], [], [])
        for handle in set(readable) & set(running):
            report_end(*running.pop(handle), isolation)
            os.close(handle)
        if control not in readable:
            continue
        try:
            text, fds = wire.receive_fds(control, 2)
        except OSError:
            return
        if not text:  # the judge is gone
            return
        if len(fds) == 2:
            start(fds[0], fds[1], home, running, settings, isolation)


def start(
    channel: int, status: int, home: int, running: dict[int, tuple[int, int]], settings: dict, isolation: str
) -> None:
    try:
        if isolation == "namespaces":
            sandbox.next_child_in_own_pid_namespace(home)
        pid = os.fork()
    except OSError as error:
        os.write(status, f"fault {type(error).__name__}: {error}\n".encode())
        os.close(status)
        os.close(channel)
        return
    if pid == 0:
        os.close(status)
        job(channel, settings, isolation)  # does not return
    os.close(channel)
    with contextlib.suppress(OSError):
        os.write(status, f"pid {pid}\n".encode())
    running[os.pidfd_open(pid)] = (pid, status)


def report_end(pid: int, status: int, isolation: str) -> None:
    _, code = os.waitpid(pid, 0)
    if isolation == "plain":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # the judge may not wait for it any more
        os.write(status, f"end {code}\n".encode())
    os.close(status)


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
