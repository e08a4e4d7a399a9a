"""What a cached record truly costs in memory, and how payloads are kept so that this can be said.

A batch arrives as a view of the request's frame, and a view keeps the whole frame alive: 100 bytes of a frame of 1 MiB
would cost 1 MiB. So `own` copies a payload that is small, or that fills less than half of its buffer; what it leaves
uncopied fills more than half, so no other record can do the same with that buffer, and `footprint` charges the buffer
in full. A small payload is cheaper as a copy anyway: 270 bytes of overhead, not 650 with a view and a bytearray.

The overheads are what tracemalloc measures for a record in the log cache and the upload plan: payload object, two
tuples, two integers, list and deque slots (tests/storage/test_footprint.py holds them to it).

Entry: `own`, `footprint`.
"""

from __future__ import annotations

from storage.object_store import Buffer

COPY_BYTES = 4096
"""Payloads up to this size are copied whatever their buffer: some 100 ns, for which a view and a bytearray go."""
RECORD_BYTES = 272
"""Overhead of a record whose payload is `bytes`."""
VIEW_RECORD_BYTES = 656
"""Overhead of a record whose payload is a view: the view and the buffer's own object in addition."""


def own(payload: Buffer) -> bytes | memoryview:
    """The payload as it is to be kept: `bytes`, or a view that fills more than half of a `bytes` or `bytearray`."""
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
    """Bytes of memory that a cached record with this payload costs, which `own` returned."""
    if type(payload) is bytes:
        return len(payload) + RECORD_BYTES
    return len(payload.obj) + VIEW_RECORD_BYTES  # type: ignore[union-attr, arg-type]  # bytes or bytearray, see `own`
