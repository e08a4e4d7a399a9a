"""Log compaction against a naive model: each key's last value from any offset, and nothing that goes back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.batch.batch import (
    Compression,
    ControlType,
    Record,
    build_batch,
    build_control_batch,
    check_crc,
    iter_records,
    parse_header,
    rebuild,
    set_base_offset,
    set_log_append_time,
)
from tidelog.storage.records import StreamEntry
from tidelog.stream.cleaning.aborted import AbortedTxns
from tidelog.stream.cleaning.cleaner import KEYS_SHARE, Cleaning
from tidelog.stream.cleaning.key_map import ENTRY_BYTES, KeyMap
from tidelog.stream.cleaning.offset_set import OffsetSet
from tidelog.stream.cleaning.plan import LogFacts, RecoverableOffset, plan_round
from tidelog.stream.log_config import LogConfig
from tidelog.stream.segments import Segment, retention_start, should_roll
from tidelog.stream.txn_index import AbortedTxn

NOW = 1_700_000_000_000
KEPT_MS = 1_000
Reading = list[tuple[int, bytes, bytes | None]]


class Log:
    """A log of batches, its transactions, and what is known of aborted ones."""

    def __init__(self) -> None:
        self.records: list[StreamEntry] = []
        self.index: list[AbortedTxn] = []
        self.open: dict[int, int] = {}

    @property
    def end(self) -> int:
        return self.records[-1].base_offset + self.records[-1].count if self.records else 0

    @property
    def stable(self) -> int:
        return min([*self.open.values(), self.end])

    def put(self, *pairs: tuple[bytes, bytes | None], pid: int = -1, codec: int = 0) -> None:
        records = [Record(0, NOW + self.end + n, key, value, (("h", key),)) for n, (key, value) in enumerate(pairs)]
        self.add(
            build_batch(
                records,
                producer_id=pid,
                producer_epoch=3 if pid >= 0 else -1,
                base_sequence=self.end if pid >= 0 else -1,
                compression=codec,
                transactional=pid >= 0,
                leader_epoch=5,
            )
        )
        if pid >= 0:
            self.open.setdefault(pid, self.records[-1].base_offset)

    def end_txn(self, pid: int, kind: ControlType) -> None:
        self.add(build_control_batch(kind, producer_id=pid, producer_epoch=3, coordinator_epoch=0, timestamp=NOW))
        first = self.open.pop(pid, None)
        if kind is ControlType.ABORT and first is not None:
            marker = self.records[-1].base_offset
            self.index.append(AbortedTxn(pid, first, marker, min([*self.open.values(), marker + 1])))

    def add(self, batch: bytes) -> None:
        data = bytearray(batch)
        set_base_offset(data, self.end)
        self.records.append(StreamEntry(self.end, parse_header(data).last_offset_delta + 1, bytes(data)))

    def read(self, offset: int, end: int, *, committed: bool) -> Reading:
        """What a consumer takes of `[offset, end)`, by the rules of the Java client."""
        found: Reading = []
        aborted: set[int] = set()
        waiting = sorted(
            (one for one in self.index if one.last_offset >= offset and one.first_offset < end),
            key=lambda one: one.first_offset,
        )
        for record in self.records:
            if record.base_offset + record.count <= offset or record.base_offset >= end or record.is_hole:
                continue
            header = parse_header(record.payload)
            assert check_crc(record.payload)
            assert (header.base_offset, header.next_offset) == (record.base_offset, record.base_offset + record.count)
            while waiting and waiting[0].first_offset <= header.last_offset:
                aborted.add(waiting.pop(0).producer_id)
            if header.is_control:
                kind = [one.key for one in iter_records(record.payload)]
                if kind == [b"\0\0\0\0"]:
                    aborted.discard(header.producer_id)
                continue
            if committed and header.is_transactional and header.producer_id in aborted:
                continue
            found += [
                (one.offset, one.key or b"", one.value)
                for one in iter_records(record.payload)
                if one.offset >= offset and one.key is not None
            ]
        return found

    def clean(
        self, first_dirty: int, end: int, *, now_ms: int = NOW, keys: int = 1_000, cuts: random.Random | None = None
    ) -> int:
        """A round, in pieces if `cuts` says where; returns its end."""
        map_bytes = int(keys * ENTRY_BYTES / KEYS_SHARE) + 1
        cleaning = Cleaning(first_dirty, end, map_bytes=map_bytes, now_ms=now_ms, delete_retention_ms=KEPT_MS)
        index = AbortedTxns(self.index)
        cleaning.note(self.records, index)
        ended = cleaning.seal()
        done: list[StreamEntry] = []
        at = 0
        while at < len(self.records):
            step = cuts.randrange(1, 5) if cuts is not None else len(self.records)
            mark = cleaning.mark()
            given = [hole_if_gone(cleaning, one) for one in self.records[at : at + step]]
            piece = cleaning.clean(given, index)
            if cuts is not None and cuts.random() < 0.3:  # refused: once more
                cleaning.rewind(mark)
                assert cleaning.clean(self.records[at : at + step], index) == piece, "whether gone ones are read or not"
            done += piece
            at += step
        assert [(one.base_offset, one.count) for one in done] == [(one.base_offset, one.count) for one in self.records]
        self.records = done
        return ended


def hole_if_gone(cleaning: Cleaning, record: StreamEntry) -> StreamEntry:
    """What is read of a batch in a round."""
    gone = cleaning.remains().is_gone(record.base_offset, record.base_offset + record.count)
    return StreamEntry(record.base_offset, record.count, b"") if gone else record


def last_values(reading: Reading) -> dict[bytes, bytes | None]:
    return {key: value for _, key, value in reading}


def alive(reading: Reading) -> dict[bytes, bytes]:
    return {key: value for key, value in last_values(reading).items() if value is not None}


def make(rng: random.Random, steps: int, keys: int) -> Log:
    log = Log()
    for step in range(steps):
        pid = rng.choice((-1, -1, 1, 2, 3))
        if pid >= 0 and pid in log.open and rng.random() < 0.5:
            log.end_txn(pid, rng.choice((ControlType.COMMIT, ControlType.ABORT)))
            continue
        if pid >= 0 and pid not in log.open and rng.random() < 0.1:
            log.end_txn(pid, rng.choice((ControlType.COMMIT, ControlType.ABORT)))  # of an empty transaction
            continue
        pairs = [
            (b"k%d" % rng.randrange(keys), None if rng.random() < 0.3 else b"%d.%d" % (step, n))
            for n in range(rng.randrange(1, 4))
        ]
        log.put(*pairs, pid=pid, codec=rng.choice(list(Compression)))
    return log


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 8))
def test_each_keys_last_value_is_read_from_any_offset_after_any_rounds(seed: int, steps: int, keys: int) -> None:
    rng = random.Random(seed)
    log = make(rng, steps, keys)
    before = {at: log.read(at, log.stable, committed=True) for at in range(log.stable + 1)}
    first_dirty, furthest, now_ms = 0, 0, NOW
    bounds = sorted(rng.choice(log.records).base_offset for _ in range(3))
    for bound in [*bounds, log.end]:
        end = min(bound, log.stable)
        if end <= first_dirty:
            continue
        ended = log.clean(first_dirty, end, now_ms=now_ms, keys=rng.choice((3, 5, 100)), cuts=rng)
        lost = rng.random() < 0.2  # the record of the round in the meta stream
        first_dirty = first_dirty if lost else ended
        now_ms += rng.choice((0, KEPT_MS // 2, 2 * KEPT_MS))
        for at, was in before.items():
            now = log.read(at, log.stable, committed=True)
            assert all(one[0] < two[0] for one, two in pairwise(now)), "offsets only go forward"
            assert set(now) <= set(was), "nothing is read that was not there"
            assert alive(now) == alive(was), f"from {at}"
        furthest = max(furthest, ended)
        assert not any(one.is_hole for one in log.records if one.base_offset + one.count == furthest)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_a_whole_round_leaves_one_record_of_each_key_and_a_second_one_changes_nothing(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    log = make(rng, steps, 5)
    before = log.read(0, log.stable, committed=True)
    stable = log.stable
    if not stable:
        return
    assert log.clean(0, stable) == stable
    after = log.read(0, log.stable, committed=True)
    assert len({key for _, key, _ in after}) == len(after)
    assert last_values(after) == last_values(before), "tombstones are still there"
    assert after == log.read(0, log.stable, committed=False), "aborted records are gone"
    once = list(log.records)
    log.clean(0, log.stable)
    assert log.records == once
    log.clean(log.stable, log.stable, now_ms=NOW + 2 * KEPT_MS)
    assert all(value is not None for _, _, value in log.read(0, log.stable, committed=True)[:-1])
    assert alive(log.read(0, log.stable, committed=True)) == alive(before)


def test_a_batch_keeps_all_but_its_records_count_and_largest_timestamp() -> None:
    log = Log()
    log.put((b"a", b"1"), (b"b", b"1"), (b"c", b"1"), pid=7, codec=Compression.ZSTD)
    log.end_txn(7, ControlType.COMMIT)
    log.put((b"a", b"2"), (b"c", b"2"))
    was = parse_header(log.records[0].payload)
    log.clean(0, log.end)
    now = parse_header(log.records[0].payload)
    assert now._replace(crc=0, length=0, count=0, max_timestamp=0) == was._replace(
        crc=0, length=0, count=0, max_timestamp=0
    )
    (left,) = iter_records(log.records[0].payload)
    assert (left.offset, left.key, left.value, left.headers) == (1, b"b", b"1", (("h", b"b"),))
    assert (now.count, now.max_timestamp, left.timestamp) == (1, NOW + 1, NOW + 1)
    assert check_crc(log.records[0].payload)


def test_a_tombstone_stays_until_its_horizon_and_the_last_batch_stays_empty() -> None:
    log = Log()
    log.put((b"a", b"1"))
    log.put((b"a", None))
    log.put((b"z", b"1"))
    log.put((b"z", None))
    log.clean(0, log.end)
    assert [one.is_hole for one in log.records] == [True, False, True, False]
    header = parse_header(log.records[1].payload)
    assert (header.has_delete_horizon, header.base_timestamp) == (True, NOW + KEPT_MS)
    (tombstone,) = iter_records(log.records[1].payload)
    assert (tombstone.timestamp, tombstone.value) == (NOW + 1, None)
    log.clean(0, log.end, now_ms=NOW + KEPT_MS - 1)
    assert [one.is_hole for one in log.records] == [True, False, True, False]
    log.clean(0, log.end, now_ms=NOW + KEPT_MS)
    assert [one.is_hole for one in log.records] == [True, True, True, False]
    last = parse_header(log.records[3].payload)
    assert (last.count, last.last_offset_delta, last.max_timestamp) == (0, 0, -1)
    log.put((b"y", b"1"))
    log.clean(4, log.end, now_ms=NOW + KEPT_MS)
    assert [one.is_hole for one in log.records] == [True, True, True, True, False]


@pytest.mark.parametrize("timestamp", [NOW, 5 - (1 << 63)])
def test_records_of_any_bytes_and_times_are_rebuilt(timestamp: int) -> None:
    """Kafka's clients name headers by UTF-8; what others send is kept as it is."""
    records = [
        Record(0, NOW, b"a", b"1", (("\udcff\udc80", b"x"),)),
        Record(1, timestamp, b"b", None, (("\udcfe", None),)),
    ]
    log = Log()
    log.add(build_batch(records))
    log.put((b"a", b"2"))
    log.clean(0, log.end)
    rebuilt = log.records[0].payload
    (left,) = iter_records(rebuilt)
    assert check_crc(rebuilt) and parse_header(rebuilt).has_delete_horizon
    assert left == Record(1, timestamp, b"b", None, (("\udcfe", None),))


