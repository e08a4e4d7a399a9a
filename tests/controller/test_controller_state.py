"""What the controller's state machine promises (docs/rules.md), command by command."""

from __future__ import annotations

import msgspec
import pytest

from tests.controller.controller_helpers import DELAY_MS, TOPIC, Driver, new_object
from tidelog.controller.image.image import Delta
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import (
    BrokerIdInUse,
    CommandFailed,
    DirectoryInUse,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidTopic,
    NotController,
    NotEligible,
    StaleBrokerEpoch,
    StaleCommand,
    TopicExists,
    TopicIdTaken,
    UnknownTopicId,
)
from tidelog.controller.model.records import ObjectState, StreamState
from tidelog.runtime.errors import CorruptData, Fenced, InvalidInput, NotFound
from tidelog.storage.commits import CommitGap, CommitObjects, CommitRefused, CompactObjects, NewObject, NotPrepared
from tidelog.stream.opened import OpenedStream


@pytest.fixture
def driver() -> Driver:
    return Driver()


def opened(driver: Driver, partitions: int = 1) -> tuple[int, list[int]]:
    """A topic whose streams are open; the master epoch and the first stream of each partition."""
    epoch = driver.broker()
    firsts = driver.topic(partitions)
    pairs = tuple((first + step, epoch) for first in firsts for step in range(4))
    driver.run(c.OpenStreams(0, epoch, pairs))
    return epoch, firsts


# Controllers and brokers


def test_commands_of_another_term_have_no_effect(driver: Driver) -> None:
    driver.run(c.BecomeActive(1, 5, "other", DELAY_MS))
    assert driver.image.cluster_id == "cluster"  # the first id stays
    with pytest.raises(NotController):
        driver.run(c.PutKv("k", b"v"))
    driver.term = 5
    driver.run(c.PutKv("k", b"v"))
    with pytest.raises(NotController):
        driver.run(c.BecomeActive(0, 5, "again", DELAY_MS))


def test_a_leader_that_missed_that_it_became_active_is_told_so_when_it_asks_again(driver: Driver) -> None:
    """Its first command was taken for lost. If it were refused, no controller would be active until an election."""
    driver.run(c.BecomeActive(1, 5, "other", DELAY_MS))
    before = driver.image.cluster
    driver.run(c.BecomeActive(1, 5, "another", DELAY_MS))
    assert driver.image.cluster == before
    with pytest.raises(NotController):
        driver.run(c.BecomeActive(1, 4, "older", DELAY_MS))


def test_a_second_live_broker_with_the_same_id_is_refused_until_the_first_is_dead(driver: Driver) -> None:
    assert driver.run(c.RegisterBroker(1, "mine", "a", "h", 1, "", ""), int) == 1
    with pytest.raises(BrokerIdInUse) as refused:
        driver.run(c.RegisterBroker(1, "theirs", "b", "h", 2, "", ""))
    assert refused.value.kafka_code == 101
    driver.run(c.SetBrokerAlive(1, 1, False))
    assert driver.run(c.RegisterBroker(1, "theirs", "b", "h", 2, "", ""), int) == 2


def test_a_copy_of_a_directory_is_refused_until_the_broker_over_the_other_one_is_dead(driver: Driver) -> None:
    def register(incarnation: str, directory: str) -> int:
        return int(driver.run(c.RegisterBroker(1, "mine", incarnation, "h", 1, "", "", "disk", "", directory), int))

    assert register("a", "here") == 1
    with pytest.raises(DirectoryInUse, match="another copy"):
        register("b", "there")
    assert register("c", "here") == 2, "a new process over the same directory: the lock says that the old one has ended"
    driver.run(c.SetBrokerAlive(1, 2, False))
    assert register("b", "there") == 3
    with pytest.raises(DirectoryInUse):
        register("d", "here")


def test_a_broker_id_that_is_handed_out_was_never_anybodys(driver: Driver) -> None:
    driver.run(c.RegisterBroker(7, "seven", "a", "h", 1, "", ""), int)
    driver.run(c.SetControllers(((9, "h:1"), (3, "h:2"))))
    assert [driver.run(c.ApplyBrokerId(code), int) for code in ("x", "y", "x")] == [10, 11, 10]
    assert driver.run(c.ApplyBrokerId("seven"), int) == 7, "who has registered keeps its own"
    driver.run(c.RegisterBroker(11, "y", "a", "h", 1, "", ""), int)
    assert list(driver.image.kv) == ["broker-id/x"], "nothing is kept of who has registered"
    driver.run(c.SetBrokerAlive(11, 1, False))
    driver.run(c.RemoveBroker(11))
    assert driver.run(c.ApplyBrokerId("z"), int) == 12
    driver.run(c.RegisterBroker(40, "forty", "a", "h", 1, "", ""), int)
    assert driver.run(c.ApplyBrokerId("w"), int) == 41


