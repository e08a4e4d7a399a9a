"""Frames on the socket between a broker and a process that decides rounds of log compaction.

A frame is the length of the head (uint32), that of the body (uint64), the head, the body.

Entry: `send`, `receive`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from struct import Struct

from tidelog.runtime.types import Buffer

_LENGTHS = Struct(">IQ")
_BUFFERS_AT_ONCE = 512
"""Below IOV_MAX of Linux (1,024)."""


def send(one: socket.socket, head: bytes, body: Sequence[Buffer]) -> None:
    """Send a frame. Raises `OSError`, `TimeoutError`."""
    size = sum(map(len, body))
    left = [memoryview(part) for part in (_LENGTHS.pack(len(head), size), head, *body) if len(part)]
    left.reverse()
    while left:
        sent = one.sendmsg(left[: -_BUFFERS_AT_ONCE - 1 : -1])
        while sent:
            part = left.pop()
            if sent < len(part):
                left.append(part[sent:])
                break
            sent -= len(part)


def receive(one: socket.socket) -> tuple[bytes, memoryview]:
    """Receive a frame: head and body. Raises `EOFError` at the end of the stream, `OSError`, `TimeoutError`."""
    head_bytes, body_bytes = _LENGTHS.unpack(_exactly(one, _LENGTHS.size))
    head = bytes(_exactly(one, head_bytes))
    return head, _exactly(one, body_bytes)


def _exactly(one: socket.socket, size: int) -> memoryview:
    data = memoryview(bytearray(size))
    at = 0
    while at < size:
        got = one.recv_into(data[at:])
        if not got:
            raise EOFError("the other side has closed the connection")
        at += got
    return data.toreadonly()
