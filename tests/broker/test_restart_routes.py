"""The admin routes of a restart, over the real controller state."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from tests.support.admin_world import WorldController
from tidelog.broker.admin.restart import RestartRoutes
from tidelog.broker.kafka.services import no_quorum
from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import OutcomeUnknown, RestartRefused, StaleBrokerEpoch
from tidelog.controller.model.records import DrainMode
from tidelog.runtime.errors import InvalidInput

AWAY = {"id": 2, "state": "away", "error": "refused", "peers": None}
ACTIVE = {"id": 1, "state": "active", "error": None, "peers": []}


class World(WorldController):
    """Three brokers whose sets all of them keep; this is broker 1."""

    def __init__(self, *, is_controller: bool = False) -> None:
        super().__init__()
        self.asked = self.prepared = 0
        self.is_silent = False
        """The controllers do not answer a restart."""
        self.quorum_rows: list[dict[str, Any]] = [ACTIVE]
        for broker in (1, 2, 3):
            self.register(broker)
        for broker in (1, 2, 3):
            self.replicate(broker, 1, 2, 3)
        self._routes = RestartRoutes(
            cast("Any", self),
            1,
            self._asked,
            is_controller=is_controller,
            quorum=self._quorum,
            prepare=self._prepared,
            min_in_sync=lambda topic: int(topic.configs.get("min.insync.replicas", "1")),
        ).routes()

    async def _prepared(self) -> None:
        assert not self.image.brokers[1].draining, "it is prepared before anything is handed over"
        self.prepared += 1

    def _asked(self) -> None:
        self.asked += 1

    async def _quorum(self) -> dict[str, Any]:
        return {**await no_quorum(), "members": self.quorum_rows}

    async def begin_restart(self, broker_id: int, registration_epoch: int) -> None:
        if self.is_silent:
            raise OutcomeUnknown("the controller did not answer within 30 s")
        self.apply(c.BeginRestart(broker_id, registration_epoch))

    async def call(self, method: str, query: str = "") -> dict[str, Any]:
        (handler,) = (cast("Any", each).handler for each in self._routes if each.method == method)
        response = await handler(make_mocked_request(method, f"/restart{query}"))
        return cast("dict[str, Any]", msgspec.json.decode(response.body))

    def epoch(self, broker: int = 1) -> int:
        return self.image.brokers[broker].registration_epoch

    async def restart(self, broker: int = 1) -> dict[str, Any]:
        return await self.call("POST", f"?id={broker}&registration_epoch={self.epoch(broker)}")

    async def hindrances(self, broker: int) -> list[str]:
        rows = (await self.call("GET"))["brokers"]
        return next(list(row["hindrances"]) for row in rows if row["id"] == broker)


async def test_this_broker_drains_and_its_process_is_asked_to_end() -> None:
    world = World()
    assert await world.hindrances(1) == []
    assert (await world.restart())["status"] == "restarting"
    assert world.image.brokers[1].draining == DrainMode.SHUTDOWN
    assert (await world.restart())["status"] == "restarting", "the same request again"
    assert (world.asked, world.prepared) == (2, 1)
    assert await world.hindrances(1) == ["it is stopping"]
    assert await world.hindrances(2) == ["broker 1 is stopping"]


async def test_a_request_without_an_answer_that_takes_effect_later_ends_the_process_then() -> None:
    """Else it would be marked as stopping for good, lead nothing, and keep all others from a restart."""
    world = World()
    world.is_silent = True
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await world.restart()
    world.apply(c.DrainBroker(2, DrainMode.SHUTDOWN, world.epoch(2)))
    assert world.asked == 0
    world.apply(c.DrainBroker(2, DrainMode.NONE))
    world.apply(c.BeginRestart(1, world.epoch()))
    assert world.image.brokers[1].draining == DrainMode.SHUTDOWN
    assert world.asked == 1


async def test_a_request_without_an_answer_that_took_effect_before_the_metadata_told_of_it_ends_the_process() -> None:
    world = World()
    world.is_silent = True
    world.apply(c.BeginRestart(1, world.epoch()))
    with pytest.raises(OutcomeUnknown):
        await world.restart()
    assert world.asked == 1


async def test_a_request_for_another_process_restarts_nothing() -> None:
    world = World()
    with pytest.raises(InvalidInput, match="this is broker 1, not 2"):
        await world.restart(2)
    with pytest.raises(StaleBrokerEpoch):
        await world.call("POST", f"?id=1&registration_epoch={world.epoch() + 1}")
    with pytest.raises(InvalidInput, match="registration_epoch"):
        await world.call("POST", "?id=1")
    assert not world.asked


async def test_a_refusal_of_the_controllers_ends_nothing() -> None:
    world = World()
    world.set_alive(2, False)
    with pytest.raises(RestartRefused, match="broker 2 is dead"):
        await world.restart()
    assert not world.asked + world.prepared


async def test_a_process_that_is_a_controller_stays_while_another_controller_is_away() -> None:
    for is_controller in (True, False):
        world = World(is_controller=is_controller)
        world.quorum_rows = [ACTIVE, AWAY]
        assert await world.hindrances(1) == ["controller 2 is away"]
        if is_controller:
            with pytest.raises(RestartRefused, match="controller 2 is away"):
                await world.restart()
        else:
            await world.restart()
        assert world.asked == (not is_controller)


async def test_a_topic_that_would_refuse_writes_keeps_the_broker() -> None:
    world = World()
    await world.create_topic("strict", 1, {"min.insync.replicas": "3"}, assignment=[2])
    assert "topic strict has min.insync.replicas 3, and replica set 2 would have 2 in sync" in await world.hindrances(1)
    with pytest.raises(RestartRefused, match=r"min\.insync\.replicas 3"):
        await world.restart()
    world = World()
    await world.create_topic("all", 1, {"min.insync.replicas": "4"}, assignment=[2])
    assert "topic all has min.insync.replicas 4, and replica set 2 would have 2 in sync" in await world.hindrances(1)
    world = World()
    world.put_in_sync(2, 1, 2)
    await world.create_topic("never", 1, {"min.insync.replicas": "4"}, assignment=[2])
    assert "topic never" not in " ".join(await world.hindrances(1)), "it takes no writes now"


async def test_what_a_replica_set_owns_is_told() -> None:
    world = World()
    await world.create_topic("t", 3, {}, assignment=[1, 2, 1])
    owned = (await world.call("GET", "?owner=1"))["owned"]
    assert owned == [{"topic": "t", "partition": 0}, {"topic": "t", "partition": 2}]
