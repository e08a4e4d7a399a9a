"""Consumers by assignment, and the fetcher that group members use.

Entry: `Consumer.run`, `Fetcher.fetch`; `read_all` at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidelog.batch.batch import ControlType, CorruptRecord, check_crc, control_type, iter_batches, iter_records
from tidelog.controller.image.image import Image
from tidelog.controller.model.records import NO_BROKER, PartitionRecord
from tidelog.simulation.actors import kafka, kafka_ids
from tidelog.simulation.actors.client import Address, Client, Lost
from tidelog.simulation.actors.kafka import EARLIEST, LATEST, FetchAnswer, Fetched
from tidelog.simulation.actors.keyed import key_of, number_of
from tidelog.simulation.actors.sessions import WITHOUT, ClientSessions
from tidelog.simulation.actors.workload import ASK_S, Topic, Workload
from tidelog.simulation.checkers.history import OUT_OF_RANGE, UNKNOWN
from tidelog.simulation.world.cluster import SimCluster
from tidelog.simulation.world.settings import host_of

FETCH_WAIT_MS = 700
FETCH_BYTES = 8 << 10
REPLICA_US = 5_000_000
"""For how long a consumer stays with a follower before it asks the leader again (Kafka: metadata.max.age.ms)."""
IN_SESSIONS = 0.5
"""The share of consumers with fetch sessions."""
TOGETHER = 0.5
"""The share of clusters whose partitions are all read by one consumer at the end."""
OFFSET_OUT_OF_RANGE = 1
CORRUPT_MESSAGE = 2
SESSION_ERRORS = (70, 71, 106)
"""FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH, FETCH_SESSION_TOPIC_ID_ERROR: no partition is answered."""
NO_ANSWER = FetchAnswer(-1, 0, [])


class Decoded(NamedTuple):
    """The records of a response."""

    values: list[int]
    offsets: list[int]
    epochs: list[int]
    """Leader epochs of the records."""
    following: int
    """The offset of the next fetch."""
    markers: list[tuple[int, int, bool]]
    """Offset, producer id, and whether it commits: of each marker of a transaction."""
    keys: list[int]
    """As long as `values`, if any record has a key; else empty."""
    tombstones: list[int]
    """Those of `values` whose records have no value."""


def decode(fetched: Fetched, offset: int) -> Decoded:
    """Decode the records from `offset` on, without those of aborted transactions that the response names.

    Raises `CorruptRecord`.
    """
    found = Decoded([], [], [], offset, [], [], [])
    following = offset
    aborts = sorted((first, producer) for producer, first in fetched.aborted)
    aborting: set[int] = set()
    for header, batch in iter_batches(fetched.records):
        if not check_crc(batch):
            raise CorruptRecord(f"batch {header.base_offset} fails its CRC32C")
        following = max(following, header.next_offset)
        while aborts and aborts[0][0] <= header.last_offset:
            aborting.add(aborts.pop(0)[1])
        if header.is_control:
            commits = control_type(next(iter_records(batch, header=header))) == ControlType.COMMIT
            if not commits:
                aborting.discard(header.producer_id)
            if header.base_offset >= offset:
                found.markers.append((header.base_offset, header.producer_id, commits))
            continue
        if header.is_transactional and header.producer_id in aborting:
            continue
        for record in iter_records(batch, header=header):
            if record.offset >= offset:
                found.values.append(number_of(record))
                found.keys.append(key_of(record))
                if record.value is None:
                    found.tombstones.append(found.values[-1])
                found.offsets.append(record.offset)
                found.epochs.append(header.partition_leader_epoch)
    if not any(key != UNKNOWN for key in found.keys):
        found.keys.clear()
    return found._replace(following=following)


class Position:
    """The position of a consumer in one partition."""

    def __init__(self, topic: Topic, partition: int) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = UNKNOWN
        self.told = (UNKNOWN, UNKNOWN)
        """High watermark and log start of the last response in the history."""
        self.replica = -1
        """The follower that the leader has named, or -1."""
        self.replica_until_us = 0


def is_deposed(cluster: SimCluster, position: Position, address: Address) -> bool:
    """Whether some controller's metadata name another leader than the broker that has answered, or none."""
    images = [node.controller.image for node in cluster.controllers if node.controller is not None]
    if not images:
        return False
    image = max(images, key=lambda each: each.version)
    record = _record_of(image, position)
    if record is None or position.replica >= 0:
        return False
    leader, _ = image.leader(record)
    return leader == NO_BROKER or host_of(leader) != address[0]


