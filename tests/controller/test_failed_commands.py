"""A command whose application raises: wherever that is, it changes nothing, and the next command is applied as ever.

The faults are planted in what every command passes through: its handler, the indexes, the encodings, the sweep of
garbage.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.controller.controller_helpers import TOPIC, Driver, make_client, make_node, new_object, until
from tidelog.broker.admin.quorum import QuorumView
from tidelog.controller import node as controller_node
from tidelog.controller.active.duties import Duties
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine import objects
from tidelog.controller.machine.index import MetadataIndex
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import CommandFailed
from tidelog.runtime import task_errors, tasks
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.task_errors import TaskErrors
from tidelog.storage.commits import CommitObjects

STATE_LOGGER = "tidelog.controller.machine.state"


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.broker()
    return driver


def reloaded(state: ControllerState) -> ControllerState:
    other = ControllerState()
    other.load(state.dump())
    return other


def index_of(state: ControllerState) -> dict[str, Any]:
    """The derived indexes, comparable."""
    names = [name for name in vars(MetadataIndex({})) if not name.startswith("_")]
    found = {name: getattr(state.tables.index, name) for name in names}
    found["partition_counts"] = {key: count for key, count in found["partition_counts"].items() if count}
    return found


def rows_of(state: ControllerState) -> list[dict[Any, Any]]:
    return [dict(table.rows) for table in state.tables.public()]


class Planted(Exception):
    """Its text differs from one process to the next, as that of many exceptions does."""

    def __init__(self) -> None:
        super().__init__(f"{object()!r}")


def require_failed(result: c.Result, kind: str, index: int) -> None:
    """The answer says which command it was, and is the same on every member."""
    assert result.error is not None and result.error.name == CommandFailed.__name__, result
    assert kind in result.error.message and str(index) in result.error.message
    assert "0x" not in result.error.message and "Planted" not in result.error.message


@pytest.mark.parametrize(("table", "key"), [("topics", TOPIC), ("partitions", (TOPIC, 5)), ("streams", 30)])
def test_an_exception_while_rows_are_indexed_changes_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, table: str, key: Any
) -> None:
    driver.topic(2, "kept", bytes(15) + b"k")
    version, before, indexes = driver.state.version, rows_of(driver.state), index_of(reloaded(driver.state))
    note = MetadataIndex.note

    def planted(self: MetadataIndex, name: str, old: Any, new: Any) -> None:
        if name == table and (new.id if name != "partitions" else (new.topic_id, new.index)) == key:
            raise Planted
        note(self, name, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(MetadataIndex, "note", planted)
        result = driver.apply(driver.envelope(c.CreateTopic(TOPIC, "t", 8, {}, False, False, None)))
    require_failed(result, "CreateTopic", driver.index)
    assert rows_of(driver.state) == before and driver.state.version == version
    assert index_of(driver.state) == indexes
    driver.topic(8)
    assert driver.state.dump() == reloaded(driver.state).dump()
    assert index_of(driver.state) == index_of(reloaded(driver.state))


def test_committed_ends_are_taken_back_with_the_rest(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = driver.state.tables.replica_sets.rows[0].master_epoch
    (first,) = driver.topic()
    driver.run(c.OpenStreams(0, epoch, ((first, epoch),)))
    object_id = driver.prepare()
    before, indexes = rows_of(driver.state), index_of(reloaded(driver.state))
    note = MetadataIndex.note
    request = CommitObjects(0, epoch, 0, 10, (new_object(object_id, (first, 0, 10)),))

    def planted(self: MetadataIndex, name: str, old: Any, new: Any) -> None:
        if name == "replica_sets" and new.committed_wal_offset:
            raise Planted
        note(self, name, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(MetadataIndex, "note", planted)
        require_failed(driver.apply(driver.envelope(c.Commit(request))), "Commit", driver.index)
    assert rows_of(driver.state) == before and index_of(driver.state) == indexes
    driver.run(c.Commit(request))
    assert driver.state.tables.streams.rows[first].end_offset == 10


@pytest.mark.parametrize("value", [1 << 70, object(), "\ud800"])
def test_a_value_that_cannot_be_encoded_changes_nothing(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    before = rows_of(driver.state)
    registration = driver.state.tables.brokers.rows[0].registration_epoch
    with monkeypatch.context() as patch:
        patch.setattr(Tables, "take_ids", lambda *_: value)
        result = driver.apply(driver.envelope(c.AllocateProducerIds(0, registration)))
        require_failed(result, "AllocateProducerIds", driver.index)
    assert rows_of(driver.state) == before
    assert driver.run(c.AllocateProducerIds(0, registration))[1] == c.PRODUCER_ID_BLOCK


@pytest.mark.parametrize("row", [1 << 70, object()])
def test_a_row_that_cannot_be_encoded_changes_nothing(
    driver: Driver, row: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the command would be in force, and no delta, image or snapshot could be encoded from then on."""
    put = driver.state.tables.kv.put
    before = rows_of(driver.state)
    with monkeypatch.context() as patch:
        patch.setattr(driver.state.tables.kv, "put", lambda key, _value: put(key, row))
        require_failed(driver.apply(driver.envelope(c.PutKv("k", b"v"))), "PutKv", driver.index)
    assert rows_of(driver.state) == before
    assert driver.state.dump() == reloaded(driver.state).dump()


