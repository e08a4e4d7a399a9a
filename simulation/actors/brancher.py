"""Takes snapshots of a topic, makes branches of them, and lets both go on: writes, deletes records, topics, snapshots.

This client is the only one that writes to these topics, so it knows what each must have: of a branch what its source
had up to the cut, and from there on what was sent to the branch. It reads them all the time, while the brokers' object
compaction and log start moves go on, and at the end. What it finds is told by the rules `branch-differs` and
`snapshot-incomplete`. The objects that a snapshot holds it tells `SimCluster.outside`, which is looked at when objects
are deleted (`deleted-under-reader`).

Entry: `Brancher.run`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from tidelog.batch.batch import CorruptRecord, Record, build_batch
from tidelog.controller.model.levels import SNAPSHOTS_LEVEL
from tidelog.controller.model.snapshots import HeldTopic, SnapshotRecord
from tidelog.runtime.errors import TidelogError
from tidelog.simulation.actors import kafka
from tidelog.simulation.actors.client import Lost
from tidelog.simulation.actors.consumers import decode
from tidelog.simulation.actors.kafka import EARLIEST, LATEST, FetchAnswer
from tidelog.simulation.actors.workload import ASK_S, SESSION_ENDED, Topic, Workload

ORIGIN = "origin"
COMMAND_S = 6.0
TAKE_S = 12.0
MAX_SIDES = 5
"""Topics at a time, the first one included."""
MAX_HELD = 3
"""Snapshots at a time."""
FETCH_WAIT_MS = 200
FETCH_BYTES = 8 << 10
FOR_EVER_S = 1e9
DATA = 1
"""The data stream's place among the streams of a partition."""


@dataclass(slots=True)
class Side:
    """One topic: the first one, or a branch."""

    name: str
    partitions: int
    source: Side | None = None
    cuts: list[int] = field(default_factory=list)
    """For each partition, where its own offsets begin."""
    values: list[dict[int, int]] = field(default_factory=list)
    """For each partition what was acknowledged to it, by offset."""
    doubtful: list[set[int]] = field(default_factory=list)
    """Values that may have been written."""
    deleted: list[int] = field(default_factory=list)
    """Up to where its records may be deleted."""

    def __post_init__(self) -> None:
        self.values = [{} for _ in range(self.partitions)]
        self.doubtful = [set() for _ in range(self.partitions)]
        self.cuts = self.cuts or [0] * self.partitions
        self.deleted = self.deleted or [0] * self.partitions

    def owner(self, partition: int, offset: int) -> Side:
        """Return the topic to which an offset was written."""
        side = self
        while side.source is not None and offset < side.cuts[partition]:
            side = side.source
        return side

    def expected(self, partition: int) -> dict[int, int]:
        """Return what was acknowledged of a partition, by offset."""
        above = self.source.expected(partition) if self.source is not None else {}
        shared = {offset: value for offset, value in above.items() if offset < self.cuts[partition]}
        return {**shared, **self.values[partition]}


@dataclass(frozen=True, slots=True)
class _Taken:
    """A snapshot."""

    topic: HeldTopic
    side: Side
    deleted: list[int]
    """For each partition, up to where records may have been deleted before it was taken."""