def test_registration_is_idempotent_for_a_process_and_grows_with_a_new_one(driver: Driver) -> None:
    register = c.RegisterBroker(1, "mine", "a", "h", 1, "", "")
    assert [driver.run(register, int), driver.run(register, int)] == [1, 1]
    assert driver.run(c.RegisterBroker(1, "mine", "b", "h", 1, "", ""), int) == 2
    driver.run(c.SetBrokerAlive(1, 1, False))  # a late event about the old process
    assert driver.image.brokers[1].alive
    with pytest.raises(StaleBrokerEpoch):
        driver.run(c.AllocateProducerIds(1, 1))
    assert driver.run(c.AllocateProducerIds(1, 2), tuple[int, int]) == (0, 1000)
    assert driver.run(c.AllocateProducerIds(1, 2), tuple[int, int]) == (1000, 1000)


@pytest.mark.parametrize("address", ["cleanup.policy", "h:", ":1", "h:0", "h:65536", "h:-1", "h:1.5", "h:\u0661"])
def test_an_address_that_nobody_can_be_asked_at_is_refused(driver: Driver, address: str) -> None:
    with pytest.raises(InvalidInput, match="HOST:PORT"):
        driver.run(c.RegisterBroker(1, "mine", "a", "h", 1, "", "", "disk", address))
    for good in ("", "h:1", "[::1]:65535"):
        driver.run(c.RegisterBroker(1, "mine", "a", "h", 1, "", "", "disk", good), int)


@pytest.mark.parametrize("port", [-1, 65_536, 1 << 40])
def test_a_port_that_is_none_is_refused(driver: Driver, port: int) -> None:
    with pytest.raises(InvalidInput, match=str(port)):
        driver.run(c.RegisterBroker(1, "mine", "a", "h", port, "", ""))


def test_each_election_is_a_new_master_epoch_and_needs_a_live_member(driver: Driver) -> None:
    assert [driver.broker(0), driver.broker(0, "b")] == [1, 2]
    with pytest.raises(NotEligible):
        driver.run(c.Elect(0, 7))
    driver.run(c.SetBrokerAlive(0, 2, False))
    with pytest.raises(NotEligible):
        driver.run(c.Elect(0, 0))
    with pytest.raises(NotFound):
        driver.run(c.Elect(9, 0))
    record = driver.image.replica_sets[0]
    assert (record.master_epoch, record.sync_state_set_epoch, record.sync_state_set) == (2, 2, (0,))


# Topics


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "x" * 250, "a/b", "a\n"])
def test_illegal_names_are_refused_with_kafkas_code(driver: Driver, name: str) -> None:
    driver.broker()
    with pytest.raises(InvalidTopic) as refused:
        driver.topic(name=name)
    assert refused.value.kafka_code == 17


def test_names_that_collide_are_refused(driver: Driver) -> None:
    driver.broker()
    driver.topic(name="a.b")
    with pytest.raises(TopicExists) as exists:
        driver.topic(name="a.b", topic_id=bytes(15) + b"x")
    assert exists.value.kafka_code == 36
    with pytest.raises(InvalidTopic, match=r"collides with existing topic 'a\.b'"):
        driver.topic(name="a_b", topic_id=bytes(15) + b"x")
    with pytest.raises(TopicIdTaken):
        driver.topic(name="other")


def test_partitions_are_spread_evenly_over_live_replica_sets(driver: Driver) -> None:
    for broker_id in (0, 1, 2):
        driver.broker(broker_id)
    driver.run(c.SetBrokerAlive(2, 1, False))
    driver.topic(5)
    placed = [each.replica_set for each in driver.image.partitions(TOPIC)]
    assert sorted(placed) == [0, 0, 0, 1, 1]
    driver.run(c.CreatePartitions(TOPIC, 6))
    assert driver.image.partitions(TOPIC)[5].replica_set == 1
    firsts = [each.first_stream for each in driver.image.partitions(TOPIC)]
    assert firsts == sorted(set(firsts)) and all(first % 4 == 0 for first in firsts)
    assert len(driver.image.streams) == 24