def test_markers_go_when_nothing_refers_to_them() -> None:
    log = Log()
    log.put((b"a", b"1"), pid=1)
    log.end_txn(1, ControlType.COMMIT)  # 1: its data are superseded
    log.put((b"b", b"1"), pid=2)
    log.end_txn(2, ControlType.COMMIT)  # 3: its data stay
    log.put((b"c", b"1"), pid=3)
    log.end_txn(3, ControlType.ABORT)  # 5: in the index
    log.end_txn(4, ControlType.ABORT)  # 6: of nothing
    log.put((b"a", b"2"))
    log.clean(0, log.end)
    assert [one.is_hole for one in log.records] == [True, False, False, False, True, False, False, False]
    log.clean(0, log.end, now_ms=NOW + KEPT_MS)
    assert [one.is_hole for one in log.records] == [True, True, False, False, True, False, True, False]


def test_behind_a_batch_that_cannot_be_read_into_no_tombstone_goes() -> None:
    log = Log()
    log.put((b"a", b"x" * (65 << 20)), codec=Compression.ZSTD)
    log.put((b"a", None))
    log.put((b"b", b"1"))
    for _ in range(3):
        log.clean(0, log.end, now_ms=NOW + 10 * KEPT_MS)
    assert not any(one.is_hole for one in log.records)
    assert not parse_header(log.records[1].payload).has_delete_horizon


