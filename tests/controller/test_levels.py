"""Feature levels: replay by the rules of a level, raising it, and what is refused (docs/design/0013-feature-levels.md).

`level0` has what the last version before feature levels wrote.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.controller.controller_helpers import (
    TOPIC,
    Driver,
    KeptNetwork,
    make_client,
    make_node,
    new_object,
    send,
    until,
)
from tidelog.controller.active.levels import LevelRaise
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.image.replica import Replica
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.configs import ANY, digest
from tidelog.controller.model.errors import InvalidReplicationFactor, NotController, from_wire
from tidelog.controller.model.levels import (
    CONFIG_BASE_LEVEL,
    NEWEST,
    REPLICATION_LEVEL,
    SUPPORTED,
    LevelRange,
    NewerLevel,
    UnsupportedLevel,
    level_key,
    range_in,
    told_range,
)
from tidelog.controller.model.replica_set_commands import SetReplicaSetPolicy
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.model.wal_notes import WalNote, note_key
from tidelog.controller.node import ControllerNode
from tidelog.controller.raft.consensus import MemoryConsensus, StateMachine
from tidelog.controller.raft.journal import Journal
from tidelog.runtime.errors import CorruptData, Unavailable
from tidelog.storage.commits import CommitObjects, CommitRefused, NotPrepared

LEVEL_0 = Path(__file__).parent / "level0"
NOTE = WalNote("disk", "bucket", 1, 1, 5, False, ())


class OldDriver(Driver):
    """A state at level 0: commands are written as members before feature levels wrote them."""

    elapsed_ms = -1

    def envelope(self, command: c.AnyCommand, client: str = "", sequence: int = 0, done: int = 0) -> c.Envelope:
        return c.Envelope(1, self.term, self.now_ms, client, sequence, done, command, self.elapsed_ms)

    def tell(self, broker_id: int, supported: LevelRange = SUPPORTED) -> None:
        """What a broker says of itself after its registration."""
        epoch = self.image.brokers[broker_id].registration_epoch
        self.run(c.PutKv(level_key(broker_id), told_range(epoch, supported)))


def old_commands() -> list[bytes]:
    return msgspec.msgpack.decode((LEVEL_0 / "commands.msgpack").read_bytes(), type=list[bytes])


def test_what_an_older_version_acknowledged_is_replayed_to_the_same_state() -> None:
    replayed, loaded = ControllerState(), ControllerState()
    for index, blob in enumerate(old_commands(), 1):
        replayed.apply(c.decode_envelope(blob), index)
    loaded.load((LEVEL_0 / "state.msgpack").read_bytes())
    assert (replayed.level, loaded.level) == (0, 0)
    assert replayed.dump() == loaded.dump()


def test_a_state_of_level_0_is_written_in_its_own_format() -> None:
    state = ControllerState()
    state.load((LEVEL_0 / "state.msgpack").read_bytes())
    old = msgspec.msgpack.decode((LEVEL_0 / "state.msgpack").read_bytes())
    new = msgspec.msgpack.decode(state.dump())
    assert (len(new), new[:4], new[5:]) == (len(old), old[:4], old[5:])
    for (name, found), (_, expected) in zip(new[4], old[4], strict=True):
        for (key, record), (_, old_record) in zip(found, expected, strict=True):
            if isinstance(old_record, list):
                added = record[len(old_record) :]
                assert (record[: len(old_record)], set(added) <= {0, "", -1}) == (old_record, True), (name, key)
            else:
                assert record == old_record, (name, key)


def test_a_new_cluster_begins_at_the_newest_level() -> None:
    driver = Driver()
    assert driver.state.level == NEWEST
    assert driver.image.cluster is not None and driver.image.cluster.level == NEWEST
    again = ControllerState()
    again.load(driver.state.dump())
    assert again.level == NEWEST


def test_the_level_is_raised_when_every_member_supports_it_and_a_repeat_changes_nothing() -> None:
    driver = OldDriver()
    driver.broker(0)
    driver.run(c.SetControllers(((0, "a:1"), (1, "b:1"))))
    both = ((0, 0, 1), (1, 0, 1))

    with pytest.raises(UnsupportedLevel, match=r"broker 0 \(levels 0\)"):
        driver.run(c.SetLevel(1, 0, both))
    driver.tell(0)
    with pytest.raises(UnsupportedLevel, match=r"controller 1 \(levels 0\)"):
        driver.run(c.SetLevel(1, 0, ((0, 0, 1),)))
    assert driver.state.level == 0

    assert driver.run(c.SetLevel(1, 0, both), int) == 1
    version = driver.state.version
    assert driver.run(c.SetLevel(1, 7, both), int) == 1
    assert (driver.state.level, driver.state.version) == (1, version)
    with pytest.raises(UnsupportedLevel, match="not lowered"):
        driver.run(c.SetLevel(0, 0, both))


def test_a_broker_that_registered_again_since_it_told_its_levels_has_told_nothing() -> None:
    driver = OldDriver()
    driver.broker(0, "a")
    driver.tell(0)
    driver.broker(0, "b")  # perhaps the older version again
    with pytest.raises(UnsupportedLevel, match="broker 0"):
        driver.run(c.SetLevel(1, 0, ()))


def test_a_dead_broker_counts_until_it_is_removed() -> None:
    driver = OldDriver()
    driver.broker(0)
    driver.tell(0)
    driver.run(c.RegisterBroker(1, "other", "a", "h", 1, "", ""))
    driver.run(c.SetBrokerAlive(1, 1, False))
    with pytest.raises(UnsupportedLevel, match="broker 1"):
        driver.run(c.SetLevel(1, 0, ()))
    driver.run(c.RemoveBroker(1))
    assert driver.run(c.SetLevel(1, 0, ()), int) == 1


def test_members_with_and_without_a_snapshot_of_the_older_version_raise_the_level_alike() -> None:
    """What the older version forgets in its snapshot must decide nothing."""
    replayed, loaded = ControllerState(), ControllerState()
    commands = old_commands()
    for index, blob in enumerate(commands, 1):
        replayed.apply(c.decode_envelope(blob), index)
    loaded.load((LEVEL_0 / "state.msgpack").read_bytes())
    at = len(commands)
    told = [c.PutKv(level_key(each.id), told_range(each.registration_epoch, SUPPORTED)) for each in brokers(replayed)]
    after: list[c.AnyCommand] = [
        *told,
        c.SetLevel(1, 1_000, ((0, 0, 1),)),
        c.PrepareObjects(1, 500),
        c.DeleteTopic(b"\x01" * 16),
    ]
    for step, command in enumerate(after, 1):
        level = replayed.level
        data = c.encode_envelope(c.Envelope(0, 4, 80_000, "", 0, 0, command, 1_000 + step), level)
        for state in (replayed, loaded):
            result = c.decode_result(state.apply(c.decode_envelope(data), at + step).result)
            assert result.error is None, result.error
    assert replayed.level == 1
    assert replayed.dump() == loaded.dump()


def brokers(state: ControllerState) -> list[Any]:
    return list(state.tables.brokers.values())


def test_the_cluster_time_goes_on_where_it_was_when_the_level_is_raised() -> None:
    driver = OldDriver()
    driver.now_ms += 5_000
    driver.run(c.Barrier())
    before = driver.state.tables.time_ms
    driver.run(c.SetLevel(1, 3_000, ()))
    raised = c.Envelope(2, 1, driver.now_ms + 10**9, "", 0, 0, c.Barrier(), 3_250)
    driver.apply(raised)
    assert driver.state.tables.time_ms == before + 250, "no wall clock moves it any more"


@pytest.mark.parametrize("command", [c.NoteWal(0, NOTE), c.DeletePartitions(TOPIC, 1), c.AcceptWalLoss(0, 1, 1)])
def test_a_command_of_a_higher_level_is_neither_written_nor_applied(command: c.AnyCommand) -> None:
    driver = OldDriver()
    driver.broker(0)
    with pytest.raises(UnsupportedLevel, match="needs feature level 1"):
        c.encode_envelope(driver.envelope(command), 0)
    for written in (driver.envelope(command), msgspec.structs.replace(driver.envelope(command), format_version=2)):
        result = driver.apply(written)
        assert result.error is not None
        assert isinstance(from_wire(result.error), UnsupportedLevel)
    assert note_key(0) not in driver.image.kv


def test_a_command_that_was_written_above_the_level_in_force_changes_nothing() -> None:
    driver = OldDriver()
    result = driver.apply(c.Envelope(2, 1, driver.now_ms, "", 0, 0, c.PutKv("k", b"v"), 5))
    assert result.error is not None
    assert "written at feature level 1; the cluster is at level 0" in result.error.message
    assert "k" not in driver.image.kv


def test_fields_of_a_higher_level_are_not_written_at_a_lower_one() -> None:
    for command in (
        c.DeleteTopic(TOPIC, 7),
        c.TrimStream(1, 2, 3, 4, 5),
        c.RegisterBroker(0, "c", "i", "h", 1, "", "", wal_place="bucket", oldest_level=0, newest_level=1),
    ):
        data = c.encode_envelope(c.Envelope(9, 1, 5, "", 0, 0, command, 77), 0)
        written = c.decode_envelope(data)
        assert (written.format_version, written.elapsed_ms, written.level) == (1, -1, 0)
        defaults = type(command)(*(getattr(command, name) for name in OLD_FIELDS[type(command)]))
        assert written.command == defaults
        again = c.decode_envelope(c.encode_envelope(c.Envelope(9, 1, 5, "", 0, 0, command, 77), 1))
        assert (again.format_version, again.elapsed_ms, again.command) == (2, 77, command)


def test_a_replication_factor_is_written_from_level_2_on_and_one_is_what_every_older_set_gives() -> None:
    def written(replicas: int, level: int) -> int:
        command = c.CreateTopic(TOPIC, "t", 1, {}, False, False, None, None, replicas)
        found = c.decode_envelope(c.encode_envelope(c.Envelope(9, 1, 5, "", 0, 0, command, 77), level)).command
        assert isinstance(found, c.CreateTopic)
        return found.replicas

    assert [written(1, level) for level in (0, 1, 2)] == [0, 0, 1]
    assert written(3, 2) == 3
    with pytest.raises(InvalidReplicationFactor, match="at feature level 1 a replica set has one member"):
        written(2, 1)


OLD_FIELDS: dict[type, tuple[str, ...]] = {
    c.DeleteTopic: ("topic_id",),
    c.TrimStream: ("stream_id", "epoch", "start_offset"),
    c.RegisterBroker: ("broker_id", "check_code", "incarnation", "host", "port", "rack", "admin_url"),
}


def test_what_a_change_of_configs_is_based_on_is_written_from_level_6_on() -> None:
    for command in (c.AlterTopicConfigs(bytes(16), {}, digest({})), c.AlterConfigs("cluster", "", {}, digest({}))):
        for level in range(NEWEST + 1):
            written = c.decode_envelope(c.encode_envelope(c.Envelope(0, 1, 0, "", 0, 0, command), level)).command
            assert isinstance(written, c.AlterTopicConfigs | c.AlterConfigs)
            assert written.base == (digest({}) if level >= CONFIG_BASE_LEVEL else ANY)
    policy = PolicyRecord()
    for level in range(REPLICATION_LEVEL, NEWEST + 1):
        envelope = c.Envelope(0, 1, 0, "", 0, 0, SetReplicaSetPolicy(0, policy, policy))
        written = c.decode_envelope(c.encode_envelope(envelope, level)).command
        assert isinstance(written, SetReplicaSetPolicy)
        assert written.base == (policy if level >= CONFIG_BASE_LEVEL else None)


def test_a_command_that_is_on_its_way_when_the_level_is_raised_counts_by_its_own_rules() -> None:
    driver = OldDriver()
    epoch = driver.broker(0)
    streams = driver.topic()
    driver.tell(0)
    first = driver.prepare(2)
    driver.run(c.OpenStreams(0, epoch, ((streams[0], epoch),)))
    driver.commit(epoch, (0, 10), new_object(first, (streams[0], 0, 3)))
    driver.run(c.SetLevel(1, 0, ()))
    driver.run(c.DeleteTopic(TOPIC, 1))  # written at level 0, where all partitions go at once
    assert driver.image.objects[first].destroyed_at == 0
    assert not driver.image.index.deleted_topics


@pytest.mark.parametrize("version", [0, NEWEST + 2, 1_000])
def test_an_envelope_of_an_unknown_version_is_refused_by_name(version: int) -> None:
    data = c.encode(c.Envelope(version, 1, 5, "", 0, 0, c.PutKv("k", b"v")))
    with pytest.raises(NewerLevel, match=rf"PutKv is of feature level .*supports levels {SUPPORTED}"):
        c.decode_envelope(data)


def test_an_unknown_command_of_a_newer_level_is_refused_by_its_level() -> None:
    data = msgspec.msgpack.encode([NEWEST + 2, 1, 5, "", 0, 0, [9_999, "something new"]])
    with pytest.raises(NewerLevel, match=f"feature level {NEWEST + 1}"):
        c.decode_envelope(data)


async def replica() -> Replica:
    return Replica(asyncio.get_running_loop(), lambda deltas: None, lambda image: None)


async def test_a_member_ends_when_the_cluster_is_raised_to_a_level_that_it_does_not_support() -> None:
    machine = await replica()
    machine.apply(c.encode(c.Envelope(2, 1, 5, "", 0, 0, c.BecomeActive(0, 1, "id", 5))), 1)
    refused = c.RegisterBroker(0, "c", "i", "h", 1, "", "", oldest_level=0, newest_level=1)
    machine.apply(c.encode(c.Envelope(2, 1, 5, "", 0, 0, refused)), 2)
    raised = c.encode(c.Envelope(2, 1, 5, "", 0, 0, c.SetLevel(NEWEST + 1, 0, ())))
    result = c.decode_result(machine.apply(raised, 3))
    assert result.error is not None and "broker 0" in result.error.message, "every version refuses this"

    able = c.PutKv(level_key(0), told_range(1, LevelRange(0, NEWEST + 1)))
    machine.apply(c.encode(c.Envelope(2, 1, 5, "", 0, 0, able)), 4)
    with pytest.raises(
        NewerLevel, match=rf"entry 5 of the Raft log: the cluster, raised .* is of feature level {NEWEST + 1}"
    ):
        machine.apply(raised, 5)
    assert machine.state.level == 1


async def test_a_snapshot_of_an_unknown_version_or_level_is_refused_and_changes_nothing() -> None:
    machine, driver = await replica(), Driver()
    body = msgspec.msgpack.decode(driver.state.dump())
    with pytest.raises(NewerLevel, match="the snapshot has version 9; this process reads 1, 2, 3"):
        machine.load(msgspec.msgpack.encode([9, "whatever"]))
    row = dict(body[4])["cluster"][0][1]
    row[-1] = NEWEST + 1
    with pytest.raises(NewerLevel, match=f"the snapshot is of feature level {NEWEST + 1}"):
        machine.load(msgspec.msgpack.encode(body))
    with pytest.raises(CorruptData):
        machine.load(b"\xc0")
    assert machine.state.applied_index == 0


def test_a_build_between_the_levels_left_a_journal_and_a_snapshot_of_level_1() -> None:
    """It wrote envelopes of version 1 that tell what elapsed, and a cluster time in the snapshot."""
    driver = OldDriver()
    driver.elapsed_ms, driver.term = 0, 2
    driver.run(c.BecomeActive(0, 2, "x", 1_000))
    assert driver.state.level == 1
    driver.broker(0)
    driver.run(c.NoteWal(0, NOTE))
    assert note_key(0) in driver.image.kv

    body = msgspec.msgpack.decode(driver.state.dump())
    body[0] = 1
    dict(body[4])["cluster"][0][1].pop()
    loaded = ControllerState()
    loaded.load(msgspec.msgpack.encode(body))
    assert loaded.dump() == driver.state.dump()


def test_a_broker_must_support_the_level() -> None:
    driver = Driver()
    with pytest.raises(UnsupportedLevel, match=f"the cluster is at feature level {NEWEST}; broker 0 supports 0"):
        driver.run(c.RegisterBroker(0, "c", "i", "h", 1, "", "", oldest_level=0, newest_level=0))
    with pytest.raises(UnsupportedLevel, match=f"broker 0 supports {NEWEST + 1} to {NEWEST + 3}"):
        driver.run(c.RegisterBroker(0, "c", "i", "h", 1, "", "", oldest_level=NEWEST + 1, newest_level=NEWEST + 3))
    driver.run(c.RegisterBroker(0, "c", "i", "h", 1, "", "", oldest_level=0, newest_level=NEWEST))
    assert range_in(driver.image.kv[level_key(0)], 1) == LevelRange(0, NEWEST)
    driver.run(c.SetBrokerAlive(0, 1, False))
    driver.run(c.RemoveBroker(0))
    assert level_key(0) not in driver.image.kv


@pytest.mark.parametrize("value", [None, b"", b"\xc1", b"\x90", b"\x93\x02\x00\x01"])
def test_what_is_not_a_range_of_this_registration_is_none(value: bytes | None) -> None:
    assert range_in(value, 1) == LevelRange(0, 0)


# What the active controller finds out before it raises


def raising(driver: Driver, statuses: dict[str, dict[str, Any] | None]) -> LevelRaise:
    """Of controller 0, with others at the addresses of `statuses`; None: no answer."""

    async def ask(address: str) -> dict[str, Any]:
        told = statuses[address]
        if told is None:
            raise Unavailable("connection refused")
        return told

    async def propose(command: c.AnyCommand) -> None:
        driver.run(command)

    role = ActiveRole(lambda: driver.image, propose, lambda: True, lambda: 0)
    members = {0: "own", **dict(enumerate(sorted(statuses), 1))}
    driver.run(c.SetControllers(tuple(sorted(members.items()))))
    return LevelRaise(role, 0, lambda: members, ask, lambda: 5, asyncio.Lock())


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (None, "did not say what they support: controller 1: connection refused"),
        ({"node": 1}, r"not supported by controller 1 \(levels 0\)"),
        ({"node": 1, "levels": [0, 0]}, r"not supported by controller 1 \(levels 0\)"),
        ({"node": 7, "levels": [0, 1]}, "controller 7 answers at a:1"),
    ],
)
async def test_every_controller_must_say_that_it_supports_the_level(told: dict[str, Any] | None, said: str) -> None:
    driver = OldDriver()
    found = raising(driver, {"a:1": told, "b:2": {"node": 2, "levels": [0, 1]}})
    assert (await found.run(1, dry_run=True))["unable"] == ["controller 1 (levels 0)"]
    assert (await found.run(-1, dry_run=True))["target"] == 0
    with pytest.raises(UnsupportedLevel, match=said):
        await found.run(1, dry_run=False)
    assert driver.state.level == 0


async def test_the_level_is_raised_when_all_controllers_say_that_they_support_it() -> None:
    driver = OldDriver()
    found = raising(driver, {"a:1": {"node": 1, "levels": [0, 1]}, "b:2": {"node": 2, "levels": [1, 4]}})
    report = await found.run(-1, dry_run=False)
    assert (report["level"], report["target"], report["raised"]) == (1, 1, True)
    assert driver.state.level == 1
    assert not (await found.run(-1, dry_run=False))["raised"]


async def test_a_raise_that_is_asked_again_after_a_controller_has_died_finds_that_it_is_done() -> None:
    """Its answer may have been lost with that controller. Refused, it would seem to have changed nothing."""
    driver = OldDriver()
    statuses: dict[str, dict[str, Any] | None] = {"a:1": {"node": 1, "levels": [0, NEWEST]}}
    found = raising(driver, statuses)
    assert (await found.run(NEWEST, dry_run=False))["raised"]
    statuses["a:1"] = None
    for level in (NEWEST, -1):
        report = await found.run(level, dry_run=False)
        assert (report["level"], report["target"], report["raised"]) == (NEWEST, NEWEST, False)
    with pytest.raises(UnsupportedLevel, match="did not say what they support: controller 1"):
        await found.run(NEWEST + 1, dry_run=False)


# A controller over the directory of the older version


@pytest.fixture
def old_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "controller"
    directory.mkdir()
    for name in ("journal", "snapshot"):
        shutil.copyfile(LEVEL_0 / name, directory / name)
    return directory


async def started(directory: Path) -> ControllerNode:
    node = make_node(directory)
    await node.start()
    await node.wait_active(30)
    return node


async def stopped(*parts: Any) -> None:
    for part in parts:
        await part.close()


def envelopes(directory: Path) -> list[c.Envelope]:
    journal = Journal.open(directory / "journal")
    try:
        return [c.decode_envelope(blob[1:]) for blob, _, _ in journal.entries if blob[0] == 0 and len(blob) > 1]
    finally:
        journal.close()


def registration() -> c.RegisterBroker:
    return c.RegisterBroker(0, "c", "next", "127.0.0.1", 9092, "", "")


async def test_a_controller_goes_on_at_the_level_of_its_directory_until_it_is_raised(old_directory: Path) -> None:
    node = await started(old_directory)
    client = make_client(node.address)
    await client.start()
    assert client.image.topic("old") is not None
    assert await client.get_kv("after") == b"the snapshot"
    await client.register_broker(registration())
    epoch = (await client.elect(0, 0)).master_epoch
    with pytest.raises(UnsupportedLevel, match="NoteWal needs feature level 1"):
        await client.note_wal(0, NOTE)
    status = await client.status()
    assert (status["level"], status["levels"]) == (0, [0, NEWEST])
    assert {each.format_version for each in envelopes(old_directory)} == {1}
    assert {each.elapsed_ms for each in envelopes(old_directory)} == {-1}

    plan = await client.upgrade(dry_run=True)
    assert (plan["level"], plan["target"], plan["raised"], plan["unable"]) == (0, NEWEST, False, [])
    assert [(each["kind"], each["id"], each["newest"]) for each in plan["members"]] == [
        ("controller", 0, NEWEST),
        ("broker", 0, NEWEST),
    ]
    assert node.status()["level"] == 0, "a dry run changes nothing"
    assert (await client.upgrade(dry_run=False))["raised"]
    await client.note_wal(0, msgspec.structs.replace(NOTE, master_epoch=epoch))
    assert (await client.upgrade(dry_run=False))["raised"] is False, "a repeat finds that it is done"
    with pytest.raises(UnsupportedLevel, match="not lowered"):
        await client.upgrade(0, dry_run=False)
    with pytest.raises(UnsupportedLevel, match=f"level {NEWEST + 1} is not supported by controller 0"):
        await client.upgrade(NEWEST + 1, dry_run=False)
    await stopped(client, node)

    node = await started(old_directory)
    assert node.status()["level"] == NEWEST
    await stopped(node)


async def test_a_raise_returns_when_the_callers_metadata_have_it(old_directory: Path) -> None:
    """What the caller does next is decided by the level, as the other updates of an UpdateFeatures request are."""
    node, network = await started(old_directory), KeptNetwork()
    client = make_client(node.address, network=network)
    await client.start()
    await client.register_broker(registration())
    polls = network.transports[1]
    polls.pause_reading()
    raising = asyncio.create_task(client.upgrade(dry_run=False))
    await until(lambda: node.status()["level"] == NEWEST)
    for _ in range(3):
        await client.status()
    assert not raising.done() and client.feature_level == 0
    polls.resume_reading()
    assert (await raising)["raised"]
    assert client.feature_level == NEWEST
    await stopped(client, node)


def test_an_id_that_is_not_prepared_is_refused_at_each_level_as_its_brokers_know_it() -> None:
    for driver, expected in ((OldDriver(), "CommitRefused"), (Driver(), "NotPrepared")):
        epoch = driver.broker()
        (first,) = driver.topic()
        driver.run(c.OpenStreams(0, epoch, ((first, epoch),)))
        commit = CommitObjects(0, epoch, 0, 10, (new_object(99, (first, 0, 1)),))
        error = driver.apply(driver.envelope(c.Commit(commit))).error
        assert error is not None and error.name == expected


async def test_at_level_0_a_broker_finds_in_its_metadata_that_an_id_has_expired(old_directory: Path) -> None:
    """Otherwise it takes itself for fenced, and ends."""
    node = await started(old_directory)
    client = make_client(node.address)
    await client.start()
    await client.register_broker(registration())
    epoch = (await client.elect(0, 0)).master_epoch
    start = client.committed_wal_offset(0)
    prepared = await client.prepare_objects(1, 60_000)

    def commit(object_id: int, master_epoch: int) -> CommitObjects:
        return CommitObjects(0, master_epoch, start, start + 10, (new_object(object_id),))

    with pytest.raises(NotPrepared):
        await client.commit_objects(commit(prepared + 1, epoch))
    with pytest.raises(CommitRefused):
        await client.commit_objects(commit(prepared + 1, epoch - 1))
    with pytest.raises(CommitRefused):
        await client.commit_objects(commit(prepared, epoch - 1))
    await client.commit_objects(commit(prepared, epoch))
    await stopped(client, node)


class LateConsensus(MemoryConsensus):
    """One that is told to lead before it has applied what its log has, as a restarted member without a snapshot is."""

    def __init__(self, log: list[bytes]) -> None:
        super().__init__(term=9)
        self._unapplied = log
        self.proposed: list[c.Envelope] = []

    async def _apply_log(self) -> None:
        unapplied, self._unapplied = self._unapplied, []
        for blob in unapplied:
            await super().propose(blob, 1.0)

    async def barrier(self, timeout_s: float) -> None:
        await self._apply_log()
        await asyncio.sleep(0)  # what was applied is delivered on the loop before the result is

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        self.proposed.append(c.decode_envelope(blob))
        await self._apply_log()
        return await super().propose(blob, timeout_s)


async def test_a_log_of_level_0_that_is_not_applied_yet_gets_no_command_of_a_higher_level(tmp_path: Path) -> None:
    """An older member would apply it, and take its time, which this version refuses: their states would differ."""
    consensus = LateConsensus(old_commands())
    node = make_node(tmp_path, consensus=consensus)
    await node.start()
    await node.wait_active(30)
    assert [type(each.command) for each in consensus.proposed[:1]] == [c.BecomeActive]
    assert {each.format_version for each in consensus.proposed} == {1}
    await node.close()


class SnapshotConsensus(LateConsensus):
    """A `LateConsensus` whose member has a snapshot, of before the commands that it has not applied."""

    def __init__(self, snapshot: bytes, log: list[bytes]) -> None:
        super().__init__(log)
        self._snapshot = snapshot

    async def start(self, machine: StateMachine) -> None:
        machine.load(self._snapshot)
        await super().start(machine)


async def test_a_raise_that_is_not_applied_yet_when_a_term_begins_is_applied_first(tmp_path: Path) -> None:
    """Written at level 0, the first command would move the cluster time by this controller's wall clock."""
    state = ControllerState()
    state.load((LEVEL_0 / "state.msgpack").read_bytes())
    cluster = state.tables.cluster.rows[""]
    told = [c.PutKv(level_key(each.id), told_range(each.registration_epoch, SUPPORTED)) for each in brokers(state)]
    raised: list[c.AnyCommand] = [*told, c.SetLevel(NEWEST, 0, ((0, 0, NEWEST),))]
    now_ms = state.tables.time_ms
    snapshot = msgspec.msgpack.decode(state.dump())
    snapshot[1:3] = 0, 0  # metadata version and log index: this log begins behind it
    log = [c.encode_envelope(c.Envelope(0, cluster.active_term, now_ms, "", 0, 0, each), 0) for each in raised]
    node = make_node(tmp_path, consensus=SnapshotConsensus(msgspec.msgpack.encode(snapshot), log))
    await node.start()
    await node.wait_active(30)
    assert node.image.cluster is not None
    assert (node.image.level, node.image.cluster.active_since_ms) == (NEWEST, now_ms)
    await node.close()


