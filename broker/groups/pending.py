"""The offsets of open transactions of the groups of one offsets partition. Sans-I/O.

An offset of a transaction is *pending* from its confirmed record until the marker of its producer: a commit makes it
the committed offset, an abort drops it. A commit must not go back behind what was committed later, so a pending offset
is *overtaken* by any newer record that decides the key: another commit, or the end of another producer's transaction.
An overtaken offset is dropped at once, because no marker can make it count any more; all that are here would count.

Which record is newer is told by the order in which they are put here, which is that of the log. A snapshot of the
partition writes pending offsets once more. Such a record says nothing new: an offset that is put again unchanged keeps
its place in the order, so that a log with a part of a snapshot at its end is read as if that part were not there.

Invariants: a producer, a key or a group is here only while it has a pending offset; orders are unique.

Entry: `PendingOffsets`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.groups.records import OffsetKey, OffsetValue


class PendingOffset(NamedTuple):
    """An offset of an open transaction."""

    order: int
    """Larger than that of any earlier record."""
    key: OffsetKey
    value: OffsetValue


class PendingOffsets:
    """Pending offsets by producer id and by key."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._producers: dict[int, dict[OffsetKey, PendingOffset]] = {}
        self._keys: dict[str, dict[OffsetKey, set[int]]] = {}
        """By group and key, the ids of the producers."""
        self._last_order = 0
        self.count = 0

    def __contains__(self, group: object) -> bool:
        return group in self._keys

    def put(self, producer: TxnProducer, key: OffsetKey, value: OffsetValue) -> None:
        """Add an offset of the producer's open transaction; it replaces an earlier one of the same transaction."""
        offsets = self._producers.setdefault(producer.id, {})
        self._epochs[producer.id] = max(producer.epoch, self._epochs.get(producer.id, -1))
        known = offsets.get(key)
        if known is not None and known.value == value:
            return
        self._last_order += 1
        offsets[key] = PendingOffset(self._last_order, key, value)
        if known is None:
            self.count += 1
            self._keys.setdefault(key.group, {}).setdefault(key, set()).add(producer.id)

    def take(self, producer_id: int) -> list[PendingOffset]:
        """Remove and return the offsets of the producer's open transaction, in order."""
        taken = sorted(self._producers.get(producer_id, {}).values())
        for one in taken:
            self._drop(producer_id, one.key)
        return taken

    def overtake(self, key: OffsetKey, before: int | None = None) -> None:
        """Drop the pending offsets of the key: those with orders below `before`, or all of them."""
        for producer_id in list(self._keys.get(key.group, {}).get(key, ())):
            if before is None or self._producers[producer_id][key].order < before:
                self._drop(producer_id, key)

    def has(self, key: OffsetKey) -> bool:
        """Whether an open transaction may still change the committed offset of the key."""
        return key in self._keys.get(key.group, ())

    def groups(self) -> list[str]:
        """The groups with pending offsets."""
        return list(self._keys)

    def values(self, group: str) -> list[tuple[OffsetKey, OffsetValue]]:
        """All pending offsets of a group; a key occurs once for each transaction."""
        return [
            (key, self._producers[producer_id][key].value)
            for key, producers in self._keys.get(group, {}).items()
            for producer_id in producers
        ]

    def of_topics(self, names: Collection[str]) -> list[OffsetKey]:
        """The keys with pending offsets for these topics, in all groups."""
        return [key for keys in self._keys.values() for key in keys if key.topic in names]

    def runs(self) -> Iterator[tuple[TxnProducer, list[PendingOffset]]]:
        """All pending offsets in order, those of one producer that follow each other together."""
        everything = sorted(
            (one.order, producer_id, one)
            for producer_id, offsets in self._producers.items()
            for one in offsets.values()
        )
        run: list[PendingOffset] = []
        of = -1
        for _, producer_id, one in everything:
            if run and producer_id != of:
                yield TxnProducer(of, self._epochs[of]), run
                run = []
            run.append(one)
            of = producer_id
        if run:
            yield TxnProducer(of, self._epochs[of]), run

    def _drop(self, producer_id: int, key: OffsetKey) -> None:
        del self._producers[producer_id][key]
        self.count -= 1
        if not self._producers[producer_id]:
            del self._producers[producer_id], self._epochs[producer_id]
        keys = self._keys[key.group]
        keys[key].discard(producer_id)
        if not keys[key]:
            del keys[key]
        if not keys:
            del self._keys[key.group]