def test_log_append_time_survives() -> None:
    data = bytearray(build_batch([Record(0, 5, b"a", b"1"), Record(0, 9, b"b", b"1")]))
    set_log_append_time(data, NOW)
    again = rebuild(parse_header(data), list(iter_records(data))[1:])
    (left,) = iter_records(again)
    assert (left.timestamp, left.offset, parse_header(again).is_log_append_time) == (NOW, 1, True)
    assert parse_header(rebuild(parse_header(data), [])).max_timestamp == NOW


def test_a_full_map_takes_a_batch_whole_or_not_at_all() -> None:
    keys = KeyMap(3 * ENTRY_BYTES)
    assert keys.add([b"a", b"b"], [1, 2])
    assert not keys.add([b"c", b"d"], [3, 4])
    assert (len(keys), keys.capacity) == (2, 3)
    assert keys.add([b"a", b"c", b"c"], [5, 6, 7])
    assert keys.last_offsets([b"a", b"b", b"c", b"d"]) == [5, 2, 7, -1]
    assert sorted(keys.offsets()) == [2, 5, 7]


@given(st.lists(st.lists(st.integers(0, 300), max_size=40), max_size=30))
@settings(max_examples=examples(60), deadline=None)
def test_the_map_is_a_dict_that_is_bounded(batches: list[list[int]]) -> None:
    keys, wanted, offset = KeyMap(200 * ENTRY_BYTES), dict[bytes, int](), 0
    for batch in batches:
        noted = {b"%d" % key: offset + n for n, key in enumerate(batch)}
        fits = len(wanted.keys() | noted.keys()) <= keys.capacity
        assert keys.add([b"%d" % key for key in batch], range(offset, offset + len(batch))) == fits
        if fits:
            wanted |= noted
        offset += len(batch)
    assert keys.last_offsets([b"%d" % key for key in range(301)]) == [wanted.get(b"%d" % n, -1) for n in range(301)]
    assert (len(keys), sorted(keys.offsets())) == (len(wanted), sorted(wanted.values()))


