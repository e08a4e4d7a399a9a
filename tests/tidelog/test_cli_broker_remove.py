"""`tidelog broker remove`: that it is told what would be lost, what is checked before anything is stopped, and repeats.

The controllers' state and the handlers of the admin HTTP are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request
from click.testing import CliRunner, Result

from tests.controller.controller_helpers import Driver
from tests.support.ports import free_port
from tests.support.scripted_admin import scripted_admin
from tidelog.broker.admin.answers import status_of
from tidelog.broker.admin.brokers import BrokerRoutes
from tidelog.broker.admin.losses import LossRoutes
from tidelog.broker.kafka.services import nothing_to_prepare
from tidelog.cli.client import ClusterConnection
from tidelog.cli.subcommands.broker import remove
from tidelog.config import load
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.records import DrainMode
from tidelog.controller.model.replication import PolicyRecord
from tidelog.process import cluster_layout
from tidelog.process.up_control import ControlServer
from tidelog.runtime.errors import InvalidInput, NotFound, StorageFailed, TidelogError, Unavailable
from tidelog.storage.bucket.memory import MemoryObjectStore

GONE, LIVE = 4, 1
"""Nodes 1 to 3 of the directory have controllers, too."""
TOPIC = bytes(range(16))


class NoWal:
    """The WAL of a broker, of which nothing is in the bucket."""

    async def fence(self, master_epoch: int) -> None:
        """Shut nobody out."""

    async def clear(self, master_epoch: int, committed_offset: int) -> int:
        """Delete nothing."""
        return 0

    async def sweep(self) -> int:
        """Delete nothing."""
        return 0


class RemovalWorld:
    """The controllers' state, and the admin HTTP of a broker that lives."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.url = ""
        self.posts: list[str] = []
        self.interrupt = ""
        """When a removal ends without an answer: `before` or `after` the controllers have removed the broker."""
        controller, store = cast("Any", self), MemoryObjectStore()
        self._routes = [
            *BrokerRoutes(controller, lambda _: cast("Any", NoWal()), nothing_to_prepare).routes(),
            *LossRoutes(controller, store, self.quorum, lambda _: cast("Any", NoWal())).routes(),
        ]

    @property
    def image(self) -> Any:
        return self.driver.image

    async def quorum(self) -> dict[str, Any]:
        return {"members": [{"not_uploaded": {str(GONE): [4_096, 1_000]}}]}

    async def remove_broker(self, broker_id: int) -> None:
        if self.interrupt != "before":
            self.driver.run(c.RemoveBroker(broker_id))
        if self.interrupt:
            raise Unavailable("interrupted")

    async def abandon(self, replica_set: int, epoch: int, keys: Any, *, force: bool) -> tuple[int, int]:
        left, following = self.driver.run(c.Abandon(replica_set, epoch, tuple(keys), force))
        return left, following

    def register(self, broker: int, wal_kind: str = "disk", url: str | None = None) -> None:
        names = (f"code{broker}", "a", "host", 9_000 + broker, "", self.url if url is None else url)
        self.driver.run(c.RegisterBroker(broker, *names, wal_kind), int)
        self.driver.run(c.Elect(broker, broker))

    def die(self, broker: int) -> None:
        registration = self.driver.image.brokers[broker].registration_epoch
        self.driver.run(c.SetBrokerAlive(broker, registration, False))

    def join(self, replica_set: int, broker: int) -> None:
        registration = self.image.brokers[broker].registration_epoch
        if broker != replica_set:
            self.driver.run(r.AssignReplica(replica_set, broker))
        self.driver.run(r.AddReplica(replica_set, broker, registration, f"wal-{broker}"))

    def have_followed(self, home: int, follower: int) -> None:
        """The home set of a broker has another member, which is in sync."""
        self.driver.run(r.SetReplicaSetPolicy(home, PolicyRecord(2, 2, 1)))
        for each in (home, follower):
            self.join(home, each)
        record, told = (
            self.image.replica_sets[home],
            [r.ReportedMember(each, f"wal-{each}") for each in (home, follower)],
        )
        registration = self.image.brokers[home].registration_epoch
        epochs = (record.master_epoch, record.sync_state_set_epoch)
        self.driver.run(r.AlterSyncStateSet(home, home, registration, *epochs, tuple(told), 2))

    def fail_over(self, home: int, follower: int) -> None:
        """The broker dies, and the other member of its home set leads it."""
        self.die(home)
        self.driver.run(r.BeginElection(home, self.image.replica_sets[home].master_epoch, "test"))
        epoch, registration = (
            self.image.replica_sets[home].master_epoch,
            self.image.brokers[follower].registration_epoch,
        )
        self.driver.run(r.PromiseEpoch(home, epoch, follower, registration, f"wal-{follower}", 1, 0, 0))
        assert self.image.replica_sets[home].master == follower

    def answer(self, method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        if method == "POST":
            self.posts.append(path)
        (handler,) = (
            cast("Any", each).handler
            for each in self._routes
            if (cast("Any", each).method, cast("Any", each).path) == (method, path.partition("?")[0])
        )
        try:
            response = asyncio.run(handler(make_mocked_request(method, path)))
        except TidelogError as error:
            return status_of(error), json.dumps({"error": error.message, "hint": error.hint}).encode()
        return response.status, response.body


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RemovalWorld]:
    world = RemovalWorld()
    with scripted_admin(world.answer) as world.url:
        monkeypatch.setattr(ClusterConnection, "admin_url", world.url)
        monkeypatch.chdir(tmp_path)
        yield world


