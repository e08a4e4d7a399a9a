"""Which batches and markers belong to aborted transactions, for one pass over a stretch of a log.

Entry: `AbortedTxns`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.batch.batch import BatchHeader
from tidelog.stream.txn_index import AbortedTxn


class AbortedTxns:
    """The entries of the txn index that overlap a stretch of offsets."""

    __slots__ = ("_by_producer", "_markers", "entries")

    def __init__(self, entries: Iterable[AbortedTxn]) -> None:
        self.entries = tuple(entries)
        self._by_producer: dict[int, list[AbortedTxn]] = {}
        self._markers: set[int] = set()
        for entry in self.entries:
            self._by_producer.setdefault(entry.producer_id, []).append(entry)
            self._markers.add(entry.last_offset)

    def covers(self, header: BatchHeader) -> bool:
        """Return whether a batch of data was aborted."""
        if not header.is_transactional or header.is_control:
            return False
        return any(
            one.first_offset <= header.base_offset <= one.last_offset
            for one in self._by_producer.get(header.producer_id, ())
        )

    def has_marker(self, offset: int) -> bool:
        """Return whether an entry ends with the marker at `offset`."""
        return offset in self._markers
