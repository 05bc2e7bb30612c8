"""The judge's handle on its workers: `Zygote` forks jobs, `Job` talks to one of them and knows how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from musalib.mooreeval import wire

ZYGOTE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # huge pages for all of Python's memory: a fork copies a few hundred page table entries instead of 40,000
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class InfraError(RuntimeError):
    """The machine's fault: a worker could not be started or died by itself. Never charged to a candidate."""


class JobError(Exception):
    """The job raised, crashed, hung or broke the protocol. `kind`: error, crash, timeout, exit, protocol, memory."""

    def __init__(self, kind: str, message: str, report: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind, self.report = kind, report or {}


class Zygote:
    def __init__(
        self,
        shim: Path,
        keep: list[Path],
        isolate: bool = True,
        memory_bytes: int = 16 << 30,
        cpu_seconds: int = 3600,
    ) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        settings = {
            "shim": str(shim), "isolate": isolate, "memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds,
            "keep": [str(p) for p in keep], "scratch": str(keep[0]),
        }  # fmt: skip
        environment = {**os.environ, **ZYGOTE_ENVIRONMENT}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "musalib.mooreeval.zygote", str(theirs.fileno()), json.dumps(settings)],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.control, self.lock, self._hello = mine, threading.Lock(), None

    @property
    def hello(self) -> dict[str, Any]:
        """Waits for the start (an import of torch) once; afterwards free."""
        with self.lock:
            if self._hello is None:
                self.control.settimeout(120)
                line = b""
                with contextlib.suppress(OSError):
                    while not line.endswith(b"\n"):
                        part = self.control.recv(4096)
                        if not part:
                            break
                        line += part
                if not line.endswith(b"\n"):
                    why = ""
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(2)
                    if self.process.poll() is not None and self.process.stderr:
                        why = self.process.stderr.read().decode(errors="replace")[-500:]
                    raise InfraError(
                        f"the verifier's worker did not start: {why or 'no answer within 120 s'}"
                    )
                self._hello = json.loads(line)
            return self._hello

    @property
    def isolation(self) -> str:
        return self.hello["isolation"]

    def fork(self) -> Job:
        self.hello  # noqa: B018
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        status_read, status_write = os.pipe()
        try:
            with self.lock:
                wire.send_fds(self.control, "fork", [theirs.fileno(), status_write])
        except OSError as error:
            mine.close()
            os.close(status_read)
            raise InfraError(f"the verifier's worker is gone: {error}") from error
        finally:
            theirs.close()
            os.close(status_write)
        return Job(mine, status_read)

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stderr:
            self.process.stderr.close()


class Job:
    def __init__(self, channel: socket.socket, status: int) -> None:
        self.channel, self.status = channel, status
        self._text = ""
        self.pid: int | None = None
        line = self._status_line(30.0)
        if line.startswith("pid "):
            self.pid = int(line[4:])
        else:
            self.close()
            raise InfraError(f"the sandbox did not start: {line or 'no answer'}")

    def _status_line(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while "\n" not in self._text:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.status], [], [], left)[0]:
                return ""
            part = os.read(self.status, 4096)
            if not part:
                break
            self._text += part.decode(errors="replace")
        line, _, self._text = self._text.partition("\n")
        return line

    def ask(
        self, head: dict[str, Any], payload: bytes | bytearray = b"", *, timeout_s: float
    ) -> tuple[dict[str, Any], bytearray]:
        """Send one command and wait for its answer. Raises JobError; the job is dead or useless afterwards unless kind is error."""
        self.channel.settimeout(timeout_s + 1)
        try:
            wire.send(self.channel, head, payload)
        except wire.WireTimeout as error:
            raise JobError("timeout", f"no answer within {timeout_s:g} s") from error
        except wire.WireError:
            pass  # it died; the read below tells how
        return self.answer(timeout_s)

    def answer(self, timeout_s: float) -> tuple[dict[str, Any], bytearray]:
        try:
            reply, payload = wire.receive(self.channel, time.monotonic() + timeout_s)
        except wire.WireTimeout as error:
            raise JobError("timeout", f"no answer within {timeout_s:g} s") from error
        except wire.WireError as error:
            raise self._ended(str(error)) from error
        if reply.get("event") == "error":
            kind = "memory" if reply.get("memory") else "error"
            raise JobError(kind, f"{reply.get('type')}: {reply.get('message')}", reply)
        return reply, payload

    def _ended(self, why: str) -> JobError:
        line = self._status_line(2.0)
        if not line.startswith("end "):
            return JobError("protocol", f"the process closed its channel ({why})")
        status = int(line[4:])
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = {signal.SIGSEGV: "segmentation fault", signal.SIGABRT: "abort", signal.SIGFPE: "arithmetic fault",
                    signal.SIGBUS: "bus error", signal.SIGILL: "illegal instruction", signal.SIGKILL: "killed"}.get(number, "signal")  # fmt: skip
            return JobError("crash", f"the process died: {name} (signal {number})")
        return JobError(
            "exit", f"the process ended by itself with status {os.WEXITSTATUS(status)} before it answered"
        )

    def close(self) -> None:
        """Kill the whole tree: the job is the first process of its namespace."""
        if self.channel.fileno() >= 0:
            self.channel.close()
        if self.status >= 0:
            if self.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(self.pid, signal.SIGKILL)
                self._status_line(5.0)
            os.close(self.status)
            self.status = -1

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