class Fetcher:
    """Fetches partitions and records the results."""

    def __init__(
        self,
        workload: Workload,
        client: Client,
        process: int,
        rack: str = "",
        *,
        committed: bool = False,
        in_sessions: bool | None = None,
    ) -> None:
        """`committed`: with `isolation.level=read_committed`. `in_sessions`: with fetch sessions; None: draw it."""
        self._w = workload
        self._client = client
        self._rack = rack
        self.committed = committed
        if in_sessions is None:
            in_sessions = workload.rng.random() < IN_SESSIONS
        self._sessions = ClientSessions() if in_sessions else None
        self.process = process

    async def assign(self, position: Position) -> bool:
        """Look up the log start and begin there."""
        w, topic, partition = self._w, position.topic.name, position.partition
        op = w.history.begin("list_offsets", self.process, w.now_us(), topic=topic, partition=partition)
        error = "no leader"
        try:
            address = await self._client.leader(topic, partition)
            if address is not None:
                request = kafka.list_offsets(position.topic.wire, partition, EARLIEST)
                code, offset = await self._client.ask(address, request, ASK_S)
                if not code:
                    # as of a name that has been given to another topic, what is told by a deposed leader is not kept
                    counts = not (position.topic.temporary or is_deposed(w.cluster, position, address))
                    w.history.end(op, "ok", w.now_us(), log_start=offset if counts else UNKNOWN)
                    self.assign_at(position, offset)
                    return True
                error = f"error {code}"
        except Lost as lost:
            error = str(lost)
        w.history.end(op, "fail", w.now_us(), error=error)
        self._client.forget(topic, partition)
        return False

    @property
    def in_sessions(self) -> bool:
        """Whether it has fetch sessions."""
        return self._sessions is not None

    def assign_at(self, position: Position, offset: int) -> None:
        """Begin at `offset`."""
        w = self._w
        fields = {"topic": position.topic.name, "partition": position.partition, "offset": offset}
        w.history.note("assign", self.process, w.now_us(), **fields)
        position.offset = offset

    async def _where(self, position: Position) -> Address | None:
        """Return the address to fetch from, if known. Raises `Lost`."""
        if position.replica >= 0:
            address = self._client.address_of(position.replica)
            if address is not None and self._w.now_us() < position.replica_until_us:
                return address
            position.replica = -1
            if address is None:  # the metadata are older than the follower
                self._client.forget(position.topic.name, position.partition)
        return await self._client.leader(position.topic.name, position.partition)

    async def fetch(self, positions: list[Position]) -> bool:
        """Send one request to each leader, or follower that one has named; return whether records were received."""
        by_leader: dict[Address, list[Position]] = {}
        for position in positions:
            if position.offset < 0 and not await self.assign(position):
                continue
            try:
                address = await self._where(position)
            except Lost:
                continue
            if address is not None:
                by_leader.setdefault(address, []).append(position)
        if not by_leader:
            await asyncio.sleep(0.2)
            return False
        found = await asyncio.gather(*(self._ask(address, ours) for address, ours in by_leader.items()))
        if not any(found):
            await asyncio.sleep(0.02)
        return any(found)

    async def read_up_to(self, ends: Mapping[Position, int]) -> None:
        """Fetch until each position is at its end, or its topic is deleted."""
        while behind := [one for one, end in ends.items() if one.offset < end and not one.topic.gone]:
            await self.fetch(behind)

    async def _ask(self, address: Address, positions: list[Position]) -> bool:
        w, sessions = self._w, self._sessions
        began_us = w.now_us()
        places = {(one.topic.name, one.partition): one for one in positions}
        wanted, session = {place: one.offset for place, one in places.items()}, WITHOUT
        if sessions is not None:
            session, wanted = sessions.request(address, wanted)
        if w.by_id:
            request = kafka_ids.fetch(
                wanted, w.ids, FETCH_WAIT_MS, FETCH_BYTES, self._rack, session, committed=self.committed
            )
        else:
            request = kafka.fetch(wanted, FETCH_WAIT_MS, FETCH_BYTES, self._rack, session, committed=self.committed)
        try:
            answer: FetchAnswer = await self._client.ask(address, request, ASK_S)
        except Lost:
            answer = NO_ANSWER
            if sessions is not None:
                sessions.lost(address)
        else:
            if sessions is not None:
                sessions.answered(address, answer.error, answer.session)
        if answer.error in SESSION_ERRORS and sessions is not None:
            return False
        found = answer.partitions
        if answer.error or not (found or answer.session):
            for one in positions:
                one.replica = -1
                self._client.forget(one.topic.name, one.partition)
            await asyncio.sleep(0.1)
            return False
        came = [self._take(places[one.topic, one.partition], one, began_us, address) for one in found]
        if any(one.error for one in found):
            await asyncio.sleep(0.05)
        return any(came)

    def _take(self, position: Position, found: Fetched, began_us: int, address: Address) -> bool:
        w, was_follower = self._w, position.replica >= 0
        if found.error:
            position.replica = -1
            self._client.forget(found.topic, found.partition, found.leader)
            if found.error == CORRUPT_MESSAGE:
                w.found("false-damage", f"{found.topic}-{found.partition} at {position.offset}: CORRUPT_MESSAGE")
            if found.error == OFFSET_OUT_OF_RANGE and not was_follower:  # else the leader decides
                self._note_refused(position, began_us, address)
                position.offset = UNKNOWN
            return False
        if found.preferred >= 0:
            position.replica, position.replica_until_us = found.preferred, w.now_us() + REPLICA_US
            return False
        try:
            came = decode(found, position.offset)
        except CorruptRecord as error:
            w.found("corrupt-read", f"{found.topic}-{found.partition} from offset {position.offset} on: {error}")
            return False
        # a follower's high watermark is one that the leader has told before, and need not be the newest
        told = (UNKNOWN if was_follower else found.high_watermark), found.log_start
        if is_deposed(w.cluster, position, address):
            told = UNKNOWN, UNKNOWN  # nor is what a leader tells that does not know its successor yet
        if came.values:
            self._check_confirmed(position, came.offsets[-1] + 1, "at a follower" if was_follower else "at its leader")
        if came.values or told != position.told:
            position.told = told
            op = w.history.begin(
                "poll", self.process, began_us, topic=found.topic, partition=found.partition, offset=position.offset,
                values=came.values, offsets=came.offsets, epochs=came.epochs, next_offset=came.following,
                high_watermark=told[0], log_start=told[1], committed_only=self.committed, keys=came.keys,
                tombstones=came.tombstones,
            )  # fmt: skip
            w.history.end(op, "ok", w.now_us())
        self.took(position, came)
        position.offset = came.following
        return bool(came.values)

    def _note_refused(self, position: Position, began_us: int, address: Address) -> None:
        """Record that a leader says that the offset is out of range, unless it does not know its successor yet."""
        w = self._w
        if not is_deposed(w.cluster, position, address):
            op = w.history.begin(
                "poll", self.process, began_us, topic=position.topic.name, partition=position.partition,
                offset=position.offset, committed_only=self.committed,
            )  # fmt: skip
            w.history.end(op, "fail", w.now_us(), error=OUT_OF_RANGE)

    def took(self, position: Position, came: Decoded) -> None:
        """Called with what was received, before the position moves past it."""

    def _check_confirmed(self, position: Position, end: int, where: str) -> None:
        """Compare what was read with what brokers have confirmed by now."""
        cluster = self._w.cluster
        active = cluster.active
        if active is None:
            return
        record = _record_of(active.image, position)
        if record is not None:
            cluster.watch.confirmed.stream_was_read(record.first_stream + 1, end, where)


