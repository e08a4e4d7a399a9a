"""The meta stream: a small compacted key-value log with the state that a partition needs when it is opened.

Each stream append holds one or more entries and is atomic: after a crash either all of its entries exist or none.
Payload: version (1 byte, =1), then a msgpack array of `[key (str), value (bin) or nil]`; nil removes the key. The
append covers as many stream offsets as it has entries. The WAL and the blocks of objects keep a CRC of it.

The stream stays small: once more entries are garbage than live, all live ones are written again, about a megabyte at a
time, and everything before them is trimmed. Invariant: the stream is trimmed only after the rewrite is confirmed.

Entry: `MetaStream.load`, then `get`, `put`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from sys import intern

import msgspec

from tidelog.runtime.errors import CorruptData
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.stream.stream import Stream

MIN_GARBAGE = 64
"""With fewer garbage entries the stream is not rewritten."""
_READ_BYTES = 1 << 20
REWRITE_BYTES = 1 << 20
"""A rewrite is split into appends of about this size."""
_VERSION = b"\x01"

_Entry = tuple[str, bytes | None]
_decoder = msgspec.msgpack.Decoder(list[_Entry])


class MetaStream:
    """The live keys of one meta stream, in memory and on the stream."""

    __slots__ = ("_live", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._live: dict[str, bytes] = {}

    @property
    def stream(self) -> Stream:
        """Return the underlying stream."""
        return self._stream

    async def load(self, stop_at: int, stopped: Callable[[], None]) -> None:
        """Read the stream from its start. Raises `CorruptData`, `Unavailable`.

        Calls `stopped` once, when everything before the offset `stop_at` has been applied and nothing else.
        """
        stream = self._stream
        at = stream.start_offset
        is_before = True
        while at < stream.next_offset:
            for record in await stream.read(at, stream.next_offset, _READ_BYTES):
                if is_before and record.base_offset >= stop_at:
                    is_before = False
                    stopped()
                self._apply(decode_entries(record.payload))
                at = record.base_offset + record.count
        if is_before:
            stopped()

    def _apply(self, entries: list[_Entry]) -> None:
        for key, value in entries:
            if value is None:
                self._live.pop(key, None)
            else:
                self._live[intern(key)] = value  # all partitions use the same few keys

    def get(self, key: str) -> bytes | None:
        """Return the value of `key`, or None."""
        return self._live.get(key)

    def items(self, prefix: str = "") -> list[tuple[str, bytes]]:
        """Return all live entries whose key starts with `prefix`, sorted by key."""
        return sorted((key, value) for key, value in self._live.items() if key.startswith(prefix))

    def put(self, entries: Mapping[str, bytes | None]) -> int:
        """Append all entries atomically (None removes a key). Returns the WAL end to wait for.

        Raises `WalFull`, `Overloaded` (nothing was written), `WalFailed`.
        """
        assert entries
        rows: list[_Entry] = list(entries.items())
        _, wal_end = self._stream.append(len(rows), [_VERSION, msgspec.msgpack.encode(rows)])
        self._apply(rows)
        return wal_end

    @property
    def garbage(self) -> int:
        """Return the number of entries on the stream that are no longer live."""
        return self._stream.next_offset - self._stream.start_offset - len(self._live)

    def needs_compaction(self, min_garbage: int = MIN_GARBAGE) -> bool:
        """Whether there are more garbage entries than live ones, and more than `min_garbage`."""
        return self.garbage > max(min_garbage, len(self._live))

    def keys(self, prefix: str = "") -> list[str]:
        """Return all live keys that start with `prefix`."""
        return [key for key in self._live if key.startswith(prefix)]

    def rewrite(self, keys: list[str]) -> int:
        """Write some live entries of `keys` again, and remove these from the list. Returns the WAL end to wait for.

        Repeated until the list, at first all `keys()`, is empty, this makes everything before the first append
        superfluous: the stream may be trimmed to where it began. Entries may be put in between, for each append holds
        the values of its time. Returns 0 if none of the keys is live. Raises as `put`, and then has changed nothing.
        """
        chunk: dict[str, bytes | None] = {}
        size = taken = 0
        while taken < len(keys) and size < REWRITE_BYTES:
            taken += 1
            key = keys[-taken]
            value = self._live.get(key)
            if value is not None:
                chunk[key] = value
                size += len(key) + len(value)
        wal_end = self.put(chunk) if chunk else 0
        del keys[-taken:]
        return wal_end


def decode_entries(payload: bytes | memoryview) -> list[_Entry]:
    """Return the entries of one append, in order. Raises `CorruptData`."""
    if bytes(payload[:1]) != _VERSION:
        raise CorruptData(f"a meta stream entry has the unknown version {bytes(payload[:1]).hex()}")
    try:
        return _decoder.decode(payload[1:])
    except DECODE_ERRORS as error:
        raise CorruptData(f"a meta stream entry does not parse: {error}") from error
