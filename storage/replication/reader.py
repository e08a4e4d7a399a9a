"""`ReplicationReader`: frames out of a stream of bytes, received into place. Sans-IO.

The caller receives into `buffer()` and reports how many bytes came (`received`), as `asyncio.BufferedProtocol` does.
Prefixes, heads and short bodies pass through one scratch buffer. The body of a long frame is received into a buffer of
its own, which the frame keeps: the WAL writes it and the cache holds it without a copy.

Bounds (rule 12): a prefix is checked before anything is allocated for its frame, and one body at a time is allocated,
of at most `max_body_bytes`.

Entry: `ReplicationReader`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.storage.replication.frames import (
    MAX_BODY_BYTES,
    MAX_HEAD_BYTES,
    PREFIX_BYTES,
    BadFrame,
    Frame,
    Prefix,
    decode,
    read_prefix,
)

SCRATCH_BYTES = MAX_HEAD_BYTES + PREFIX_BYTES
"""The longest frame without a body fits."""


class ReplicationReader:
    """The receiving side of one connection."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._scratch = bytearray(SCRATCH_BYTES)
        self._begin = self._end = 0
        """What is in the scratch buffer and not used yet."""
        self._prefix: Prefix | None = None
        self._head = b""
        self._body: bytearray | None = None
        """The body that is being received."""
        self._filled = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that it holds."""
        return len(self._scratch) + (len(self._body) if self._body is not None else 0)

    def buffer(self) -> memoryview:
        """Return where to receive next; never empty."""
        if self._body is not None:
            return memoryview(self._body)[self._filled :]
        if self._begin:
            rest = self._scratch[self._begin : self._end]
            self._scratch[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        return memoryview(self._scratch)[self._end :]

    def received(self, size: int) -> Iterator[Frame]:
        """Note `size` bytes that were put into `buffer()`; yield the frames that they complete.

        Raises `BadFrame`: the connection is of no use any more.
        """
        if self._body is None:
            self._end += size
        else:
            self._filled += size
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> Frame | None:
        if self._body is not None:
            return self._whole() if self._filled == len(self._body) else None
        if self._prefix is None:
            if self._end - self._begin < PREFIX_BYTES:
                return None
            prefix = read_prefix(self._take(PREFIX_BYTES))
            if prefix.body_bytes > self._max_body_bytes:
                raise BadFrame(
                    f"a batch of {prefix.body_bytes} bytes is over the limit of {self._max_body_bytes}",
                    hint="wal.max_record_bytes must be the same on all brokers",
                )
            self._prefix = prefix
        if self._end - self._begin < self._prefix.head_bytes:
            return None
        self._head = self._take(self._prefix.head_bytes)
        self._body = bytearray(self._prefix.body_bytes)
        self._filled = min(self._end - self._begin, len(self._body))
        self._body[: self._filled] = memoryview(self._scratch)[self._begin : self._begin + self._filled]
        self._begin += self._filled
        return self._whole() if self._filled == len(self._body) else None

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._scratch)[self._begin : self._begin + size])
        self._begin += size
        return taken

    def _whole(self) -> Frame:
        prefix, body = self._prefix, self._body
        assert prefix is not None and body is not None
        self._prefix = self._body = None
        self._filled = 0
        return decode(prefix, self._head, memoryview(body))
