"""The plan of a rebuild, and the state that it makes."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.controller.controller_helpers import TOPIC, Driver, make_node, new_object
from tidelog.controller.machine.leases import renew_lease, take_lease
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.bucket_state import BucketState, encode_state, generation_of, state_key
from tidelog.controller.model.leases import LeaseOver, LeaseRecord, RenewLease, TakeLease
from tidelog.controller.model.records import ObjectState, StreamState
from tidelog.controller.model.replication import PolicyRecord, ReplicationRecord
from tidelog.controller.model.wal_notes import WalNote, losses_in, note_key
from tidelog.controller.rebuild.adopt import EPOCH_STEP, OBJECT_STEP, Adoption, adopt
from tidelog.controller.rebuild.directory import write_directories
from tidelog.controller.rebuild.held import StreamPiece
from tidelog.controller.rebuild.plan import FoundObject, find_chain, make_plan
from tidelog.controller.rebuild.source import may_be_new, read_bucket
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import ObjectSlice
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.manifest import ManifestPages


def known(*pieces: tuple[int, int, int]) -> list[StreamPiece]:
    return [StreamPiece(*piece, True) for piece in pieces]


def new(*pieces: tuple[int, int, int]) -> list[StreamPiece]:
    return [StreamPiece(*piece, False) for piece in pieces]


def ids(chain: object) -> list[int]:
    return [piece.object_id for piece in chain.used]  # type: ignore[attr-defined]


def test_new_objects_continue_the_state_without_a_gap() -> None:
    chain = find_chain(0, 20, known((0, 10, 1), (10, 20, 2)), set(), new((20, 30, 3), (30, 35, 4), (36, 40, 5)))
    assert (chain.start, chain.end, ids(chain)) == (0, 35, [1, 2, 3, 4])


def test_what_the_state_has_is_never_replaced_while_it_is_there() -> None:
    """Object 9 was refused: its writer had been deposed."""
    chain = find_chain(0, 20, known((0, 10, 1), (10, 20, 2)), set(), new((10, 50, 9), (20, 22, 3)))
    assert (chain.end, ids(chain)) == (22, [1, 2, 3])


def test_of_two_continuations_the_one_that_gets_further_is_taken() -> None:
    chain = find_chain(0, 10, known((0, 10, 1)), set(), new((10, 20, 2), (10, 15, 3), (15, 30, 4)))
    assert (chain.end, ids(chain)) == (30, [1, 3, 4])


def test_a_compaction_takes_the_place_of_what_it_replaced() -> None:
    chain = find_chain(0, 20, known((0, 10, 1), (10, 20, 2)), {1, 2}, new((20, 30, 3), (0, 30, 4)))
    assert (chain.start, chain.end, ids(chain)) == (0, 30, [4])


def test_a_stream_that_was_trimmed_starts_later() -> None:
    chain = find_chain(0, 30, known((0, 10, 1), (10, 20, 2), (20, 30, 3)), {1}, [])
    assert (chain.start, chain.end, ids(chain)) == (10, 30, [2, 3])


def test_a_trimmed_stream_may_start_in_a_compacted_object() -> None:
    chain = find_chain(0, 30, known((0, 10, 1), (10, 20, 2), (20, 30, 3)), {1, 2}, new((5, 20, 4)))
    assert (chain.start, chain.end, ids(chain)) == (5, 30, [4, 3])


def test_a_stream_of_which_nothing_is_left_is_empty_at_its_end() -> None:
    chain = find_chain(5, 20, known((0, 10, 1), (10, 20, 2)), {1, 2}, [])
    assert (chain.start, chain.end, ids(chain)) == (20, 20, [])


def test_a_start_inside_an_object_stays_there() -> None:
    chain = find_chain(5, 10, known((0, 10, 1)), set(), new((10, 12, 2)))
    assert (chain.start, chain.end, ids(chain)) == (5, 12, [1, 2])


def test_what_was_trimmed_in_the_wal_is_no_gap() -> None:
    """The log start was moved past the committed end, and the upload with it came after the state."""
    chain = find_chain(50, 50, [], set(), new((40, 60, 2)))
    assert (chain.start, chain.end, ids(chain)) == (50, 60, [2])


def test_a_stream_starts_behind_what_is_missing_although_something_before_it_is_left() -> None:
    """Objects of many streams stay while one of them needs them, so those that were trimmed do not go in order."""
    chain = find_chain(0, 40, known((0, 10, 1), (10, 20, 2), (20, 30, 3), (30, 40, 4)), {2}, new((40, 50, 5)))
    assert (chain.start, chain.end, ids(chain)) == (20, 50, [3, 4, 5])


def test_a_compaction_begins_where_it_was_trimmed_to() -> None:
    chain = find_chain(
        0, 113, known((0, 35, 6), (35, 40, 10), (40, 87, 15), (87, 113, 48)), {6, 48}, new((92, 118, 81))
    )
    assert (chain.start, chain.end, ids(chain)) == (92, 118, [81])


LEFT, MERGED = 59, 92
"""What a compaction left that was given up, and what a later one made when the stream was trimmed."""


@pytest.mark.parametrize("start", [120, 123, 130])
def test_what_a_compaction_left_does_not_hide_what_gets_further(start: int) -> None:
    named = known((90, 136, 42), (136, 147, 53), (147, 162, 66), (162, 173, 57))
    chain = find_chain(start, 173, named, {42, 53, 66, 57}, new((123, 173, LEFT), (136, 183, MERGED)))
    assert (chain.start, chain.end, ids(chain)) == (136, 183, [MERGED])


def test_what_a_deposed_writer_left_does_not_take_the_place_of_what_was_made_later() -> None:
    chain = find_chain(0, 100, known((0, 60, 5), (60, 100, 6)), {5, 6}, new((0, 100, MERGED), (50, 120, LEFT)))
    assert (chain.start, chain.end, ids(chain)) == (0, 100, [MERGED])
    chain = find_chain(0, 100, known((0, 60, 5), (60, 100, 6)), {5}, new((70, 120, MERGED)))
    assert (chain.start, chain.end, ids(chain)) == (60, 100, [6])


def test_a_stream_that_was_trimmed_past_the_state_goes_on_with_what_is_newer() -> None:
    """Retention ran on after the state was written: no record that is there is lost, and no offset is used again."""
    chain = find_chain(0, 20, known((0, 10, 1), (10, 20, 2)), {1, 2}, new((50, 60, 6), (60, 70, 7)))
    assert (chain.start, chain.end, ids(chain)) == (50, 70, [6, 7])
    chain = find_chain(0, 20, known((0, 10, 1), (10, 20, 2)), {2}, new((30, 40, 5), (50, 60, 6), (60, 70, 7)))
    assert (chain.start, chain.end, ids(chain)) == (50, 70, [6, 7])


pieces = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=10)


@given(st.lists(st.integers(1, 5), max_size=6), pieces, st.data())
def test_a_chain_is_contiguous_and_never_ends_before_the_state(
    lengths: list[int], others: list[tuple[int, int]], data: st.DataObject
) -> None:
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    named = known(
        *((end - length, end, number) for number, (end, length) in enumerate(zip(ends, lengths, strict=True)))
    )
    committed = ends[-1] if ends else 0
    start = data.draw(st.integers(0, named[0].end - 1)) if named else 0
    missing = set(data.draw(st.lists(st.sampled_from(named)))) if named else set()
    found = new(*((at, at + length, 100 + number) for number, (at, length) in enumerate(others)))
    chain = find_chain(start, committed, named, {piece.object_id for piece in missing}, found)
    assert start <= chain.start <= chain.end
    assert chain.end >= committed
    assert all(one.end == after.start for one, after in pairwise(chain.used))
    if chain.used:
        assert chain.used[0].start <= chain.start < chain.used[0].end or chain.start == chain.used[0].start
        assert chain.used[-1].end == chain.end
    if not missing and chain.start <= committed:
        assert ids(chain)[: len(named)] == [piece.object_id for piece in named]
    assert not {piece.object_id for piece in missing} & set(ids(chain))


def lost_cluster() -> tuple[Driver, list[int]]:
    """Broker 1 owned both partitions of a topic; object 1 is committed."""
    driver = Driver()
    epoch = driver.broker(1)
    driver.broker(2)
    first, second = driver.topic(2)
    driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 0, 1), c.PartitionMove(TOPIC, 1, 1))))
    owned = [each for each in driver.image.partitions(TOPIC) if each.replica_set == 1]
    streams = tuple((each.first_stream + step, epoch + each.epoch_base) for each in owned for step in range(4))
    driver.run(c.OpenStreams(1, epoch, streams))
    data = owned[0].first_stream + 1
    object_id = driver.prepare()
    driver.commit(epoch, (0, 100), new_object(object_id, (data, 0, 10)), replica_set=1)
    driver.run(c.NoteWal(1, WalNote("disk", "", epoch, 1, 250, True, ((data, 25),))))
    driver.prepare()
    assert {first, second} >= {each.first_stream for each in owned}
    return driver, [data, object_id]


def rebuilt(brokers: list[int], found: list[FoundObject], listed: dict[int, int]) -> tuple[Driver, ControllerState]:
    driver, _ = lost_cluster()
    old = ControllerState()
    old.load(driver.state.dump())
    plan = make_plan(old.tables, listed, found)
    return driver, adopt(old, plan, Adoption(brokers, 2, max(listed, default=0), 5_000))


def test_the_new_state_continues_its_streams_and_gives_out_nothing_twice() -> None:
    _, (data, object_id) = lost_cluster()
    later = object_id + 1  # it was prepared
    found = [FoundObject(later, 1, 77, ((data, 10, 20), (999_999, 0, 5)))]
    driver, state = rebuilt([1, 2], found, {object_id: 100, later: 77})
    tables = state.tables
    stream = tables.streams.get(data)
    assert stream is not None
    assert (stream.start_offset, stream.end_offset, stream.state) == (0, 20, StreamState.CLOSED)
    assert stream.released_at == 20
    taken = tables.objects.get(later)
    assert taken is not None and taken.state == ObjectState.COMMITTED
    assert [tuple(msgspec.structs.astuple(each)) for each in taken.ranges] == [(data, 10, 20)]
    assert (tables.counters.get("object") or 0) > later + OBJECT_STEP - 1
    assert all(not broker.alive for broker in tables.brokers.values())
    assert state.applied_index > driver.state.applied_index
    assert generation_of(tables.kv.rows) == 2
    (loss,) = losses_in(tables.kv.rows)
    assert [(one.from_offset, one.to_offset) for one in loss.partitions if one.from_offset] == [(20, 25)]
    again = ControllerState()
    again.load(state.dump())
    assert again.dump() == state.dump()
    assert again.tables.index.live_slices == tables.index.live_slices
    assert again.tables.index.slices == tables.index.slices


@pytest.mark.parametrize("had_leases", [False, True])
def test_a_lease_that_the_old_cluster_gave_after_the_state_is_nobody_elses(had_leases: bool) -> None:
    driver, (_, object_id) = lost_cluster()
    take = TakeLease("a reader", 60_000, 60_000)
    if had_leases:
        driver.run(take)
    old = ControllerState()
    old.load(driver.state.dump())
    later = driver.run(take, LeaseRecord)
    listed = {object_id: 100}
    state = adopt(old, make_plan(old.tables, listed, []), Adoption([1, 2], 2, object_id, 5_000))
    assert take_lease(state.tables, take).id > later.id
    state.tables.commit()
    with pytest.raises(LeaseOver):
        renew_lease(state.tables, RenewLease(later.id, 60_000))


def test_partitions_of_a_broker_that_is_no_more_get_another_owner_and_a_larger_epoch() -> None:
    _, (_, object_id) = lost_cluster()
    driver, state = rebuilt([2, 3], [], {object_id: 100})
    before = {each.index: driver.image.leader(each)[1] for each in driver.image.partitions(TOPIC)}
    assert sorted(state.tables.replica_sets.rows) == [2, 3]
    assert sorted(state.tables.brokers.rows) == [2]
    for partition in state.tables.partitions.values():
        assert partition.replica_set in (2, 3)
        owner = state.tables.replica_sets.get(partition.replica_set)
        assert owner is not None
        assert partition.epoch_base + owner.master_epoch >= before[partition.index] + EPOCH_STEP


@pytest.mark.parametrize("brokers", [[1], [1, 2]])
def test_a_lone_broker_is_not_to_have_replicas_elsewhere_whatever_the_old_cluster_had(brokers: list[int]) -> None:
    """It has no secret with which brokers know each other, and would not start."""
    driver, (_, object_id) = lost_cluster()
    old = ControllerState()
    old.load(driver.state.dump())
    policy = PolicyRecord(total_replicas=3, in_sync_replicas=2)
    for each in (1, 2):
        old.tables.replication.put(each, ReplicationRecord(each, policy, assigned=(1, 2, 3)))
    old.tables.commit()
    state = adopt(old, make_plan(old.tables, {object_id: 100}, []), Adoption(brokers, 2, object_id, 5_000))
    wanted = {row.id: (row.policy.total_replicas, row.assigned) for row in state.tables.replication.values()}
    assert wanted == ({} if brokers == [1] else {1: (3, (1, 2)), 2: (3, (1, 2))})


def losses(state: ControllerState) -> list[tuple[str, int, int, int]]:
    found = (one for loss in losses_in(state.tables.kv.rows) for one in loss.partitions)
    return sorted((one.topic, one.partition, one.from_offset, one.to_offset) for one in found)


@pytest.mark.parametrize("told", [False, True])
def test_what_a_wal_may_have_had_is_recorded_although_its_master_never_told_of_it(told: bool) -> None:
    driver, (_, object_id) = lost_cluster()
    driver.run(c.DeleteKv(note_key(1)))
    if told:
        driver.run(c.NoteWal(1, WalNote("disk", "", 1, 9, 100, False)))
    old = ControllerState()
    old.load(driver.state.dump())
    state = adopt(old, make_plan(old.tables, {object_id: 100}, []), Adoption([1, 2], 2, object_id, 5_000))
    assert losses(state) == ([] if told else [("t", 0, 10, -1)]), "nobody has opened the other partition"


def test_at_level_0_where_no_master_tells_of_its_wal_every_partition_may_have_lost_records() -> None:
    old = ControllerState()
    old.load((Path(__file__).parent / "level0" / "state.msgpack").read_bytes())
    assert old.level == 0
    tables = old.tables
    listed = {each.id: each.size for each in tables.objects.values()}
    wanted = {(tables.topics.rows[each.topic_id].name, each.index) for each in tables.partitions.values()}
    state = adopt(old, make_plan(tables, listed, []), Adoption([0, 1], 2, max(listed, default=0), 5_000))
    assert wanted and {(topic, partition) for topic, partition, _, _ in losses(state)} == wanted
    assert {end for _, _, _, end in losses(state)} == {-1}, "nobody knows how many"


def test_what_may_be_new() -> None:
    driver, (_, object_id) = lost_cluster()
    tables = driver.state.tables
    assert not may_be_new(tables, object_id)
    assert may_be_new(tables, object_id + 1)
    assert may_be_new(tables, object_id + 2)
    assert not may_be_new(tables, 0)


async def test_a_manifest_in_the_bucket_is_neither_taken_nor_damage() -> None:
    driver, (_, object_id) = lost_cluster()
    store, cluster_id = MemoryObjectStore(), driver.image.cluster_id
    base = BucketState(cluster_id, 1, driver.index, driver.index, 1, 0, False, driver.state.dump())
    await store.put(state_key(cluster_id, 1, driver.index), [encode_state(base)])
    pages = ManifestPages()
    pages.add(0, [ObjectSlice(object_id, 1, 100, 0, 10)])
    manifest = pages.build(object_id + 1, cluster_id, 5)
    await store.put(object_key(cluster_id, manifest.object_id), manifest.body)
    content = await read_bucket(store, cluster_id)
    assert content.listed == {manifest.object_id: manifest.size}
    assert (content.found, content.damaged) == ([], [])


@pytest.mark.parametrize("missing", [True, False])
def test_objects_of_unknown_streams_and_behind_gaps_are_named(missing: bool) -> None:
    _, (data, object_id) = lost_cluster()
    driver, _ = lost_cluster()
    found = [FoundObject(object_id + 1, 1, 5, ((data, 12, 20), (999_997, 0, 5)))]
    plan = make_plan(driver.state.tables, {} if missing else {object_id: 1}, found)
    assert [one.stream_id for one in plan.unknown] == [999_997]
    if missing:  # what precedes it was trimmed
        assert plan.gaps == () and plan.streams[data][:2] == (12, 20)
    else:
        assert [(one.start, one.end) for one in plan.gaps] == [(12, 20)]
        assert plan.streams[data].end == 10
        overlapping = [
            FoundObject(object_id + 1, 1, 5, ((data, 4, 20),)),
            FoundObject(object_id + 2, 1, 5, ((data, 0, 10),)),
        ]
        plan = make_plan(driver.state.tables, {object_id: 1}, overlapping)
        assert [(one.start, one.end, one.object_id) for one in plan.gaps] == [(10, 20, object_id + 1)]


async def test_a_controller_starts_over_the_directory_and_a_new_term_begins(tmp_path: Path) -> None:
    _, (_, object_id) = lost_cluster()
    driver, state = rebuilt([1], [], {object_id: 100})
    write_directories(state, {1: tmp_path}, {}, random.Random(1).random)
    node = make_node(tmp_path)
    await node.start()
    await node.wait_active(20)
    assert node.image.cluster_id == "cluster"
    assert node.image.topics.keys() == driver.image.topics.keys()
    cluster = node.image.cluster
    assert cluster is not None and cluster.active_term > 1
    assert node.image.version > driver.image.version
    fence = await node.fence_objects()
    assert fence > OBJECT_STEP
    await node.close()