def test_a_key_takes_the_memory_that_it_is_counted_with() -> None:
    keys = KeyMap(100_000 * ENTRY_BYTES)
    for first in range(0, 100_000, 500):
        assert keys.add([b"%d" % key for key in range(first, first + 500)], range(first, first + 500))
        assert keys.size_bytes <= len(keys) * ENTRY_BYTES + 30_000
    assert not keys.add([b"one more"], [0])


@given(st.sets(st.integers(0, 400_000), max_size=60), st.integers(0, 400_000), st.integers(1, 200_000))
@settings(max_examples=examples(60), deadline=None)
def test_a_set_of_offsets_knows_which_it_has(offsets: set[int], start: int, count: int) -> None:
    found = OffsetSet()
    for offset in offsets:
        found.add(offset)
    flags = found.flags(start, start + count)
    assert {start + at for at, flag in enumerate(flags) if flag == "1"} == {
        each for each in offsets if start <= each < start + count
    }
    assert len(flags) == count
    assert found.any(start, start + count) == ("1" in flags)


def test_a_round_ends_where_its_offsets_do_not_fit() -> None:
    log = Log()
    batch = bytearray(build_batch([Record(0, NOW, b"k", b"v")] * 40_000))
    for _ in range(16):
        log.add(bytes(batch))
    cleaning = Cleaning(0, log.end, map_bytes=1 << 20, now_ms=NOW, delete_retention_ms=KEPT_MS)
    assert not cleaning.note(log.records, AbortedTxns(()))
    assert cleaning.seal() == 13 * 40_000, "eight chunks of 65,536 offsets"