def _record_of(image: Image, position: Position) -> PartitionRecord | None:
    topic = position.topic
    return image.partition(topic.id or image.topic_ids.get(topic.wire, b""), position.partition)


class Consumer:
    """Reads some partitions, by assignment; restarts at random."""

    def __init__(
        self, workload: Workload, places: Sequence[tuple[Topic, int]] = (), *, committed: bool = False
    ) -> None:
        """Of `places`, or else of all topics of the workload. `committed`: with `isolation.level=read_committed`."""
        self._w = workload
        self._places = places
        self._rng = workload.random()
        self._client = workload.client()
        rack = workload.cluster.shape.rack_of(self._rng.randrange(12))
        self._fetcher = Fetcher(workload, self._client, workload.process(), rack, committed=committed)
        self._positions: list[Position] = []

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            positions = [one for one in self._positions if not one.topic.gone]
            if not positions or rng.random() < 0.005:
                self._choose()
                await asyncio.sleep(0.1)
                continue
            await self._fetcher.fetch(positions)
        if self._fetcher.in_sessions:
            await self._read_on()
        self._client.close()

    async def _read_on(self) -> None:
        """Read to the end: nothing may be withheld in a session that has lived through all the faults."""
        ends = {}
        for one in self._positions:
            if not one.topic.gone:
                ends[one] = await end_of(self._client, one.topic, one.partition, committed=self._fetcher.committed)
        await self._fetcher.read_up_to(ends)

    def _choose(self) -> None:
        w = self._w
        places = [place for place in self._places if place[0].exists]
        if not self._places:
            places = [(topic, index) for topic in w.existing() for index in range(topic.partitions)]
        self._rng.shuffle(places)
        self._fetcher.process = w.process()
        self._positions = [Position(*place) for place in places[: self._rng.randint(1, 6)]]


