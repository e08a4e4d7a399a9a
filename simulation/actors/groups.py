"""Members of consumer groups: join, sync, heartbeat, fetch what is assigned, commit, leave or vanish.

Entry: `MemberActor.run`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tidelog.simulation.actors import kafka, kafka_ids
from tidelog.simulation.actors.client import Address, Lost
from tidelog.simulation.actors.consumers import Fetcher, Position
from tidelog.simulation.actors.kafka import Assignment, Joined, Request
from tidelog.simulation.actors.workload import ASK_S, Topic, Workload

SESSION_MS = 4_000
REBALANCE_MS = 3_000
HEARTBEAT_S = 0.8
REBALANCE_IN_PROGRESS = 27
MEMBER_ID_REQUIRED = 79
ANYBODY = ("", 0)
"""Topic id for a topic whose name was not reused."""


class MemberActor:
    """One member of `group`, which reads all topics of the workload."""

    def __init__(self, workload: Workload, group: str) -> None:
        self._w = workload
        self._group = group
        self._rng = workload.random()
        self._client = workload.client()
        self._fetcher = Fetcher(workload, self._client, workload.process())
        self._coordinator: Address | None = None
        self._member = ""
        self._generation = -1
        self._positions: list[Position] = []
        self._heartbeat_due_s = 0.0

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            try:
                if await self._join():
                    await self._consume()
                if rng.random() < 0.3:
                    await self._leave()
            except Lost:
                self._coordinator = None
            await asyncio.sleep(rng.uniform(0.05, 0.4))
        self._client.close()

    async def _ask(self, request: Request) -> Any:
        if self._coordinator is None:
            error, address = await self._client.ask_any(kafka.find_coordinator(self._group), ASK_S)
            if error:
                raise Lost(f"no coordinator: {error}")
            self._coordinator = address
        return await self._client.ask(self._coordinator, request, ASK_S)

    async def _join(self) -> bool:
        """Try once to become a member with an assignment."""
        w = self._w
        topics = sorted({topic.wire for topic in w.existing()})
        if not topics:
            return False
        joined: Joined = await self._ask(kafka.join_group(self._group, self._member, SESSION_MS, REBALANCE_MS, topics))
        if joined.error == MEMBER_ID_REQUIRED:
            self._member = joined.member
            return False
        if joined.error:
            self._member, self._coordinator = "", None
            return False
        self._member, self._generation = joined.member, joined.generation
        assignments = self._divide(joined) if joined.leader == joined.member else {}
        error, mine = await self._ask(kafka.sync_group(self._group, self._generation, self._member, assignments))
        if error:
            return False
        return await self._begin(mine)

    def _divide(self, joined: Joined) -> dict[str, Assignment]:
        """Compute the assignment as the group's leader: every partition to one member."""
        topics = {topic.wire: topic for topic in self._w.existing()}  # the latest topic of each name
        places = [(topic.wire, index) for topic in topics.values() for index in range(topic.partitions)]
        members = sorted(name for name, _ in joined.members)
        return {name: places[number :: len(members)] for number, name in enumerate(members)}

    async def _begin(self, mine: Assignment) -> bool:
        """Fetch the group's committed offsets of the assigned partitions."""
        w = self._w
        self._fetcher.process = w.process()
        topics: dict[str, Topic] = {topic.wire: topic for topic in w.topics if topic.exists}
        self._positions = []
        for name, partition in mine:
            topic = topics[name]
            if partition >= topic.partitions:
                continue
            position = Position(topic, partition)
            fields = {"topic": topic.name, "partition": partition, "group": self._group}
            op = w.history.begin("committed", self._fetcher.process, w.now_us(), **fields)
            try:
                was = await self._is(topic)
                error, offset = await self._ask(kafka.offset_fetch(self._group, name, partition))
                certain = was is not None and was == await self._is(topic)
            except Lost as lost:
                w.history.end(op, "info", w.now_us(), error=str(lost))
                raise
            if error or not certain:
                w.history.end(op, "info", w.now_us(), error=f"error {error}")
                return False
            w.history.end(op, "ok", w.now_us(), offset=offset)
            if offset >= 0:
                self._fetcher.assign_at(position, offset)
            self._positions.append(position)
        return True

    async def _is(self, topic: Topic) -> Address | None:
        """Return the broker that was asked, if its current topic of that name is this one. Its image never goes back,
        so its responses between two such checks refer to this topic."""
        if not (topic.temporary and topic.id):
            return ANYBODY
        _, _, found, _ = await self._ask(kafka_ids.metadata(kafka_ids.NO_ID, topic.wire))
        return self._coordinator if found == topic.id else None

    async def _consume(self) -> None:
        """Fetch, commit and send heartbeats until the group rebalances or something fails."""
        w, rng = self._w, self._rng
        until_s = w.loop.time() + rng.uniform(3.0, 20.0)
        while not w.closing and w.loop.time() < until_s:
            if w.loop.time() >= self._heartbeat_due_s:
                self._heartbeat_due_s = w.loop.time() + HEARTBEAT_S
                error = await self._ask(kafka.heartbeat(self._group, self._generation, self._member))
                if error:
                    if error != REBALANCE_IN_PROGRESS:
                        self._member, self._coordinator = "", None
                    return
            positions = [one for one in self._positions if not one.topic.gone]
            if not positions:
                await asyncio.sleep(HEARTBEAT_S)
                continue
            came = await self._fetcher.fetch(positions)
            if came and rng.random() < 0.5 and not await self._commit(rng.choice(positions)):
                return

    async def _commit(self, position: Position) -> bool:
        w = self._w
        if position.offset < 0 or (was := await self._is(position.topic)) is None:
            return True
        topic, partition, offset = position.topic, position.partition, position.offset
        op = w.history.begin(
            "commit",
            self._fetcher.process,
            w.now_us(),
            topic=topic.name,
            partition=partition,
            offset=offset,
            group=self._group,
        )
        request = kafka.offset_commit(self._group, self._generation, self._member, topic.wire, partition, offset)
        try:
            error = await self._ask(request)
            if not error and was == await self._is(topic):
                w.history.end(op, "ok", w.now_us())
                return True
        except Lost as lost:
            w.history.end(op, "info", w.now_us(), error=str(lost))
            w.doubt(op)
            raise
        w.history.end(op, "info", w.now_us(), error=f"error {error}")
        w.doubt(op)
        return not error

    async def _leave(self) -> None:
        if self._member:
            await self._ask(kafka.leave_group(self._group, self._member))
            self._member = ""
