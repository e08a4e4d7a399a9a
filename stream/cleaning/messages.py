"""The messages between a broker and the process that decides a round of log compaction for it. Sans-IO.

A message is a head (msgpack) and a body: the payloads of the records that the head describes, one after the other. The
broker asks `Begin`, then `Note` until it is told to stop, `Seal`, then `CleanRecords`: the calls of
`tidelog.stream.cleaning.cleaner.Cleaning`. Both sides are of one version: the broker starts the process.

Entry: `Answerer` for the process, `described` for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidelog.batch.batch import CorruptRecord
from tidelog.runtime.errors import InvalidInput
from tidelog.runtime.types import Buffer
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.cleaner import Cleaning, Mark
from tidelog.stream.txn_index import AbortedTxn

Places = list[tuple[int, int, int]]
"""Of each record its base offset, its count, and the length of its payload."""


class Begin(msgspec.Struct, tag=True, array_like=True):
    """The arguments of `Cleaning`."""

    first_dirty: int
    end: int
    map_bytes: int
    now_ms: int
    delete_retention_ms: int


class Note(msgspec.Struct, tag=True, array_like=True):
    """See `Cleaning.note`."""

    records: Places
    aborted: list[AbortedTxn]


class Seal(msgspec.Struct, tag=True, array_like=True):
    """See `Cleaning.seal`."""


class CleanRecords(msgspec.Struct, tag=True, array_like=True):
    """See `Cleaning.clean`; `mark`: what the answer before this one has given."""

    records: Places
    aborted: list[AbortedTxn]
    mark: Mark


Request = Begin | Note | Seal | CleanRecords


class Noted(msgspec.Struct, tag=True, array_like=True):
    """Answers `Begin` and `Note`."""

    noted: int
    keys: int
    capacity: int
    goes_on: bool
    mark: Mark


class Sealed(msgspec.Struct, tag=True, array_like=True):
    """Answers `Seal`. The body has the chunks of the offsets that are left, in the order of these numbers."""

    end: int
    chunks: list[int]


class RecordsCleaned(msgspec.Struct, tag=True, array_like=True):
    """Answers `CleanRecords`. The body has the payloads that have changed; of each, its record and its length."""

    changed: list[tuple[int, int]]
    mark: Mark


class Refused(msgspec.Struct, tag=True, array_like=True):
    """Answers `Note` and `CleanRecords`: a batch does not decode."""

    message: str


Reply = Noted | Sealed | RecordsCleaned | Refused


def described(records: Sequence[StreamEntry]) -> Places:
    """Return what a head says of records; the body has their payloads."""
    return [(base, count, len(payload)) for base, count, payload in records]


def _records(places: Places, body: memoryview) -> list[StreamEntry]:
    found: list[StreamEntry] = []
    at = 0
    for base, count, length in places:
        found.append(StreamEntry(base, count, body[at : at + length]))
        at += length
    return found


class Answerer:
    """Answers the requests of one round."""

    def __init__(self) -> None:
        self._round: Cleaning | None = None

    def answer(self, request: Request, body: memoryview) -> tuple[Reply, Sequence[Buffer]]:
        """Return the head and the body of the answer."""
        if isinstance(request, Begin):
            self._round = Cleaning(
                request.first_dirty,
                request.end,
                map_bytes=request.map_bytes,
                now_ms=request.now_ms,
                delete_retention_ms=request.delete_retention_ms,
            )
            return self._noted(self._round, True), ()
        assert self._round is not None, "a round begins first"
        try:
            return self._go_on(self._round, request, body)
        except (CorruptRecord, InvalidInput) as error:
            return Refused(error.message), ()

    def _go_on(
        self, cleaning: Cleaning, request: Note | Seal | CleanRecords, body: memoryview
    ) -> tuple[Reply, Sequence[Buffer]]:
        if isinstance(request, Note):
            goes_on = cleaning.note(_records(request.records, body), AbortedTxns(request.aborted))
            return self._noted(cleaning, goes_on), ()
        if isinstance(request, Seal):
            end = cleaning.seal()
            chunks = cleaning.remains().left.chunks()
            return Sealed(end, list(chunks)), list(chunks.values())
        records = _records(request.records, body)
        cleaning.rewind(request.mark)
        after = cleaning.clean(records, AbortedTxns(request.aborted))
        changed = [at for at, one in enumerate(after) if one is not records[at]]
        payloads = [after[at].payload for at in changed]
        return RecordsCleaned([(at, len(after[at].payload)) for at in changed], cleaning.mark()), payloads

    @staticmethod
    def _noted(cleaning: Cleaning, goes_on: bool) -> Noted:
        return Noted(cleaning.noted, cleaning.keys, cleaning.capacity, goes_on, cleaning.mark())
