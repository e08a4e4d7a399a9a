"""Hints from the source of a move to its target, so that the target opens the partition without reading the bucket.

A hint contains the newest records of the partition's meta and data streams, as of the close at the source, with
the ends of its four streams and the leader epoch that wrote them, and for an internal topic a note: its coordinator's
state. It is a *copy of data that is committed anyway*: the
target still asks the controller, and only if the controller's answer names exactly these ends, under the following
leader epoch, are the records put into memory instead of being read. A target that is ready says so in its reply, and
the hand-over then opens the streams for it. Any other hint (late, duplicate, stale, from a fenced owner, damaged) is
dropped, and the target reads the bucket.

Why equal ends imply equal bytes: an epoch has one owner; the controller accepts a hand-over only at the committed
ends; a hint is sent only when everything in it is confirmed; and the leader epochs are adjacent, so no other broker has
owned the partition in between.

Invariants: at most `MAX_HINTS` hints and `MAX_BYTES` bytes are kept, none longer than `KEEP_S`; one hint is at most
`MAX_HINT_BYTES`; a hint is used once.

No I/O here (`tidelog.broker.partitions.peers` transfers hints). Entry: `encode_hint`, `HintBox`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from crc32c import crc32c

from tidelog.controller.model.records import PartitionKey
from tidelog.runtime.errors import CorruptData, Overloaded
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.storage.records import StreamEntry
from tidelog.stream.opened import OpenedStream

VERSION = 1
MAX_HINTS = 1_024
MAX_BYTES = 64 << 20
MAX_HINT_BYTES = 2 << 20
KEEP_S = 30.0
"""A partition whose hand-over takes longer is opened from the bucket."""

Tails = dict[int, list[StreamEntry]]


class Claimed(NamedTuple):
    """What a hint has for a partition that opens here."""

    tails: Tails
    note: bytes


NOTHING_CLAIMED = Claimed({}, b"")


class _Tail(msgspec.Struct, frozen=True, array_like=True):
    stream_id: int
    records: list[tuple[int, int, bytes]]
    """`(base offset, count, payload)`, contiguous, ending at the stream's end."""


class _Hint(msgspec.Struct, frozen=True, array_like=True):
    """The body of a hint (msgpack)."""

    version: int
    topic_id: bytes
    partition: int
    leader_epoch: int
    """Of the source, which has closed the partition."""
    first_stream: int
    end_offsets: tuple[int, int, int, int]
    """Of the meta, data, time and txn streams."""
    tails: list[_Tail]
    note: bytes = b""
    """Opaque here; brokers of older versions neither send nor read one."""


