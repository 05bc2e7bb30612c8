"""Frames between the judge and its workers: a JSON head and raw bytes, never pickle towards the judge.

A frame is `<I json length><Q payload length><json><payload>`. The reader bounds both and has a deadline, because the
other end may be hostile: whatever arrives is data, and a malformed frame is a `WireError`, nothing else.
"""

from __future__ import annotations

import array
import json
import select
import socket
import struct
import time
from typing import Any

HEAD = struct.Struct("<IQ")
MAX_JSON = 8 << 20
MAX_PAYLOAD = 32 << 30


class WireError(Exception):
    """The peer closed the channel or sent something that is no frame."""


class WireTimeout(WireError):
    """Nothing complete arrived before the deadline."""


def send(channel: socket.socket, head: dict[str, Any], payload: bytes | memoryview = b"") -> None:
    text = json.dumps(head).encode()
    try:
        channel.sendall(HEAD.pack(len(text), len(payload)) + text)
        if len(payload):
            channel.sendall(payload)
    except TimeoutError as error:
        raise WireTimeout("the peer stopped reading") from error
    except OSError as error:
        raise WireError(f"channel closed while sending: {error}") from error


def receive(channel: socket.socket, deadline: float | None = None) -> tuple[dict[str, Any], bytearray]:
    """One frame. `deadline` is a time.monotonic() value."""
    json_size, payload_size = HEAD.unpack(_exactly(channel, HEAD.size, deadline))
    if json_size > MAX_JSON or payload_size > MAX_PAYLOAD:
        raise WireError("oversized frame")
    try:
        head = json.loads(_exactly(channel, json_size, deadline))
    except ValueError as error:
        raise WireError("malformed frame") from error
    if not isinstance(head, dict):
        raise WireError("malformed frame")
    return head, _exactly(channel, payload_size, deadline)


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytearray:
    buffer = bytearray()
    while len(buffer) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([channel], [], [], left)[0]:
                raise WireTimeout("no answer before the deadline")
        try:
            part = channel.recv(min(size - len(buffer), 1 << 22))
        except OSError as error:
            raise WireError(f"channel closed: {error}") from error
        if not part:
            raise WireError("channel closed")
        buffer += part
    return buffer


def send_fds(channel: socket.socket, text: str, fds: list[int]) -> None:
    """One short line with file descriptors attached (judge to zygote)."""
    channel.sendmsg([text.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def receive_fds(channel: socket.socket, count: int) -> tuple[str, list[int]]:
    fds = array.array("i")
    data, ancillary, _, _ = channel.recvmsg(1 << 12, socket.CMSG_SPACE(count * fds.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data.decode(), list(fds)
