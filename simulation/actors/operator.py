"""The operator of a simulation: moves partitions, drains brokers and ends drains, adds and removes brokers.

It uses the controllers' RPC, as the admin HTTP of a broker does for `tidelog partition move` and
`tidelog broker drain`. Entry: `Operator.run`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from tidelog.controller.active.drain_plan import is_drained
from tidelog.controller.model.commands import PartitionMove
from tidelog.controller.model.records import DrainMode
from tidelog.runtime.errors import NotFound, TidelogError
from tidelog.simulation.actors.workload import Workload

COMMAND_S = 6.0
REMOVAL_S = 15.0
MAX_MOVES = 4


class Operator:
    """One operator."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload
        self._rng = workload.random()
        self._client = workload.cluster.controller_client("operator", workload.random(), COMMAND_S)
        self._draining = 0
        self._forgotten: set[int] = set()
        """Brokers that were drained before another one was to be removed."""
        self._removing = 0

    @property
    def _brokers(self) -> list[int]:
        return [node.id for node in self._w.cluster.brokers if node.belongs]

    async def run(self) -> None:
        """Run until the end, then undo what would keep the cluster from becoming idle."""
        w, rng = self._w, self._rng
        await self._client.start()
        while not w.closing:
            await asyncio.sleep(rng.uniform(1.0, 7.0))
            drawn = rng.random()
            if drawn < 0.6:
                await self._move()
            elif drawn < 0.75:
                await self._drain()
            elif self._removing:
                await self._remove()
            else:
                self._add()
        for each in [self._draining, *sorted(self._forgotten - {self._draining})]:
            self._draining = each
            while self._draining and not await self._end_drain():  # noqa: ASYNC110
                await asyncio.sleep(0.5)
        while self._removing and not w.cluster.nodes[self._removing].belongs:
            await self._remove()
            await asyncio.sleep(0.5)
        await self._client.close()

    async def _move(self) -> None:
        rng, image = self._rng, self._client.image
        places = sorted((record.topic_id, record.index) for record in image.all_partitions())
        if not places or len(self._brokers) < 2:
            return
        chosen = rng.sample(places, k=min(len(places), rng.randint(1, MAX_MOVES)))
        moves = [PartitionMove(topic_id, index, rng.choice([*self._brokers, -1])) for topic_id, index in chosen]
        try:
            refused = await self._client.move_partitions(moves)
        except TidelogError as error:
            self._w.cluster.note("operator", f"moves failed: {type(error).__name__}")
        else:
            self._w.cluster.note("operator", f"{len(moves)} moves, {sum(one is not None for one in refused)} refused")

    def _add(self) -> None:
        """Start a spare broker, which is removed later."""
        for node in self._w.cluster.brokers:
            if not node.belongs and node.starts == 0:
                node.belongs = True
                node.start()
                self._removing = node.id
                return

    async def _remove(self) -> None:
        """Drain, stop and remove a broker; unfinished steps are continued the next time."""
        w, broker_id = self._w, self._removing
        node = w.cluster.nodes[broker_id]
        try:
            async with asyncio.timeout(REMOVAL_S):
                if node.belongs:
                    await self._client.drain_broker(broker_id, DrainMode.OPERATOR)
                    while not is_drained(self._client.image, broker_id):  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                    node.belongs = False
                    node.stop()
                while node.alive:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                with suppress(NotFound):  # an earlier attempt took effect, and its answer was lost
                    if w.cluster.shape.replicas > 1:  # the drain ended with the process: its replicas are to leave
                        await self._client.drain_broker(broker_id, DrainMode.OPERATOR)
                    await self._client.remove_broker(broker_id)
        except (TidelogError, TimeoutError) as error:
            w.cluster.note("operator", f"removal of broker {broker_id}: {error or 'time is up'}")
            if node.belongs:
                self._forgotten.add(self._draining)
                self._draining = broker_id
            return
        self._removing = 0
        w.cluster.note("operator", f"removed broker {broker_id}")

    async def _drain(self) -> None:
        if self._draining:
            await self._end_drain()
            return
        if len(self._brokers) < 2:
            return
        broker_id = self._rng.choice(self._brokers)
        self._draining = broker_id  # recorded before: whether it happened may stay unknown
        try:
            await self._client.drain_broker(broker_id, DrainMode.OPERATOR)
            self._w.cluster.note("operator", f"drains broker {broker_id}")
        except TidelogError as error:
            self._w.cluster.note("operator", f"drain of {broker_id} failed: {type(error).__name__}")

    async def _end_drain(self) -> bool:
        try:
            await self._client.drain_broker(self._draining, DrainMode.NONE)
        except NotFound:  # the broker was removed meanwhile
            pass
        except TidelogError as error:
            self._w.cluster.note("operator", f"end of drain failed: {type(error).__name__}")
            return False
        self._w.cluster.note("operator", f"ends the drain of broker {self._draining}")
        self._draining = 0
        return True