def test_an_exception_in_the_sweep_leaves_the_command_in_force(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    epoch = driver.state.tables.replica_sets.rows[0].master_epoch
    (first,) = driver.topic()
    driver.run(c.OpenStreams(0, epoch, ((first, epoch),)))
    object_id = driver.prepare()
    driver.commit(epoch, (0, 10), new_object(object_id, (first, 0, 10)))

    def planted(tables: Tables, _object_id: int) -> None:
        tables.kv.put("half", b"done")
        raise Planted

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, STATE_LOGGER):
        patch.setattr(objects, "destroy", planted)
        driver.run(c.DeleteTopic(TOPIC))
        driver.run(c.PutKv("k", b"v"))
    assert not driver.state.tables.topics.rows and set(driver.state.tables.kv.rows) == {"k"}
    assert driver.state.tables.index.garbage == {object_id}
    assert ["sweep" in vars(record)["command"] for record in caplog.records] == [True, True]
    driver.run(c.Barrier())
    assert driver.state.tables.index.destroyed == {object_id}


def test_a_command_that_fails_right_after_a_start_leaves_what_the_snapshot_had(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loading of a snapshot is no part of the first command after it, and is not taken back with that."""
    driver.topic(2)
    restarted = reloaded(driver.state)
    failing = driver.envelope(c.AllocateProducerIds(0, 1))

    def planted(*_: Any) -> None:
        raise Planted

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "take_ids", planted)
        require_failed(driver.apply(failing), "AllocateProducerIds", driver.index)
        restarted.apply(failing, driver.index)
    assert restarted.dump() == driver.state.dump()
    assert index_of(restarted) == index_of(driver.state)


def test_the_member_says_which_command_it_was(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def planted(_key: str, _value: bytes) -> None:
        raise Planted

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, STATE_LOGGER):
        patch.setattr(driver.state.tables.kv, "put", planted)
        require_failed(driver.apply(driver.envelope(c.PutKv("k", b"v"))), "PutKv", driver.index)
    failed = driver.state.failed
    assert failed is not None
    assert (failed.times, failed.index, failed.command) == (1, driver.index, "PutKv")
    assert "Planted" in failed.error
    (record,) = caplog.records
    assert vars(record)["command"] == "PutKv" and vars(record)["index"] == driver.index and record.exc_info


def test_what_a_failed_command_leaves_is_the_same_on_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is kept by dedupe id, so it is part of the replicated state."""
    dumps = []
    for _ in range(2):
        driver = Driver()
        with monkeypatch.context() as patch:

            def planted(_key: str, _value: bytes) -> None:
                raise Planted

            patch.setattr(driver.state.tables.kv, "put", planted)
            driver.apply(driver.envelope(c.PutKv("k", b"v"), "client", 1))
        dumps.append(driver.state.dump())
    assert dumps[0] == dumps[1]


async def test_a_running_controller_goes_on_and_tells_which_command_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(tmp_path)
    await node.start()
    client = make_client(node.address)
    await client.start()
    assert node.status()["failed_command"] is None

    def planted(*_: Any) -> None:
        raise Planted

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "commit", planted)
        with pytest.raises(CommandFailed, match="PutKv at index"):
            await client.put_kv("k", b"v")
    await client.put_kv("after", b"v")
    assert dict(client.image.kv) == {"after": b"v"}
    told = node.status()["failed_command"]
    assert told["command"] == "PutKv" and told["times"] == 1
    report = await QuorumView(client).report()
    assert any(f"command PutKv at index {told['index']}" in problem for problem in report["problems"])
    await client.close()
    await node.close()


async def test_a_controller_whose_copy_of_the_metadata_fails_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would answer from metadata that is out of date for good."""
    failures: asyncio.Queue[Exception] = asyncio.Queue()
    node = make_node(tmp_path, on_failed=failures.put_nowait)
    await node.start()
    client = make_client(node.address, budget_s=0.3)
    await client.start()
    apply = Image.apply

    def planted(image: Image, delta: Delta) -> None:
        if any(key == "k" for _, key, _ in delta.mutations):
            raise Planted
        apply(image, delta)

    monkeypatch.setattr(Image, "apply", planted)
    with pytest.raises(TidelogError):
        await client.put_kv("k", b"v")
    async with asyncio.timeout(10):
        failure = await failures.get()
    assert "cannot follow the command at index" in str(failure) and not node.is_active
    monkeypatch.undo()
    await client.close()
    await node.close()

    again = make_node(tmp_path)
    await again.start()
    assert again.image.kv == {"k": b"v"}
    await again.close()


@pytest.mark.usefixtures("quick_rounds")
async def test_what_the_tasks_of_a_controller_meet_is_told_where_the_cluster_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a controller alone has no HTTP: its broken rounds were in its log, and the status was well."""
    errors = TaskErrors()
    for module in (task_errors, tasks, controller_node):
        monkeypatch.setattr(module, "ERRORS", errors)  # those of this process are of other tests, too

    def planted(*_: Any) -> None:
        raise Planted

    node = make_node(tmp_path)
    await node.start()
    client = make_client(node.address)
    await client.start()
    with monkeypatch.context() as patch:
        patch.setattr(Duties, "members", planted)
        await until(lambda: errors.counts().get("controller", 0) > 1)
    report = await QuorumView(client).report()
    (problem,) = report["problems"]
    assert problem.startswith("controller 0: unexpected error of controller, ")
    driver = Driver()
    driver.broker()
    client.image.brokers.update(driver.image.brokers)
    assert (await QuorumView(client).report())["problems"] == [], "the broker in its process tells it"
    await client.close()
    await node.close()