async def test_a_new_cluster_is_founded_at_the_newest_level_by_its_first_command(tmp_path: Path) -> None:
    consensus = LateConsensus([])
    node = make_node(tmp_path, consensus=consensus)
    await node.start()
    await node.wait_active(30)
    assert {each.level for each in consensus.proposed} == {NEWEST}
    await node.close()


class HeldConsensus(LateConsensus):
    """One whose commands wait, written, for their place in the log while it is not `open`."""

    def __init__(self, log: list[bytes]) -> None:
        super().__init__(log)
        self.open = asyncio.Event()
        self.open.set()
        self.waiting: list[c.AnyCommand] = []

    async def propose(self, blob: bytes, timeout_s: float) -> bytes:
        self.waiting.append(c.decode_envelope(blob).command)
        await self.open.wait()
        return await super().propose(blob, timeout_s)


async def test_an_older_broker_whose_registration_is_on_its_way_when_the_level_is_raised_is_refused(
    tmp_path: Path,
) -> None:
    """It was written at level 0, by whose rules it counts: it tells no range, and any is good enough."""
    consensus = HeldConsensus(old_commands())
    node = make_node(tmp_path, consensus=consensus)
    await node.start()
    await node.wait_active(30)
    client = make_client(node.address)
    await client.start()
    for each in node.image.brokers.values():
        await client.put_kv(level_key(each.id), told_range(each.registration_epoch, SUPPORTED))
    consensus.open.clear()
    raising = asyncio.create_task(client.upgrade(dry_run=False))
    await until(lambda: any(isinstance(each, c.SetLevel) for each in consensus.waiting))
    older = asyncio.create_task(send(node, c.RegisterBroker(5, "older", "a", "h", 1, "", "")))
    present = asyncio.create_task(client.register_broker(c.RegisterBroker(6, "present", "a", "h", 1, "", "")))
    await until(lambda: sum(isinstance(each, c.RegisterBroker) for each in consensus.waiting) == 2)
    consensus.open.set()
    assert (await raising)["raised"]
    with pytest.raises(UnsupportedLevel, match=f"the cluster is at feature level {NEWEST}; broker 5 supports 0"):
        await older
    await present
    await stopped(client, node)