class HintParams(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of the method `hint` between brokers."""

    crc: int
    """CRC32C of `body`."""
    body: bytes


def encode_hint(
    key: PartitionKey,
    leader_epoch: int,
    first_stream: int,
    end_offsets: tuple[int, int, int, int],
    tails: Mapping[int, Sequence[StreamEntry]],
    note: bytes = b"",
) -> HintParams | None:
    """Return the hint for a closed partition; None when there is nothing to send, or too much even without the note."""
    parts = [
        _Tail(stream_id, [(base, count, bytes(payload)) for base, count, payload in records])
        for stream_id, records in tails.items()
        if records
    ]
    if not parts:
        return None
    hint = _Hint(VERSION, *key, leader_epoch, first_stream, end_offsets, parts, note)
    body = msgspec.msgpack.encode(hint)
    if len(body) > MAX_HINT_BYTES and note:
        body = msgspec.msgpack.encode(msgspec.structs.replace(hint, note=b""))
    return HintParams(crc32c(body), body) if len(body) <= MAX_HINT_BYTES else None


class HintReply(msgspec.Struct, frozen=True, array_like=True):
    """Result of the method `hint`: the target serves the partition as soon as it is handed over to it."""

    replica_set: int
    """The target's replica set."""
    master_epoch: int
    """The target's current master epoch."""


@dataclass(slots=True)
class Told:
    """A hint that is being sent, or was delivered."""

    ready: HintReply | None = None
    """The target's reply; None: no reply yet, or the target is not ready."""


class HintBox:
    """The received hints that have not been used. `now` is monotonic seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._hints: dict[PartitionKey, tuple[_Hint, int, float]] = {}
        self._bytes = 0
        self.counts: Counter[str] = Counter(sent=0, unsent=0, taken=0, refused=0, used=0, stale=0, dropped=0)
        """`sent` and `unsent` hints to others; of received ones `taken` or `refused`; of those taken `used`, `stale`
        (not matching the controller's answer), `dropped` (late, replaced, or no room)."""

    def take(self, params: HintParams) -> None:
        """Store a hint. Raises `CorruptData`, `Overloaded` for one that is too large."""
        try:
            hint = self._read(params)
        except (CorruptData, Overloaded):
            self.counts["refused"] += 1
            raise
        self.counts["taken"] += 1
        key = (hint.topic_id, hint.partition)
        known = self._hints.get(key)
        if known is not None:
            self.counts["dropped"] += 1
            if known[0].leader_epoch > hint.leader_epoch:  # a newer hint arrived first
                return
            self._remove(key)
        self._hints[key] = (hint, len(params.body), self._now())
        self._bytes += len(params.body)
        self._expire()

    @staticmethod
    def _read(params: HintParams) -> _Hint:
        if len(params.body) > MAX_HINT_BYTES:
            raise Overloaded(f"a hint of {len(params.body)} bytes exceeds the limit of {MAX_HINT_BYTES} bytes")
        if crc32c(params.body) != params.crc:
            raise CorruptData("a hint fails its checksum")
        try:
            hint = msgspec.msgpack.decode(params.body, type=_Hint)
        except DECODE_ERRORS as error:
            raise CorruptData(f"a hint does not parse: {error}") from error
        if hint.version != VERSION:
            raise CorruptData(f"a hint has the unknown version {hint.version}")
        return hint

    def claim(self, key: PartitionKey, leader_epoch: int, opened: Sequence[OpenedStream]) -> Claimed:
        """Return and remove the hint for a partition that the controller has opened here; empty if it does not match.

        `leader_epoch` is the new one; `opened` are its four streams as the controller opened them.
        """
        self._expire()
        found = self._hints.get(key)
        if found is None:
            return NOTHING_CLAIMED
        hint = found[0]
        self._remove(key)
        fits = (
            hint.leader_epoch + 1 == leader_epoch
            and hint.first_stream == opened[0].stream_id
            and hint.end_offsets == tuple(stream.end_offset for stream in opened)
        )
        tails = {tail.stream_id: _records(tail) for tail in hint.tails}
        if not fits or not all(_matches(stream, tails.pop(stream.stream_id, [])) for stream in opened) or tails:
            self.counts["stale"] += 1
            return NOTHING_CLAIMED
        self.counts["used"] += 1
        return Claimed({tail.stream_id: _records(tail) for tail in hint.tails}, hint.note)

    def holds(self, key: PartitionKey, leader_epoch: int) -> bool:
        """Return whether there is an unclaimed hint from the owner before `leader_epoch`."""
        found = self._hints.get(key)
        return found is not None and found[0].leader_epoch + 1 == leader_epoch

    def _expire(self) -> None:
        oldest_kept = self._now() - KEEP_S
        while self._hints:
            key, (_, _, since) = next(iter(self._hints.items()))
            if since >= oldest_kept and len(self._hints) <= MAX_HINTS and self._bytes <= MAX_BYTES:
                return
            self._remove(key)
            self.counts["dropped"] += 1

    def _remove(self, key: PartitionKey) -> None:
        self._bytes -= self._hints.pop(key)[1]

    def __len__(self) -> int:
        return len(self._hints)

    @property
    def bytes(self) -> int:
        """Return the bytes held by hints."""
        return self._bytes


def _records(tail: _Tail) -> list[StreamEntry]:
    return [StreamEntry(*record) for record in tail.records]


def _matches(stream: OpenedStream, records: Sequence[StreamEntry]) -> bool:
    """Return whether the records are contiguous and end at the committed end of the stream."""
    at = records[0].base_offset if records else stream.end_offset
    if at < stream.start_offset:
        return False
    for record in records:
        if record.base_offset != at or record.count < 1:
            return False
        at += record.count
    return at == stream.end_offset