def test_an_assignment_names_known_replica_sets_one_for_each_partition(driver: Driver) -> None:
    driver.broker(0)
    driver.broker(1)
    driver.run(c.CreateTopic(TOPIC, "t", 3, {}, False, False, (1, 0, 1)))
    assert [each.replica_set for each in driver.image.partitions(TOPIC)] == [1, 0, 1]
    for wrong in ((1, 0), (1, 0, 9)):
        with pytest.raises(InvalidReplicaAssignment):
            driver.run(c.CreateTopic(bytes(15) + b"x", "u", 3, {}, False, False, wrong))


def test_partition_counts_have_bounds(driver: Driver) -> None:
    with pytest.raises(InvalidReplicationFactor):
        driver.topic()  # no live broker
    driver.broker()
    for count in (0, -1, 10_001):
        with pytest.raises(InvalidPartitions):
            driver.topic(count)
    driver.topic(3)
    for total in (3, 2, 100_001):
        with pytest.raises(InvalidPartitions):
            driver.run(c.CreatePartitions(TOPIC, total))


def test_validate_only_changes_nothing(driver: Driver) -> None:
    driver.broker()
    version = driver.state.version
    driver.run(c.CreateTopic(TOPIC, "t", 3, {"a": "b"}, False, True, None))
    assert driver.state.version == version and not driver.image.topics


def test_configs_are_merged_and_none_removes(driver: Driver) -> None:
    driver.broker()
    driver.topic()
    driver.run(c.AlterTopicConfigs(TOPIC, {"b": "2", "a": "1"}))
    driver.run(c.AlterTopicConfigs(TOPIC, {"a": None, "c": "3"}))
    assert driver.image.topics[TOPIC].configs == {"b": "2", "c": "3"}
    driver.run(c.AlterConfigs("broker", "0", {"x": "1"}))
    assert driver.image.configs == {("broker", "0"): {"x": "1"}}
    driver.run(c.AlterConfigs("broker", "0", {"x": None}))
    assert driver.image.configs == {}
    with pytest.raises(InvalidInput):
        driver.run(c.AlterConfigs("user", "0", {"x": "1"}))


@pytest.mark.parametrize("kind", ["group", "client-metrics"])
def test_groups_and_client_metrics_have_configs_from_level_4_on(driver: Driver, kind: str) -> None:
    driver.run(c.AlterConfigs(kind, "g", {"x": "1"}))
    assert driver.image.configs == {(kind, "g"): {"x": "1"}}
    older = ControllerState()
    older.apply(c.Envelope(3 + 1, 1, 5, "", 0, 0, c.BecomeActive(1, 1, "cluster", 60_000)), 1)
    applied = older.apply(c.Envelope(3 + 1, 1, 5, "", 0, 0, c.AlterConfigs(kind, "g", {"x": "1"})), 2)
    error = msgspec.msgpack.decode(applied.result, type=c.Result).error
    assert error is not None and f"no configs of kind '{kind}'" in error.message
    assert not older.tables.configs.rows


def test_deleting_a_topic_deletes_its_streams_and_destroys_what_nobody_else_uses(driver: Driver) -> None:
    epoch, (mine,) = opened(driver)
    (other,) = driver.topic(name="u", topic_id=bytes(15) + b"x")
    driver.run(c.OpenStreams(0, epoch, ((other, epoch),)))
    alone = driver.prepare(2)
    driver.commit(epoch, (0, 5), new_object(alone, (mine, 0, 5)), new_object(alone + 1, (mine, 5, 6), (other, 0, 1)))
    driver.run(c.DeleteTopic(TOPIC))
    assert "t" not in driver.image.topic_ids and mine not in driver.image.streams
    assert driver.image.objects[alone].state == ObjectState.DESTROYED
    assert driver.image.objects[alone + 1].state == ObjectState.COMMITTED  # partially used
    assert driver.image.find_objects(mine, 0, 9, 9) == []
    with pytest.raises(UnknownTopicId):
        driver.run(c.DeleteTopic(TOPIC))


# Streams: rule 4