async def test_the_level_is_not_raised_over_a_broker_that_told_nothing(old_directory: Path) -> None:
    """The broker of the older version is registered in that directory."""
    node = await started(old_directory)
    client = make_client(node.address)
    await client.start()
    plan = await client.upgrade(1, dry_run=True)
    assert plan["unable"] == ["broker 0 (levels 0)"]
    with pytest.raises(UnsupportedLevel, match="broker 0"):
        await client.upgrade(1, dry_run=False)
    assert (await client.upgrade(dry_run=True))["target"] == 0
    await stopped(client, node)


async def test_a_broker_of_an_older_version_is_refused_by_a_raised_cluster(tmp_path: Path) -> None:
    node = await started(tmp_path)
    with pytest.raises(UnsupportedLevel, match="broker 5 supports 0"):
        await send(node, c.RegisterBroker(5, "c", "a", "h", 1, "", ""))
    assert 5 not in node.image.brokers
    await stopped(node)


async def test_a_directory_of_a_newer_level_is_refused_at_start(tmp_path: Path) -> None:
    node = await started(tmp_path)
    await stopped(node)
    journal = Journal.open(tmp_path / "journal")
    last = journal.last_index
    term = journal.entries[-1][2]
    newer = c.encode(c.Envelope(NEWEST + 2, term, 5, "", 0, 0, c.Barrier()))
    journal.append(b"\x00" + newer, last + 1, term)
    journal.sync()
    journal.close()
    failures: list[Exception] = []
    node = make_node(tmp_path, on_failed=failures.append)
    try:
        await node.start()
        await until(lambda: bool(failures))
    except NewerLevel as error:
        failures.append(error)
    finally:
        await node.close()
    assert isinstance(failures[0], NewerLevel), failures
    assert f"the command Barrier is of feature level {NEWEST + 1}" in str(failures[0])


def test_not_controller_is_no_matter_of_levels() -> None:
    """A command of an old term is refused whatever it was written at, as before."""
    driver = Driver()
    result = driver.apply(c.Envelope(1, 0, 5, "", 0, 0, c.PutKv("k", b"v")))
    assert result.error is not None and isinstance(from_wire(result.error), NotController)