class ReaderActor:
    """Reads one partition from its start to its end, after all faults have ended."""

    def __init__(self, client: Client, fetcher: Fetcher, topic: Topic, partition: int) -> None:
        self._client = client
        self._fetcher = fetcher
        self._position = Position(topic, partition)

    async def run(self, end: int = UNKNOWN) -> int:
        """Read up to the high watermark, or to a given end; return that."""
        position = self._position
        if position.topic.id:  # ListOffsets gives the end: only a broker that answered a Fetch surely has the topic
            self._fetcher.assign_at(position, 0)
            while position.told[0] < 0:
                await self._fetcher.fetch([position])
        while position.offset < 0 and not await self._fetcher.assign(position):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        while position.offset < (
            end if end >= 0 else max(position.told[0], await end_of(self._client, position.topic, position.partition))
        ):
            await self._fetcher.fetch([position])
        return position.offset


async def end_of(client: Client, topic: Topic, partition: int, *, committed: bool = False) -> int:
    """Ask for the end of a partition until it is told; `committed`: for the last stable offset. 0: it is deleted."""
    while not topic.gone:
        try:
            address = await client.leader(topic.name, partition)
            if address is not None:
                request = kafka.list_offsets(topic.wire, partition, LATEST, committed=committed)
                error, offset = await client.ask(address, request, ASK_S)
                if not error:
                    return int(offset)
        except Lost:
            pass
        client.forget(topic.name, partition)
        await asyncio.sleep(0.1)
    return 0


async def read_all(workload: Workload) -> None:
    """Read every partition from its start to its high watermark: together, in sessions, or as one process for each."""
    client = workload.client()
    places = [(topic, partition) for topic in workload.existing() for partition in range(topic.partitions)]
    if workload.rng.random() < TOGETHER:
        await _read_together(workload, client, places)
    else:
        for place in places:
            fetcher = Fetcher(workload, client, workload.process(), in_sessions=False)
            await ReaderActor(client, fetcher, *place).run()
    client.close()


async def _read_together(workload: Workload, client: Client, places: list[tuple[Topic, int]]) -> None:
    fetcher = Fetcher(workload, client, workload.process(), in_sessions=True)
    positions = [Position(*place) for place in places]
    for position in positions:
        if position.topic.id:  # as `ReaderActor` does
            fetcher.assign_at(position, 0)
    ends = {}
    for position in positions:
        while position.topic.id and position.told[0] < 0:
            await fetcher.fetch(positions)
        ends[position] = max(position.told[0], await end_of(client, position.topic, position.partition))
    await fetcher.read_up_to(ends)