# --- when, and how far -----------------------------------------------------------------------------------------------


def segments(*sizes: int) -> list[Segment]:
    return [Segment(10 * n, NOW + n, 0, size, NOW + n, NOW + n + 1, NOW + n) for n, size in enumerate(sizes)]


def facts(first_dirty: int = 0, **more: int) -> LogFacts:
    bounds = {"log_start": 0, "last_stable": 1_000, "recoverable": 1_000, **more}
    return LogFacts(segments(100, 100, 100, 100, 50), first_dirty=first_dirty, **bounds)


@pytest.mark.parametrize(
    ("more", "end"),
    [({}, 40), ({"last_stable": 33}, 33), ({"recoverable": 25}, 25), ({"recoverable": -1}, -1)],
)
def test_a_round_ends_at_the_active_segment_the_last_stable_offset_and_what_recovery_reads(
    more: dict[str, int], end: int
) -> None:
    assert plan_round(facts(**more), NOW + 100, LogConfig(cleanup_policy="compact")).end == end


def test_a_segment_with_a_young_record_and_all_after_it_are_left_alone() -> None:
    config = LogConfig(cleanup_policy="compact", min_compaction_lag_ms=1_000)
    assert plan_round(facts(), NOW + 1_002, config).end == 20
    assert plan_round(facts(), NOW + 10_000, config).end == 40


def test_a_round_is_due_by_the_share_of_dirty_bytes_or_their_age() -> None:
    config = LogConfig(cleanup_policy="compact", min_cleanable_dirty_ratio=0.5)
    assert plan_round(facts(10), NOW, config).is_due
    found = plan_round(facts(20), NOW, config)
    assert (found.dirty_bytes, found.total_bytes, found.dirty_ratio, found.is_due) == (200, 400, 0.5, False)
    late = LogConfig(cleanup_policy="compact", max_compaction_lag_ms=50)
    assert not plan_round(facts(20), NOW + 52, late).is_due
    assert plan_round(facts(20), NOW + 53, late).is_due
    assert not plan_round(facts(40), NOW + 53, late).is_due
    ratio_0 = LogConfig(cleanup_policy="compact", min_cleanable_dirty_ratio=0.0)
    assert plan_round(facts(39), NOW, ratio_0).is_due
    assert not plan_round(facts(40), NOW, ratio_0).is_due


def test_a_first_dirty_offset_outside_the_log_is_its_start() -> None:
    config = LogConfig(cleanup_policy="compact")
    assert plan_round(facts(5, log_start=20), NOW, config).first_dirty == 20
    assert plan_round(facts(500, last_stable=40), NOW, config).first_dirty == 0


def test_a_checkpoint_counts_when_the_bucket_holds_it() -> None:
    known = RecoverableOffset()
    assert known.look(100, 50, 40) == -1
    assert known.look(200, 80, 49) == -1
    assert known.look(200, 80, 50) == 100
    assert known.look(300, 90, 85) == 200
    assert known.look(300, 90, 90) == 300


def test_the_largest_lag_bounds_the_age_of_the_active_segment() -> None:
    active = Segment(0, NOW, 0, 10, NOW, NOW, NOW)
    config = LogConfig(cleanup_policy="compact", max_compaction_lag_ms=50)
    assert should_roll(active, 1, NOW + 51, NOW + 51, config)
    assert not should_roll(active, 1, NOW + 51, NOW + 51, LogConfig(max_compaction_lag_ms=50))


def test_retention_passes_a_segment_of_which_nothing_is_left() -> None:
    config = LogConfig(cleanup_policy="compact,delete", retention_ms=100)
    assert retention_start(segments(0, 100, 100), 0, 25, 25, NOW + 103, config) == 20
