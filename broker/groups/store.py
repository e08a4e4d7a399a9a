"""The content of one partition of `__consumer_offsets` in memory: its groups and their offsets. Sans-I/O.

Records are added with `replay` while the partition is loaded; afterwards changes are persisted first and then applied.
A removal (expiry, DeleteGroups, OffsetDelete, a deleted topic) is planned, written as tombstones, and applied or
undone. `live_records` and `pending_records` are the whole content in the minimum number of records: replaying them
gives the same store.

Offsets of open transactions are in `pending` until the marker of their producer (`tidelog.broker.groups.pending`). A
removal takes them too, and they keep the committed offset of their key, and their group, from expiring.

Invariants: a group with offsets, pending ones included, or with a durable record is in `groups`; a group being deleted
is Dead, so that no member joins or commits before the tombstones are durable.

Entry: `GroupStore`.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from tidelog.batch.errors import CorruptRecord
from tidelog.broker.coordinators.store import KeyValue, TxnProducer
from tidelog.broker.coordinators.timers import Now
from tidelog.broker.groups.errors import GroupError
from tidelog.broker.groups.messages import Limits
from tidelog.broker.groups.offsets import OffsetTable
from tidelog.broker.groups.pending import PendingOffsets
from tidelog.broker.groups.records import (
    GroupKey,
    GroupValue,
    OffsetKey,
    OffsetValue,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
    parse_group_value,
    parse_key,
    parse_offset_value,
)
from tidelog.broker.groups.state import ClassicGroup, GroupState


@dataclass(slots=True)
class Removal:
    """A planned removal."""

    offsets: list[OffsetKey] = field(default_factory=list)
    groups: list[ClassicGroup] = field(default_factory=list)


class GroupStore:
    """The groups and offsets of one offsets partition."""

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        self.groups: dict[str, ClassicGroup] = {}
        self.offsets = OffsetTable()
        self.pending = PendingOffsets()
        self.members_bytes = 0
        """Memory of the members of all groups, as of their last `count`."""
        self._limits = limits
        self._rng = rng
        self._replayed: dict[str, GroupValue] = {}
        self._unknown: dict[bytes, bytes] = {}
        """Records of unknown types from a newer version: kept unchanged, so that a downgrade loses nothing."""

    # --- loading -------------------------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply the next record of the log. Raises `CorruptRecord`."""
        parsed = parse_key(key)
        if isinstance(parsed, OffsetKey):
            if value is None:
                self._forget(parsed)
            else:
                self._commit(parsed, parse_offset_value(value))
        elif isinstance(parsed, GroupKey):
            if value is None:
                self._replayed.pop(parsed.group, None)
            else:
                self._replayed[parsed.group] = parse_group_value(value)
        elif value is None:
            self._unknown.pop(key, None)
        else:
            self._unknown[key] = value

    def replay_pending(self, producer: TxnProducer, key: bytes, value: bytes | None) -> None:
        """Apply the next record of a transaction. Raises `CorruptRecord` unless it is a committed offset."""
        parsed = parse_key(key)
        if not isinstance(parsed, OffsetKey) or value is None:
            raise CorruptRecord(f"a record in a transaction of producer {producer.id} is no committed offset")
        self.pending.put(producer, parsed, parse_offset_value(value))

    def replay_marker(self, producer_id: int, *, commit: bool) -> None:
        """Apply the next marker."""
        self._end_transaction(producer_id, commit=commit)

    def finish_loading(self, now: Now) -> None:
        """Create the groups after the log was read to its end. Their sessions start now."""
        for group_id, value in self._replayed.items():
            self.groups[group_id] = ClassicGroup.load(group_id, value, self._limits, self._rng, now)
        self._replayed.clear()
        for group_id in [*self.offsets.groups(), *self.pending.groups()]:
            self.obtain(group_id)

    # --- groups --------------------------------------------------------------------------------------------------

    def obtain(self, group_id: str) -> ClassicGroup:
        """Return the group; creates an Empty group if it does not exist."""
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = ClassicGroup(group_id, self._limits, self._rng)
        return group

    def count(self, group: ClassicGroup) -> None:
        """Count the memory of a group's members anew."""
        held = group.members.held_bytes
        self.members_bytes += held - group.counted_bytes
        group.counted_bytes = held

    def drop_if_blank(self, group: ClassicGroup) -> None:
        """Remove a group without state: a rejected first join must leave nothing behind."""
        if not group.is_blank or group.group_id in self.offsets or group.group_id in self.pending:
            return
        if self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]

    def put_offsets(self, offsets: Sequence[tuple[OffsetKey, OffsetValue]]) -> None:
        """Apply commits whose records are durable."""
        for key, value in offsets:
            self._commit(key, value)
            self.obtain(key.group)

    def put_pending(self, producer: TxnProducer, offsets: Sequence[tuple[OffsetKey, OffsetValue]]) -> None:
        """Apply commits of an open transaction whose records are durable."""
        for key, value in offsets:
            self.pending.put(producer, key, value)
            self.obtain(key.group)

    def end_transaction(self, producer_id: int, *, commit: bool) -> None:
        """Apply a durable marker: the producer's pending offsets become the committed ones, or are dropped."""
        for group_id in self._end_transaction(producer_id, commit=commit) & self.groups.keys():
            self.drop_if_blank(self.groups[group_id])

    def _end_transaction(self, producer_id: int, *, commit: bool) -> set[str]:
        taken = self.pending.take(producer_id)
        if commit:
            for order, key, value in taken:
                self.offsets.put(key, value)
                self.pending.overtake(key, order)
        return {one.key.group for one in taken}

    def _commit(self, key: OffsetKey, value: OffsetValue) -> None:
        """Commit an offset outside of transactions. It overtakes pending ones, unless it is the committed one again."""
        if self.pending.has(key):
            known = self.offsets.get(*key)
            if known is None or encode_offset_value(known) != encode_offset_value(value):
                self.pending.overtake(key)
        self.offsets.put(key, value)

    def _forget(self, key: OffsetKey) -> None:
        self.offsets.remove(key)
        self.pending.overtake(key)

    # --- removals ------------------------------------------------------------------------------------------------

    def plan_expiry(self, retention_ms: int, now: Now) -> Removal:
        """Plan the removal of expired offsets, and of Empty groups without offsets."""
        removal = Removal()
        for group in list(self.groups.values()):
            expiry = group.expiry() if group.state is not GroupState.DEAD else None
            if expiry is None:
                continue
            expired = self.offsets.expired(group.group_id, expiry, retention_ms, now.wall_ms)
            expired = [key for key in expired if not self.pending.has(key)]
            removal.offsets += expired
            kept = sum(map(len, self.offsets.topics(group.group_id).values())) - len(expired)
            if not kept and group.group_id not in self.pending and group.is_deletable:
                self._plan_group(removal, group)
        return removal

    def plan_delete_group(self, group_id: str) -> tuple[GroupError, Removal]:
        """DeleteGroups: plan the removal of a group and all its offsets, if it has no members."""
        group = self.groups.get(group_id)
        if group is None or group.state is GroupState.DEAD:
            return GroupError.GROUP_ID_NOT_FOUND, Removal()
        if not group.is_deletable:
            return GroupError.NON_EMPTY_GROUP, Removal()
        keys = [key for key, _ in [*self.offsets.items(group_id), *self.pending.values(group_id)]]
        removal = Removal(list(dict.fromkeys(keys)))
        self._plan_group(removal, group)
        return GroupError.NONE, removal

    def plan_delete_offsets(self, group_id: str, keys: Sequence[OffsetKey]) -> tuple[list[GroupError], Removal]:
        """OffsetDelete: return an error per key and the planned removal. Check `offset_delete_error` first."""
        group = self.groups.get(group_id)
        errors = [
            GroupError.GROUP_SUBSCRIBED_TO_TOPIC
            if group is not None and len(group.members) and group.is_subscribed(key.topic)
            else GroupError.NONE
            for key in keys
        ]
        known = [
            key
            for key, error in zip(keys, errors, strict=True)
            if error is GroupError.NONE and (self.offsets.get(*key) is not None or self.pending.has(key))
        ]
        return errors, Removal(list(dict.fromkeys(known)))

    def offset_delete_error(self, group_id: str) -> GroupError:
        """OffsetDelete: return the error for the whole group, if any."""
        group = self.groups.get(group_id)
        if group is None or group.state is GroupState.DEAD:
            return GroupError.GROUP_ID_NOT_FOUND
        if len(group.members) and not group.is_consumer:
            return GroupError.NON_EMPTY_GROUP
        return GroupError.NONE

    def plan_topics_deleted(self, names: Collection[str]) -> Removal:
        """Plan the removal of the offsets of deleted topics."""
        return Removal(list(dict.fromkeys([*self.offsets.of_topics(names), *self.pending.of_topics(names)])))

    def tombstones(self, removal: Removal) -> list[KeyValue]:
        """The tombstones of a removal: offsets first, so that an interrupted removal leaves a complete group."""
        records: list[KeyValue] = [(encode_offset_key(key), None) for key in removal.offsets]
        records += [(encode_group_key(group.group_id), None) for group in removal.groups if group.durable is not None]
        return records

    def apply(self, removal: Removal) -> None:
        """Apply a removal whose tombstones are durable."""
        touched = {key.group for key in removal.offsets}
        for key in removal.offsets:
            self._forget(key)
        for group in removal.groups:
            if self.groups.get(group.group_id) is group:
                del self.groups[group.group_id]
        for group_id in touched & self.groups.keys():
            self.drop_if_blank(self.groups[group_id])

    def undo(self, removal: Removal) -> None:
        """Undo a removal whose tombstones could not be written."""
        for group in removal.groups:
            if self.groups.get(group.group_id) is group:
                group.undo_delete()

    def _plan_group(self, removal: Removal, group: ClassicGroup) -> None:
        group.begin_delete()
        removal.groups.append(group)

    def counts(self) -> dict[str, int]:
        """The numbers of groups, committed offsets and pending offsets."""
        return {"groups": len(self.groups), "offsets": self.offsets.count, "pending": self.pending.count}

    # --- snapshot ------------------------------------------------------------------------------------------------

    def live_records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield everything durable and not pending once. It must not change meanwhile; groups may be added."""
        for group in list(self.groups.values()):
            if group.durable is not None:
                yield encode_group_key(group.group_id), encode_group_value(group.durable)
        for group_id in self.offsets.groups():
            for key, value in self.offsets.items(group_id):
                yield encode_offset_key(key), encode_offset_value(value)
        yield from self._unknown.items()

    def pending_records(self) -> Iterator[tuple[TxnProducer, list[KeyValue]]]:
        """Yield the offsets of open transactions, in order."""
        for producer, run in self.pending.runs():
            yield producer, [(encode_offset_key(one.key), encode_offset_value(one.value)) for one in run]
