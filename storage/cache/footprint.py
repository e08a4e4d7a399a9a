"""The memory footprint of a cached record, and the form of payloads that makes it predictable.

A batch arrives as a view of the request's frame, and a view keeps the whole frame alive: 100 bytes of a frame of 1 MiB
would cost 1 MiB. So `own` copies a payload that is small, or that fills less than half of its buffer. An uncopied
payload fills more than half, so no other record can reference that buffer too, and `footprint` charges the buffer
in full. A small payload is cheaper as a copy anyway: 270 bytes of overhead instead of 650 with a view and a bytearray.

The overheads are those that tracemalloc measures for a record in the log cache and the upload plan: payload object, two
tuples, two integers, list and deque slots (tests/storage/test_footprint.py verifies them).

Entry: `own`, `footprint`.
"""

from __future__ import annotations

from tidelog.runtime.types import Buffer

COPY_BYTES = 4096
"""Payloads up to this size are always copied: about 100 ns, which saves a view and a bytearray."""
RECORD_BYTES = 272
"""Overhead of a record whose payload is `bytes`."""
VIEW_RECORD_BYTES = 656
"""Overhead of a record whose payload is a view: the view and the buffer's own object in addition."""


def own(payload: Buffer) -> bytes | memoryview:
    """Return the payload in the form to keep: `bytes`, or a view of over half of a `bytes` or `bytearray`."""
    if type(payload) is bytes:
        return payload
    length = len(payload)
    if length <= COPY_BYTES:
        return bytes(payload)
    view = payload if type(payload) is memoryview else memoryview(payload)
    buffer = view.obj
    if (type(buffer) is bytearray or type(buffer) is bytes) and length * 2 > len(buffer):
        return view
    return bytes(payload)


def footprint(payload: bytes | memoryview) -> int:
    """Return the bytes of memory of a cached record with this payload, which `own` returned."""
    if type(payload) is bytes:
        return len(payload) + RECORD_BYTES
    return len(payload.obj) + VIEW_RECORD_BYTES  # type: ignore[union-attr, arg-type]  # bytes or bytearray, see `own`