class UpOfRemoval:
    """The socket and the files of the `tidelog up` of the brokers, without their processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.loaded = load(None, {}, [("node.data_dir", str(directory))])
        nodes = cluster_layout.plan(self.loaded, GONE)
        self.running = {each.config.node.id: f"host:{9_000 + each.config.node.id}" for each in nodes}
        self.files = directory / f"node-{GONE}"
        self.asked: list[str] = []
        self.interrupt_at = ""
        """What it is asked for when the command ends."""

    async def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "list":
            brokers = {str(each): address for each, address in self.running.items()}
            return {"brokers": brokers, "removed": cluster_layout.removed_brokers(self.loaded)}
        self.asked.append(request["do"])
        if request["do"] == self.interrupt_at:
            raise StorageFailed("interrupted")
        if request["do"] == "stop":
            cluster_layout.drop_broker(self.loaded, request["id"], [*self.running])
            del self.running[request["id"]]
        else:
            cluster_layout.forget_broker(self.loaded, request["id"])
        return {"id": request["id"]}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[UpOfRemoval]:
    up = UpOfRemoval(tmp_path / "up")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = ControlServer(up.directory, up.handle)
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    try:
        yield up
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(remove, [*map(str, arguments), "--bootstrap", "127.0.0.1:1"])


# --- dry runs ----------------------------------------------------------------------------------------------------


def test_a_dry_run_of_giving_up_what_others_would_recover_tells_that_it_is_lost(world: RemovalWorld) -> None:
    for broker in (GONE, LIVE):
        world.register(broker, "s3")
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    world.die(GONE)
    safe = invoke(str(GONE), "--accept-loss", "--dry-run")
    assert safe.exit_code == 0 and "nothing would be lost" in safe.output
    told = invoke(str(GONE), "--accept-loss", "--force", "--dry-run")
    assert told.exit_code == 0 and "nothing would be lost" not in told.output
    assert "would be lost: 4,096 bytes of its WAL" in told.output and "without --force" in told.output
    document = json.loads(invoke(str(GONE), "--accept-loss", "--force", "--dry-run", "--format", "json").output)
    assert document["given_up"] and [row["partition"] for row in document["partitions"]] == [0, 1]
    assert world.posts == []
    assert invoke(str(GONE), "--accept-loss", "--force").exit_code == 0
    assert world.posts == [f"/losses/accept?id={GONE}&force=true", f"/brokers/remove?id={GONE}"]


def test_a_dry_run_does_not_say_of_a_broker_that_there_is_none_that_nothing_is_lost(world: RemovalWorld) -> None:
    world.register(LIVE)
    for arguments in (["7", "--dry-run"], ["7"]):
        assert isinstance(invoke(*arguments).exception, NotFound), arguments


# --- what a running `tidelog up` stops ---------------------------------------------------------------------------


def test_a_drained_broker_is_stopped_removed_and_its_files_are_deleted(world: RemovalWorld, up: UpOfRemoval) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR))
    done = invoke(str(GONE), "--data-dir", up.directory)
    assert done.exit_code == 0, done.exception
    assert up.asked == ["stop", "forget"] and not up.files.exists()


def test_a_drained_broker_that_still_has_replicas_is_not_stopped(world: RemovalWorld, up: UpOfRemoval) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    world.have_followed(LIVE, GONE)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR))
    refused = invoke(str(GONE), "--data-dir", up.directory)
    assert isinstance(refused.exception, InvalidInput)
    assert f"broker {GONE} has replicas of replica sets [{LIVE}]" in refused.exception.message
    dry = invoke(str(GONE), "--data-dir", up.directory, "--dry-run")
    assert isinstance(dry.exception, InvalidInput)
    assert up.asked == [] and world.posts == []


def test_a_broker_that_dies_again_and_again_is_not_stopped_while_others_lead_what_it_owns(
    world: RemovalWorld, up: UpOfRemoval
) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    world.driver.run(c.CreateTopic(TOPIC, "t", 2, {}, False, False, (GONE, GONE)))
    world.have_followed(GONE, LIVE)
    world.fail_over(GONE, LIVE)
    refused = invoke(str(GONE), "--data-dir", up.directory)
    assert isinstance(refused.exception, InvalidInput)
    assert f"broker {GONE} owns 2 partitions" in refused.exception.message
    assert refused.exception.hint == f"`tidelog broker drain {GONE}` moves them", "it need not live for that"
    assert up.asked == [] and world.posts == []


def test_a_broker_is_not_stopped_where_no_other_one_lives_to_remove_it(world: RemovalWorld, up: UpOfRemoval) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR))
    world.die(LIVE)
    refused = invoke(str(GONE), "--data-dir", up.directory)
    assert isinstance(refused.exception, Unavailable)
    assert up.asked == [] and world.posts == []


# --- asked again -------------------------------------------------------------------------------------------------


def test_a_removal_that_ended_after_the_broker_was_stopped_is_finished(world: RemovalWorld, up: UpOfRemoval) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR))
    world.interrupt = "before"
    assert invoke(str(GONE), "--data-dir", up.directory).exit_code != 0
    world.interrupt = ""
    assert up.asked == ["stop"] and GONE in world.image.brokers
    world.die(GONE)
    assert invoke(str(GONE), "--data-dir", up.directory).exit_code == 0
    assert GONE not in world.image.brokers and not up.files.exists()


@pytest.mark.parametrize("at", ["after", "forget"])
def test_a_removal_that_ended_after_the_controllers_had_removed_the_broker_is_finished(
    world: RemovalWorld, up: UpOfRemoval, at: str
) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR))
    world.interrupt, up.interrupt_at = "after" if at == "after" else "", at
    assert invoke(str(GONE), "--data-dir", up.directory).exit_code != 0
    assert GONE not in world.image.brokers and up.files.exists()
    world.interrupt = up.interrupt_at = ""
    dry = invoke(str(GONE), "--data-dir", up.directory, "--dry-run")
    assert dry.exit_code == 0 and "its files" in dry.output and up.files.exists()
    done = invoke(str(GONE), "--data-dir", up.directory)
    assert done.exit_code == 0, done.exception
    assert not up.files.exists()
    assert isinstance(invoke(str(GONE), "--data-dir", up.directory).exception, NotFound)


def test_files_of_another_clusters_broker_of_that_id_are_kept(world: RemovalWorld, up: UpOfRemoval) -> None:
    for broker in (GONE, LIVE):
        world.register(broker)
    cluster_layout.drop_broker(up.loaded, GONE, [*up.running])
    del up.running[GONE]
    up.running = dict.fromkeys(up.running, "elsewhere:9092")
    world.die(GONE)
    assert invoke(str(GONE), "--data-dir", up.directory).exit_code == 0
    assert up.asked == [] and up.files.exists()


# --- who is asked ------------------------------------------------------------------------------------------------


def test_a_broker_that_answers_removes_it_where_another_one_has_just_ended(world: RemovalWorld) -> None:
    world.register(LIVE, url=f"http://127.0.0.1:{free_port()}")
    for broker in (2, GONE):
        world.register(broker)
    world.die(GONE)
    done = invoke(str(GONE))
    assert done.exit_code == 0, (done.output, done.exception)
    assert world.posts == [f"/brokers/remove?id={GONE}"] and GONE not in world.image.brokers


def test_nothing_is_stopped_where_no_other_broker_answers(world: RemovalWorld, up: UpOfRemoval) -> None:
    world.register(LIVE, url=f"http://127.0.0.1:{free_port()}")
    world.register(GONE)
    world.driver.run(c.DrainBroker(GONE, DrainMode.OPERATOR))
    done = invoke(str(GONE), "--data-dir", up.directory)
    assert isinstance(done.exception, Unavailable) and "no other broker is alive" in str(done.exception)
    assert "cannot be reached" in str(done.exception)
    assert up.asked == [] and world.posts == []