def test_open_needs_the_current_master_epoch_and_a_larger_stream_epoch(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    again = driver.run(c.OpenStreams(0, epoch, ((first, epoch),)), list[OpenedStream])
    assert again == [OpenedStream(first, epoch, 0, 0, epoch)]  # the same open twice is success
    second = driver.broker(0, "b")
    with pytest.raises(Fenced):
        driver.run(c.OpenStreams(0, epoch, ((first, epoch + 5),)))
    with pytest.raises(Fenced):
        driver.run(c.OpenStreams(0, second, ((first, epoch - 1),)))
    newer = driver.run(c.OpenStreams(0, second, ((first, second),)), list[OpenedStream])
    assert newer == [OpenedStream(first, second, 0, 0, epoch)]
    with pytest.raises(Fenced):
        driver.run(c.TrimStream(first, epoch, 1))
    with pytest.raises(Fenced):
        driver.run(c.CloseStreams(0, second, ((first, epoch),)))


def test_an_open_of_many_is_all_or_nothing(driver: Driver) -> None:
    epoch = driver.broker()
    (first,) = driver.topic()
    with pytest.raises(NotFound):
        driver.run(c.OpenStreams(0, epoch, ((first, epoch), (999, epoch))))
    assert driver.image.streams[first].state == StreamState.CLOSED


def test_a_replica_set_cannot_open_what_is_placed_elsewhere(driver: Driver) -> None:
    driver.broker(0)
    epoch = driver.broker(1)
    driver.run(c.CreateTopic(TOPIC, "t", 1, {}, False, False, (0,)))
    with pytest.raises(Fenced):
        driver.run(c.OpenStreams(1, epoch, ((4, epoch),)))


def test_close_is_idempotent_and_lets_the_same_epoch_open_again(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    for _ in range(2):
        driver.run(c.CloseStreams(0, epoch, ((first, epoch),)))
    assert driver.image.streams[first].state == StreamState.CLOSED
    driver.run(c.OpenStreams(0, epoch, ((first, epoch),)))
    driver.run(c.DeleteTopic(TOPIC))
    driver.run(c.CloseStreams(0, epoch, ((first, epoch),)))  # deleted is closed enough


# Objects: rules 3, 5, 6


def test_a_commit_moves_streams_and_wal_together(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    object_id = driver.prepare(3)
    driver.commit(
        epoch,
        (0, 100),
        new_object(object_id, (first, 0, 2), (first + 1, 0, 7)),
        new_object(object_id + 1, (first + 1, 7, 9)),
    )
    assert driver.image.replica_sets[0].committed_wal_offset == 100
    assert [driver.image.streams[first + step].end_offset for step in (0, 1, 2)] == [2, 9, 0]
    found = driver.image.find_objects(first + 1, 6, 100, 10)
    assert [(each.object_id, each.start_offset, each.end_offset) for each in found] == [
        (object_id, 0, 7),
        (object_id + 1, 7, 9),
    ]
    assert [each.object_id for each in driver.image.find_objects(first + 1, 7, 100, 10)] == [object_id + 1]
    assert len(driver.image.find_objects(first + 1, 0, 100, 1)) == 1


def test_the_same_commit_twice_is_success_and_changes_nothing(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    new = new_object(driver.prepare(), (first, 0, 5))
    driver.commit(epoch, (0, 10), new)
    version = driver.state.version
    driver.commit(epoch, (0, 10), new)
    assert driver.state.version == version and driver.image.streams[first].end_offset == 5


@pytest.mark.parametrize("start", [4, 6])
def test_a_gap_or_overlap_is_refused_and_quarantines_the_stream(driver: Driver, start: int) -> None:
    epoch, (first,) = opened(driver)
    object_id = driver.prepare(3)
    driver.commit(epoch, (0, 10), new_object(object_id, (first, 0, 5)))
    with pytest.raises(CommitGap, match=rf"stream {first} range {start}\.\.9 .* committed end 5") as gap:
        driver.commit(epoch, (10, 20), new_object(object_id + 1, (first, start, 9), (first + 1, 0, 3)))
    assert gap.value.stream_id == first
    stream = driver.image.streams[first]
    assert (stream.end_offset, driver.image.streams[first + 1].end_offset) == (5, 0)
    assert f"{start}..9" in stream.quarantined
    assert driver.image.replica_sets[0].committed_wal_offset == 10
    with pytest.raises(CommitGap, match="quarantined"):
        driver.commit(epoch, (10, 20), new_object(object_id + 2, (first, 5, 9)))
    driver.run(c.ReleaseStream(first))
    driver.commit(epoch, (10, 20), new_object(object_id + 2, (first, 5, 9)))


def test_a_quarantine_by_the_owner_is_kept_and_fenced(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    with pytest.raises(Fenced):
        driver.run(c.QuarantineStream(0, epoch - 1, first, "late"))
    assert driver.image.streams[first].quarantined == ""
    driver.run(c.QuarantineStream(0, epoch, first, "a gap in the WAL " + "x" * 1000))
    driver.run(c.QuarantineStream(0, epoch, first, "another reason"))
    driver.run(c.QuarantineStream(0, epoch, 1 << 40, "deleted"))
    assert driver.image.streams[first].quarantined.startswith("a gap in the WAL x")
    assert len(driver.image.streams[first].quarantined) == 500
    with pytest.raises(CommitGap, match="quarantined: a gap in the WAL"):
        driver.commit(epoch, (0, 10), new_object(driver.prepare(), (first, 0, 5)))
    driver.run(c.ReleaseStream(first))
    assert driver.image.streams[first].quarantined == ""


def test_a_gap_in_the_wal_is_refused(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    with pytest.raises(CommitGap) as gap:
        driver.commit(epoch, (5, 10), new_object(driver.prepare(), (first, 0, 1)))
    assert gap.value.stream_id is None and driver.image.streams[first].quarantined == ""


def test_commits_are_fenced_by_the_master_epoch(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    driver.broker(0, "b")
    with pytest.raises(CommitRefused):
        driver.commit(epoch, (0, 10), new_object(driver.prepare(), (first, 0, 1)))


def test_a_commit_needs_open_streams_of_the_replica_set_and_prepared_ids(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    with pytest.raises(NotPrepared, match="not prepared"):
        driver.commit(epoch, (0, 10), new_object(99, (first, 0, 1)))
    driver.run(c.CloseStreams(0, epoch, ((first, epoch),)))
    with pytest.raises(CommitRefused, match="not open"):
        driver.commit(epoch, (0, 10), new_object(driver.prepare(), (first, 0, 1)))
    other = driver.broker(1)
    with pytest.raises(CommitRefused, match="not open by replica set 1"):
        driver.commit(other, (0, 10), new_object(driver.prepare(), (first + 1, 0, 1)), replica_set=1)


def test_ranges_of_deleted_streams_are_dropped_and_the_wal_still_commits(driver: Driver) -> None:
    epoch, (gone, kept) = opened(driver, 2)
    driver.run(c.DeleteTopic(TOPIC))
    (kept,) = driver.topic(name="u", topic_id=bytes(15) + b"x")
    driver.run(c.OpenStreams(0, epoch, ((kept, epoch),)))
    object_id = driver.prepare(2)
    driver.commit(
        epoch, (0, 10), new_object(object_id, (gone, 0, 5)), new_object(object_id + 1, (gone, 5, 9), (kept, 0, 2))
    )
    assert driver.image.objects[object_id].state == ObjectState.DESTROYED
    assert [each.stream_id for each in driver.image.objects[object_id + 1].ranges] == [kept]
    driver.commit(epoch, (10, 20))  # an upload of nothing but deleted streams
    driver.commit(epoch, (10, 20))
    assert driver.image.replica_sets[0].committed_wal_offset == 20


@pytest.mark.parametrize(
    ("wal", "ranges"),
    [
        ((10, 5), [(4, 0, 1)]),
        ((0, 5), [(4, 3, 3)]),
        ((0, 5), [(4, 5, 3)]),
        ((0, 5), [(4, -1, 3)]),
        ((0, 5), [(4, 0, 1 << 63)]),
    ],
)
def test_malformed_commits_are_refused(
    driver: Driver, wal: tuple[int, int], ranges: list[tuple[int, int, int]]
) -> None:
    epoch, _ = opened(driver)
    with pytest.raises(InvalidInput):
        driver.commit(epoch, wal, new_object(driver.prepare(), *ranges))


@pytest.mark.parametrize("packed", [7, "ranges", [1, 2, 3], [[4, 0]], [[4, 0, 1.5]], [[4, 0, None]], {"4": 1}])
def test_ranges_that_are_none_are_refused(driver: Driver, packed: object) -> None:
    epoch, (first,) = opened(driver)
    object_id = driver.prepare()
    garbage = NewObject(object_id, 1, 10, msgspec.Raw(msgspec.msgpack.encode(packed)))
    with pytest.raises(InvalidInput):
        driver.commit(epoch, (0, 5), garbage)
    with pytest.raises(InvalidInput):
        driver.run(c.Compact(CompactObjects(0, epoch, (object_id,), (garbage,))))
    driver.commit(epoch, (0, 5), new_object(object_id, (first, 0, 1)))


def test_a_commit_tells_of_its_objects_and_the_image_finds_the_ends_of_the_streams(driver: Driver) -> None:
    epoch, (one, two) = opened(driver, 2)
    object_id = driver.prepare(2)
    request = CommitObjects(
        0, epoch, 0, 10, (new_object(object_id, (one, 0, 5), (two, 0, 7)), new_object(object_id + 1, (one, 5, 9)))
    )
    applied = driver.state.apply(c.decode_envelope(c.encode(driver.envelope(c.Commit(request)))), driver.index + 1)
    assert [each.table for each in applied.mutations] == ["objects", "objects", "replica_sets"]
    assert {each: row.end_offset for each, row in applied.ends.items()} == {one: 9, two: 7}
    driver.image.apply(Delta(driver.index + 1, applied.mutations))
    assert driver.image.streams == driver.state.tables.streams.rows


def test_an_old_snapshot_with_ranges_as_arrays_loads_to_the_same_bytes(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    driver.commit(epoch, (0, 5), new_object(driver.prepare(), (first, 0, 5)))
    dump = driver.state.dump()
    fields = msgspec.msgpack.decode(dump)
    [(_, record)] = dict(fields[4])["objects"]
    assert record[4] == [[first, 0, 5]]
    restored = ControllerState()
    restored.load(msgspec.msgpack.encode(fields))
    assert restored.dump() == dump


def test_a_trim_needs_the_current_master_epoch_of_the_owner(driver: Driver) -> None:
    """Until the next master has opened the stream, the stream's epoch is still that of the deposed one."""
    epoch, (first,) = opened(driver)
    driver.commit(epoch, (0, 1), new_object(driver.prepare(), (first, 0, 10)))
    driver.run(c.TrimStream(first, epoch, 1, 0, epoch))
    driver.broker(1, "other")
    with pytest.raises(Fenced):
        driver.run(c.TrimStream(first, epoch, 2, 1, driver.image.replica_sets[1].master_epoch))
    with pytest.raises(NotFound):
        driver.run(c.TrimStream(first, epoch, 2, 7, epoch))
    driver.broker(0, "b")
    with pytest.raises(Fenced, match="master epoch"):
        driver.run(c.TrimStream(first, epoch, 2, 0, epoch))
    assert driver.image.streams[first].start_offset == 1


def test_a_trim_of_an_older_version_is_applied_as_it_was_then(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    driver.broker(0, "b")
    old = msgspec.msgpack.encode([16, first, epoch, 5])
    assert c.decode_command(old) == c.TrimStream(first, epoch, 5)
    driver.run(c.decode_command(old))
    assert driver.image.streams[first].start_offset == 5


def test_trim_never_goes_back_and_destroys_only_what_is_wholly_below(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    object_id = driver.prepare(3)
    for step in range(3):
        driver.commit(epoch, (step, step + 1), new_object(object_id + step, (first, 10 * step, 10 * step + 10)))
    driver.run(c.TrimStream(first, epoch, 15))
    states = [driver.image.objects[object_id + step].state for step in range(3)]
    assert states == [ObjectState.DESTROYED, ObjectState.COMMITTED, ObjectState.COMMITTED]
    driver.run(c.TrimStream(first, epoch, 3))
    assert driver.image.streams[first].start_offset == 15
    driver.run(c.TrimStream(first, epoch, 40))  # past the committed end: still in the WAL
    assert driver.image.objects[object_id + 2].state == ObjectState.DESTROYED
    late = driver.prepare()
    driver.commit(epoch, (3, 4), new_object(late, (first, 30, 40)))  # dead when it is born
    assert driver.image.objects[late].state == ObjectState.DESTROYED
    assert driver.image.find_objects(first, 0, 100, 10) == []


def test_destroyed_objects_are_forgotten_only_after_the_delay(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    object_id = driver.prepare()
    driver.commit(epoch, (0, 1), new_object(object_id, (first, 0, 10)))
    driver.run(c.ForgetObjects((object_id,)))
    driver.run(c.TrimStream(first, epoch, 10))
    driver.run(c.ForgetObjects((object_id, 12345)))
    assert object_id in driver.image.objects
    driver.now_ms += DELAY_MS
    driver.run(c.ForgetObjects((object_id,)))
    assert object_id not in driver.image.objects


def test_prepared_ids_expire_and_are_never_given_out_again(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    object_id = driver.prepare(2, ttl_ms=50)
    driver.run(c.ExpireObjects((object_id,)))
    assert driver.image.objects[object_id].state == ObjectState.PREPARED
    driver.now_ms += 50
    driver.run(c.ExpireObjects((object_id,)))
    assert driver.image.objects[object_id].state == ObjectState.DESTROYED
    with pytest.raises(NotPrepared):
        driver.commit(epoch, (0, 1), new_object(object_id, (first, 0, 1)))
    assert driver.prepare() == object_id + 2


def test_a_long_sweep_is_bounded_and_goes_on_with_later_commands(driver: Driver) -> None:
    epoch, (first,) = opened(driver)
    for chunk in range(3):
        object_id = driver.prepare(1000)
        objects = [
            new_object(object_id + step, (first, 1000 * chunk + step, 1000 * chunk + step + 1)) for step in range(1000)
        ]
        driver.commit(epoch, (chunk, chunk + 1), *objects)
    driver.run(c.TrimStream(first, epoch, 3000))
    assert len(driver.image.index.garbage) == 3000 - 1024
    for _ in range(2):
        driver.run(c.Barrier())
    assert not driver.image.index.garbage and len(driver.image.index.destroyed) == 3000


# Dedupe, time, defects, snapshots


def test_a_command_asked_twice_takes_effect_once_and_gets_the_first_answer(driver: Driver) -> None:
    driver.broker()
    command = driver.envelope(c.PrepareObjects(1, 1000), "client", 1, 1)
    assert driver.apply(command) == driver.apply(command)
    assert len(driver.image.objects) == 1
    create = driver.envelope(c.CreateTopic(TOPIC, "t", 1, {}, False, False, None), "client", 2, 1)
    first = driver.apply(create)
    assert first.error is None and driver.apply(create) == first
    refused = driver.envelope(c.DeleteTopic(bytes(16)), "client", 3, 3)
    assert driver.apply(refused) == driver.apply(refused)
    late = driver.apply(driver.envelope(c.PrepareObjects(1, 1000), "client", 1, 3))
    assert late.error is not None and late.error.name == StaleCommand.__name__


def test_answers_survive_a_snapshot(driver: Driver) -> None:
    command = driver.envelope(c.PrepareObjects(1, 1000), "client", 1, 1)
    first = driver.apply(command)
    restored = ControllerState()
    restored.load(driver.state.dump())
    driver.state = restored
    assert driver.apply(command) == first


def test_time_is_the_maximum_any_command_carried(driver: Driver) -> None:
    driver.now_ms = 5_000
    driver.prepare()
    driver.now_ms = 10
    object_id = driver.prepare(ttl_ms=7)
    assert driver.image.objects[object_id].expires_ms == 5_007


def test_a_defect_in_a_handler_is_a_refusal_without_effect(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = driver.state.tables.kv
    put = kv.put

    def broken(key: str, value: bytes) -> None:
        put("half", b"done")
        raise ZeroDivisionError

    monkeypatch.setattr(kv, "put", broken)
    before = driver.state.tables.kv.rows.copy()
    with pytest.raises(CommandFailed):
        driver.run(c.PutKv("k", b"v"))
    assert driver.state.tables.kv.rows == before and driver.state.tables.kv.get("half") is None


def test_a_damaged_snapshot_is_refused_and_leaves_the_state_alone(driver: Driver) -> None:
    driver.broker()
    dump = driver.state.dump()
    for damaged in (dump[:-3], b"\x93\x01\x02\x03", b""):
        with pytest.raises(CorruptData):
            driver.state.load(damaged)
    assert driver.state.dump() == dump


def test_ten_thousand_partitions_are_one_command(driver: Driver) -> None:
    driver.broker()
    driver.topic(10_000)
    assert len(driver.image.streams) == 40_000
    driver.run(c.DeleteTopic(TOPIC))
    assert not driver.image.streams
