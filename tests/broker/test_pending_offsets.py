"""Offsets of open transactions against a model that keeps every record's offset, as Kafka does.

The model commits a pending offset only if its record is newer than the committed one's. The log is replayed at any
point: whole, with a part of a snapshot at its end, or from a complete snapshot on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.batch.errors import CorruptRecord
from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.coordinators.timers import Now
from tidelog.broker.groups.messages import Limits
from tidelog.broker.groups.pending import PendingOffsets
from tidelog.broker.groups.records import (
    OffsetKey,
    OffsetValue,
    encode_group_key,
    encode_offset_key,
    encode_offset_value,
)
from tidelog.broker.groups.store import GroupStore, Removal

GROUPS = ("g", "h")
KEYS = [OffsetKey(group, topic, partition) for group in GROUPS for topic in ("t", "u") for partition in (0, 1)]
NOW = Now(0, 1_000)


class Plain(NamedTuple):
    key: bytes
    value: bytes | None


class Pending(NamedTuple):
    producer: TxnProducer
    key: bytes
    value: bytes


class End(NamedTuple):
    producer_id: int
    commit: bool


Entry = Plain | Pending | End


class Model:
    """Every value with the offset of its record; nothing is dropped before its transaction ends."""

    def __init__(self) -> None:
        self.next_offset = 0
        self.committed: dict[OffsetKey, tuple[int, OffsetValue]] = {}
        self.pending: dict[int, dict[OffsetKey, tuple[int, OffsetValue]]] = {}

    def offset(self) -> int:
        self.next_offset += 1
        return self.next_offset

    def commit(self, key: OffsetKey, value: OffsetValue) -> None:
        self.committed[key] = self.offset(), value

    def put(self, producer_id: int, key: OffsetKey, value: OffsetValue) -> None:
        self.pending.setdefault(producer_id, {})[key] = self.offset(), value

    def end(self, producer_id: int, commit: bool) -> None:
        self.offset()
        for key, (at, value) in self.pending.pop(producer_id, {}).items():
            if commit and (key not in self.committed or self.committed[key][0] < at):
                self.committed[key] = at, value

    def forget(self, key: OffsetKey) -> None:
        self.offset()
        self.committed.pop(key, None)
        for offsets in self.pending.values():
            offsets.pop(key, None)

    def values(self) -> dict[OffsetKey, OffsetValue]:
        return {key: value for key, (_, value) in self.committed.items()}

    def undecided(self) -> set[tuple[int, OffsetKey, OffsetValue]]:
        """The pending offsets that a commit of their transactions would make the committed ones."""
        return {
            (producer_id, key, value)
            for producer_id, offsets in self.pending.items()
            for key, (at, value) in offsets.items()
            if key not in self.committed or self.committed[key][0] < at
        }


def new_store() -> GroupStore:
    return GroupStore(Limits(0, 10), random.Random(1))


def replayed(log: list[Entry]) -> GroupStore:
    store = new_store()
    for entry in log:
        if isinstance(entry, Plain):
            store.replay(*entry)
        elif isinstance(entry, Pending):
            store.replay_pending(*entry)
        else:
            store.replay_marker(entry.producer_id, commit=entry.commit)
    store.finish_loading(NOW)
    return store


def snapshot(store: GroupStore) -> Iterator[Entry]:
    for key, value in store.live_records():
        yield Plain(key, value)
    for producer, records in store.pending_records():
        for key, found in records:
            assert found is not None
            yield Pending(producer, key, found)


def committed(store: GroupStore) -> dict[OffsetKey, OffsetValue]:
    return {key: value for group in store.offsets.groups() for key, value in store.offsets.items(group)}


def pending(store: GroupStore) -> list[tuple[TxnProducer, OffsetKey, OffsetValue]]:
    return [(producer, one.key, one.value) for producer, run in store.pending.runs() for one in run]


class Partition:
    """A store, the log that it came from, and the model."""

    def __init__(self) -> None:
        self.store = new_store()
        self.log: list[Entry] = []
        self.model = Model()
        self.epochs = dict.fromkeys(range(3), 0)
        self.clock = 0

    def value(self, offset: int) -> OffsetValue:
        self.clock += 1
        return OffsetValue(offset, 1, "m", self.clock, topic_id=b"i" * 16)

    def commit(self, key: OffsetKey, offset: int) -> None:
        value = self.value(offset)
        self.log.append(Plain(encode_offset_key(key), encode_offset_value(value)))
        self.store.put_offsets([(key, value)])
        self.model.commit(key, value)

    def put(self, key: OffsetKey, offset: int, producer_id: int) -> None:
        value = self.value(offset)
        producer = TxnProducer(producer_id, self.epochs[producer_id])
        self.log.append(Pending(producer, encode_offset_key(key), encode_offset_value(value)))
        self.store.put_pending(producer, [(key, value)])
        self.model.put(producer_id, key, value)

    def end(self, producer_id: int, commit: bool) -> None:
        self.epochs[producer_id] += 1
        self.log.append(End(producer_id, commit))
        self.store.end_transaction(producer_id, commit=commit)
        self.model.end(producer_id, commit)

    def remove(self, removal: Removal) -> None:
        self.log += [Plain(*record) for record in self.store.tombstones(removal)]
        self.store.apply(removal)
        for key in removal.offsets:
            self.model.forget(key)

    def rewrite(self, part: float | None) -> None:
        """A snapshot, cut off after a part of it; None: complete, and the log before it deleted."""
        written = list(snapshot(self.store))
        if part is None:
            self.log = written
        else:
            self.log += written[: int(len(written) * part)]

    def restart(self) -> None:
        self.store = replayed(self.log)

    def check(self) -> None:
        assert committed(self.store) == self.model.values()
        assert {(producer.id, key, value) for producer, key, value in pending(self.store)} == self.model.undecided()
        assert self.store.pending.count == len(self.model.undecided())
        for key in KEYS:
            assert self.store.pending.has(key) == any(one == key for _, one, _ in self.model.undecided())
        with_offsets = {key.group for key in self.model.values()} | {key.group for _, key, _ in self.model.undecided()}
        assert set(self.store.groups) == with_offsets
        assert set(self.store.pending.groups()) == {key.group for _, key, _ in self.model.undecided()}
        again = replayed(self.log)
        assert committed(again) == committed(self.store)
        assert pending(again) == pending(self.store)
        assert set(again.groups) == set(self.store.groups)


KEY = st.sampled_from(KEYS)
PRODUCER = st.integers(0, 2)
STEP: Any = st.one_of(
    st.tuples(st.just("commit"), KEY, st.integers(0, 3)),
    st.tuples(st.just("put"), KEY, st.integers(0, 3), PRODUCER),
    st.tuples(st.just("put"), KEY, st.integers(0, 3), PRODUCER),
    st.tuples(st.just("end"), PRODUCER, st.booleans()),
    st.tuples(st.just("delete_offsets"), KEY),
    st.tuples(st.just("delete_group"), st.sampled_from(GROUPS)),
    st.tuples(st.just("delete_topic"), st.sampled_from(("t", "u"))),
    st.tuples(st.just("rewrite"), st.one_of(st.none(), st.floats(0, 1))),
    st.tuples(st.just("restart")),
)


@settings(max_examples=examples(300))
@given(st.lists(STEP, max_size=40))
def test_the_store_follows_kafkas_rules_live_and_replayed_whatever_is_rewritten(
    steps: list[tuple[Any, ...]],
) -> None:
    one = Partition()
    for name, *given_ in steps:
        if name == "delete_offsets":
            one.remove(one.store.plan_delete_offsets(given_[0].group, given_)[1])
        elif name == "delete_group":
            one.remove(one.store.plan_delete_group(given_[0])[1])
        elif name == "delete_topic":
            one.remove(one.store.plan_topics_deleted(given_))
        else:
            getattr(one, name)(*given_)
        one.check()


@given(st.lists(st.tuples(KEY, st.integers(0, 3), PRODUCER), max_size=20))
def test_a_snapshot_has_each_pending_offset_once_and_keeps_their_order(puts: list[tuple[OffsetKey, int, int]]) -> None:
    one = Partition()
    for key, offset, producer_id in puts:
        one.put(key, offset, producer_id)
    latest = {(producer_id, key): at for at, (key, _, producer_id) in enumerate(puts)}
    expected = [pair for pair, _ in sorted(latest.items(), key=lambda item: item[1])]
    assert [(producer.id, key) for producer, key, _ in pending(one.store)] == expected


def test_a_commit_in_a_transaction_is_not_seen_before_its_marker_and_an_aborted_one_never() -> None:
    one = Partition()
    one.commit(KEYS[0], 1)
    one.put(KEYS[0], 2, 0)
    assert committed(one.store)[KEYS[0]].offset == 1
    one.end(0, commit=False)
    assert committed(one.store)[KEYS[0]].offset == 1
    one.put(KEYS[0], 3, 0)
    one.end(0, commit=True)
    assert committed(one.store)[KEYS[0]].offset == 3
    one.check()


def test_pending_offsets_never_expire_nor_does_what_they_may_replace() -> None:
    one = Partition()
    one.commit(KEYS[0], 1)
    one.commit(KEYS[1], 1)
    one.put(KEYS[0], 2, 0)
    one.put(OffsetKey("h", "t", 0), 2, 0)
    late = Now(0, 1 << 40)
    one.remove(one.store.plan_expiry(1, late))
    assert set(committed(one.store)) == {KEYS[0]}
    assert set(one.store.groups) == {"g", "h"}
    one.end(0, commit=False)
    one.remove(one.store.plan_expiry(1, late))
    assert committed(one.store) == {} and one.store.groups == {}
    one.check()


def test_offsets_may_be_pending_for_several_producers() -> None:
    offsets = PendingOffsets()
    value = OffsetValue(1, -1, "", 0)
    offsets.put(TxnProducer(1, 0), KEYS[0], value)
    offsets.put(TxnProducer(2, 5), KEYS[0], value)
    offsets.put(TxnProducer(1, 0), KEYS[1], value)
    assert offsets.count == 3 and "g" in offsets
    assert [(producer, len(run)) for producer, run in offsets.runs()] == [
        (TxnProducer(1, 0), 1),
        (TxnProducer(2, 5), 1),
        (TxnProducer(1, 0), 1),
    ]
    assert [one.key for one in offsets.take(1)] == [KEYS[0], KEYS[1]]
    assert offsets.take(1) == []
    assert offsets.values("g") == [(KEYS[0], value)]
    assert offsets.of_topics({"t"}) == [KEYS[0]]
    offsets.overtake(KEYS[0])
    assert offsets.count == 0 and "g" not in offsets and offsets.groups() == []


@pytest.mark.parametrize(
    ("key", "value"), [(encode_group_key("g"), b"\0\0"), (encode_offset_key(KEYS[0]), None), (b"\0\x63", b"")]
)
def test_what_is_no_offset_in_a_transaction_is_damage(key: bytes, value: bytes | None) -> None:
    with pytest.raises(CorruptRecord, match="producer 7"):
        new_store().replay_pending(TxnProducer(7, 0), key, value)