class Brancher:
    """One client."""

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self._w = workload
        self._rng = rng
        self._client = workload.client()
        self._controller = workload.cluster.controller_client("brancher", random.Random(rng.getrandbits(64)), COMMAND_S)
        self._sides: list[Side] = []
        self._snapshots: dict[str, _Taken] = {}
        self._number = 0
        self._producer: tuple[int, int] | None = None
        """Id and epoch of an idempotent producer: it has sequences of its own in a branch, as in any partition."""
        self._sequences: dict[tuple[str, int], int] = {}

    async def run(self) -> None:
        """Run until the end, then read everything once more."""
        w, rng = self._w, self._rng
        await self._controller.start()
        first = Topic(ORIGIN, rng.randint(1, 2), True, {"segment.bytes": str(rng.choice((4_000, 20_000)))})
        await w.create(first)
        self._sides.append(Side(ORIGIN, first.partitions))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write())
            await self._operate()
        await self._succeed()
        for side in self._sides:
            for partition in range(side.partitions):
                while not await self._verify(side, partition):  # noqa: ASYNC110  # no event tells it
                    await asyncio.sleep(0.3)
        if w.cluster.shape.table:  # all of the compacted topic is to be compacted in the end
            while not await self._let_go():  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(0.3)
        await self._controller.close()
        self._client.close()

    async def _write(self) -> None:
        while not self._w.closing:
            await asyncio.sleep(self._rng.expovariate(4.0))
            await self._send()

    async def _operate(self) -> None:
        acts: list[Callable[[], Awaitable[object]]] = [self._verify_any, self._verify_any, self._delete_records]
        acts += [self._take, self._take]
        acts += [self._branch, self._branch, self._drop_snapshot, self._drop_topic]
        while not self._w.closing:
            await asyncio.sleep(self._rng.expovariate(1.5))
            await self._rng.choice(acts)()

    async def _succeed(self) -> None:
        """Take a snapshot and make a branch once more: where all is well both must be possible."""
        while len(self._snapshots) >= MAX_HELD:
            await self._drop_snapshot()
        while len(self._sides) >= MAX_SIDES:
            await self._drop_topic()
        for act in (self._take, self._branch):
            while not await act():  # noqa: ASYNC110  # no event tells it
                await asyncio.sleep(0.3)

    # --- writing -------------------------------------------------------------------------------------------------

    async def _send(self) -> None:
        w, rng = self._w, self._rng
        if not self._sides:
            return
        side = rng.choice(self._sides)
        partition = rng.randrange(side.partitions)
        if self._producer is None and not await self._begin_session():
            return
        values = w.values(rng.randint(1, 4))
        held = [each.topic for each in self._snapshots.values() if each.side is side]
        found = await self._produce(side, partition, values)
        if found < 0:  # whether it was written is not known: nor are the sequences
            side.doubtful[partition].update(values)
            self._producer = None
            return
        if found < side.cuts[partition]:
            said = f"{side.name}-{partition}: a batch was acknowledged at {found}; its own offsets begin at"
            w.found("branch-differs", f"{said} {side.cuts[partition]}")
            return
        for at, value in enumerate(values):
            side.values[partition][found + at] = value
        for topic in held:
            if found < topic.partitions[partition].ends[DATA]:
                said = f"{side.name}-{partition}: offset {found} was given out after a snapshot that holds it"
                w.found("snapshot-incomplete", said)

    async def _begin_session(self) -> bool:
        try:
            error, producer_id, epoch = await self._client.ask_any(kafka.init_producer_id(), ASK_S)
        except Lost:
            return False
        if error == 0:
            self._producer = producer_id, epoch
            self._sequences.clear()
        return bool(error == 0)

    async def _produce(self, side: Side, partition: int, values: list[int]) -> int:
        """Send one batch; return its offset, or -1."""
        w, place = self._w, (side.name, partition)
        assert self._producer is not None
        padding = b"x" * self._rng.choice((0, 10, 300))
        records = [Record(0, w.time_ms(), None, b"%d|%b" % (value, padding), ()) for value in values]
        producer_id, epoch = self._producer
        first = self._sequences.get(place, 0)
        batch = build_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=first)
        try:
            address = await self._client.leader(*place)
            if address is None:
                return -1
            found = await self._client.ask(address, kafka.produce(*place, batch, -1, 3_000), ASK_S)
        except Lost:
            self._client.forget(*place)
            return -1
        if found.error:
            self._client.forget(*place, found.leader)
            if found.error in SESSION_ENDED and first == 0:
                w.found("branch-differs", f"{side.name}-{partition}: a new producer's first batch: error {found.error}")
            return -1
        self._sequences[place] = first + len(values)
        return int(found.offset)

    async def _delete_records(self) -> None:
        if not self._sides:
            return
        side = self._rng.choice(self._sides)
        partition = self._rng.randrange(side.partitions)
        known = [*side.expected(partition)]
        if not known:
            return
        offset = self._rng.choice(known)
        side.deleted[partition] = max(side.deleted[partition], offset)
        try:
            address = await self._client.leader(side.name, partition)
            if address is not None:
                request = kafka.delete_records(side.name, partition, offset, 3_000)
                await self._client.ask(address, request, ASK_S)
        except Lost:
            self._client.forget(side.name, partition)

    # --- snapshots and branches ----------------------------------------------------------------------------------

    async def _take(self) -> bool:
        """Have a broker take a snapshot of one topic; return whether there is one."""
        w = self._w
        takers = [node for node in w.cluster.brokers if node.ready and node.broker is not None]
        if not takers or not self._sides or len(self._snapshots) >= MAX_HELD or w.cluster.level < SNAPSHOTS_LEVEL:
            return False
        side, node = self._rng.choice(self._sides), self._rng.choice(takers)
        self._number += 1
        name = f"snapshot-{self._number}"
        acknowledged = [max(side.values[each], default=-1) for each in range(side.partitions)]
        assert node.broker is not None
        take = node.broker.parts.partitions.snapshots.take(name, [side.name], budget_s=TAKE_S / 2)
        try:
            record = await node.carry_out(take, name, TAKE_S)
            async with asyncio.timeout(TAKE_S):
                await self._controller.wait_version(record.version)
        except (TidelogError, TimeoutError) as error:
            w.cluster.note("brancher", f"took no snapshot: {type(error).__name__}")
            return False
        (topic,) = record.topics
        for partition, last in enumerate(acknowledged):
            if topic.partitions[partition].ends[DATA] <= last:
                said = f"{side.name}-{partition}: {name} ends at {topic.partitions[partition].ends[DATA]}, and offset"
                w.found("snapshot-incomplete", f"{said} {last} was acknowledged before it was taken")
        self._snapshots[name] = _Taken(topic, side, list(side.deleted))
        w.cluster.outside[name] = self._held(record), FOR_EVER_S
        w.cluster.note("brancher", f"took {name} of {side.name}")
        return True

    def _held(self, record: SnapshotRecord) -> frozenset[int]:
        image = self._controller.image
        return frozenset(
            each.object_id
            for _, extent in record.extents()
            for each in image.find_objects(extent.stream_id, extent.start_offset, extent.end_offset, 1 << 20)
        )

    async def _branch(self) -> bool:
        """Make a branch of a snapshot; return whether it surely was made: if not, its topic is left alone."""
        if not self._snapshots or len(self._sides) >= MAX_SIDES:
            return False
        snapshot = self._rng.choice(sorted(self._snapshots))
        taken = self._snapshots[snapshot]
        topic, source = taken.topic, taken.side
        self._number += 1
        name = f"branch-{self._number}"
        try:
            await self._controller.snapshots.branch(snapshot, topic.name, name, {})
        except TidelogError as error:
            self._w.cluster.note("brancher", f"made no branch: {type(error).__name__}")
            return False
        cuts = [each.ends[DATA] for each in topic.partitions]
        self._sides.append(Side(name, source.partitions, source, cuts, deleted=list(taken.deleted)))
        self._w.cluster.note("brancher", f"made {name} of {topic.name}@{snapshot}")
        return True

    async def _drop_snapshot(self) -> None:
        if not self._snapshots:
            return
        name = self._rng.choice(sorted(self._snapshots))
        self._w.cluster.outside.pop(name)
        del self._snapshots[name]
        try:
            await self._controller.snapshots.delete(name)
        except TidelogError as error:
            self._w.cluster.note("brancher", f"deletion of {name}: {type(error).__name__}")

    async def _drop_topic(self) -> None:
        """Delete a topic: those that are branches of it stay whole."""
        if len(self._sides) < 2:
            return
        side = self._sides.pop(self._rng.randrange(len(self._sides)))
        self._client.forget(side.name, 0)
        try:
            await self._client.ask_any(kafka.delete_topic(side.name, 3_000), ASK_S)
        except Lost as lost:
            self._w.cluster.note("brancher", f"deletion of {side.name}: {lost}")

    async def _let_go(self) -> bool:
        """Delete all snapshots and branches; return whether there are none."""
        image = self._controller.image
        topics = [topic.id for topic in image.topics.values() if topic.name.startswith("branch-")]
        try:
            for name in sorted(image.snapshots):
                self._w.cluster.outside.pop(name, None)
                await self._controller.snapshots.delete(name)
            for topic_id in topics:
                await self._controller.delete_topic(topic_id)
        except TidelogError as error:
            self._w.cluster.note("brancher", f"holds on: {type(error).__name__}")
            return False
        return not image.snapshots and not image.branches

    # --- reading -------------------------------------------------------------------------------------------------

    async def _verify_any(self) -> None:
        if self._sides:
            side = self._rng.choice(self._sides)
            await self._verify(side, self._rng.randrange(side.partitions))

    async def _verify(self, side: Side, partition: int) -> bool:
        """Read a partition and compare; return whether it could be read."""
        expected = side.expected(partition)  # as of now: what is acknowledged later may be read, too
        may_start = side.deleted[partition]
        try:
            start = await self._offset(side, partition, EARLIEST)
            end = await self._offset(side, partition, LATEST)
            found = await self._read(side, partition, start, end)
        except Lost:
            self._client.forget(side.name, partition)
            return False
        except CorruptRecord as error:
            self._w.found("corrupt-read", f"{side.name}-{partition}: {error}")
            return True
        self._compare(side, partition, expected, found, (start, end))
        if start > max(may_start, side.deleted[partition]):
            said = f"{side.name}-{partition} starts at {start}; nobody deleted from it beyond {side.deleted[partition]}"
            self._w.found("branch-differs", said)
        return True

    def _compare(
        self, side: Side, partition: int, expected: dict[int, int], found: dict[int, int], ends: tuple[int, int]
    ) -> None:
        w, (start, end) = self._w, ends
        what = f"{side.name}-{partition}, which begins at {side.cuts[partition]},"
        if expected and end <= max(expected):
            w.found("branch-differs", f"{what} ends at {end}, and offset {max(expected)} was acknowledged")
        for offset, value in expected.items():
            if start <= offset < end and found.get(offset) != value:
                w.found("branch-differs", f"{what} has {found.get(offset)} at offset {offset}, not {value}")
        for offset, value in found.items():
            owner = side.owner(partition, offset)
            known = owner.values[partition].get(offset)
            if known != value and value not in owner.doubtful[partition]:
                w.found("branch-differs", f"{what} has {value} at offset {offset}, which was not sent to {owner.name}")

    async def _offset(self, side: Side, partition: int, timestamp: int) -> int:
        address = await self._client.leader(side.name, partition)
        if address is None:
            raise Lost("no leader")
        error, offset = await self._client.ask(address, kafka.list_offsets(side.name, partition, timestamp), ASK_S)
        if error:
            raise Lost(f"error {error}")
        return int(offset)

    async def _read(self, side: Side, partition: int, start: int, end: int) -> dict[int, int]:
        """Return the values by offset. Raises `Lost`, `CorruptRecord`."""
        found: dict[int, int] = {}
        at = start
        while at < end:
            address = await self._client.leader(side.name, partition)
            if address is None:
                raise Lost("no leader")
            request = kafka.fetch({(side.name, partition): at}, FETCH_WAIT_MS, FETCH_BYTES)
            answer: FetchAnswer = await self._client.ask(address, request, ASK_S)
            if answer.error or not answer.partitions or answer.partitions[0].error:
                raise Lost("it is not served now")
            came = decode(answer.partitions[0], at)
            found.update(zip(came.offsets, came.values, strict=True))
            at = came.following
        return found
