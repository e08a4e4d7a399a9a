"""Takes snapshots of topics (docs/design/0031-snapshots-and-branches.md): a cut by the leaders, then one command.

The leader of each partition names the ends of its streams, once they are confirmed, and uploads up to there. The method
`snapshot_cut` asks other brokers for that. A snapshot therefore holds every record that was acknowledged before it was
asked for. The command checks the ends against what is committed, all of them at one version of the metadata; if a
partition has moved, or was trimmed meanwhile, the leaders are asked again.

Entry: `SnapshotTaker.take`; `SnapshotTaker.serve` for the other brokers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from tidelog.broker.partitions.manager import PartitionManager
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.peers import PeerListener
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.commands import require_level
from tidelog.controller.model.errors import OutcomeUnknown
from tidelog.controller.model.records import NO_BROKER, PartitionKey, TopicRecord
from tidelog.controller.model.snapshots import (
    MAX_PARTITIONS_PER_SNAPSHOT,
    CreateSnapshot,
    CutRefused,
    Ends,
    SnapshotExists,
    SnapshotRecord,
    TopicCut,
    UnknownSnapshot,
)
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, NotLeader, TidelogError, Unavailable
from tidelog.runtime.msgpack import DECODE_ERRORS
from tidelog.stream.partition_log import PartitionLog

CUT = "snapshot_cut"
CUT_S = 20.0
"""How long the leaders of one attempt may take: an upload, and a quorum's confirmation."""
TAKE_S = 40.0
"""How long attempts are made: longer than an election or a move, and shorter than the command line waits."""
RETRY_S = (0.05, 1.0)
AT_ONCE = 64
"""Partitions whose checkpoints are waited for at a time."""

_T = TypeVar("_T")
_keys = msgspec.msgpack.Decoder(list[PartitionKey])
_ends = msgspec.msgpack.Decoder(list[Ends])


class SnapshotTaker:
    """Takes snapshots, and cuts for those of other brokers."""

    def __init__(
        self,
        broker_id: int,
        *,
        controller: ControllerClient,
        manager: PartitionManager,
        calls: PeerCalls,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._broker_id = broker_id
        self._controller = controller
        self._manager = manager
        self._calls = calls
        self._clock = clock
        self._rng = rng

    def serve(self, peers: PeerListener) -> None:
        """Cut for the snapshots of other brokers."""
        peers.serve(CUT, self._asked)

    async def take(self, name: str, topics: Sequence[str] = (), *, budget_s: float = TAKE_S) -> SnapshotRecord:
        """Take a snapshot of topics; without any, of all that are not internal.

        Raises `UnsupportedLevel`, `SnapshotExists`, `NotFound` for an unknown topic, `InvalidInput`, `Overloaded` for
        too many, and `Unavailable` if some leader does not answer, or the bucket does not take what it uploads.
        """
        image = self._controller.image
        require_level(CreateSnapshot(name, ()), image.level)
        if name in image.snapshots:
            raise SnapshotExists(f"snapshot {name!r} already exists", hint="`tidelog snapshot list` shows all")
        deadline = self._clock.monotonic() + budget_s
        backoff = Backoff(*RETRY_S, self._rng)
        while True:
            try:
                return await self._try(name, self._topics(topics))
            except (CutRefused, NotLeader, Unavailable) as error:
                if isinstance(error, OutcomeUnknown):
                    raise
                delay_s = backoff.next_delay_s()
                if self._clock.monotonic() + delay_s > deadline:
                    raise
                await self._clock.sleep(delay_s)

    def _topics(self, names: Sequence[str]) -> list[TopicRecord]:
        """Return the topics of these names, each once. Raises `NotFound`, `InvalidInput`."""
        image = self._controller.image
        if not names:
            found = [topic for _, topic in sorted(image.topics.items()) if not topic.internal]
            if not found:
                raise NotFound("there are no topics to take a snapshot of", hint="`tidelog topic create` creates one")
        else:
            found = []
            for name in dict.fromkeys(names):
                topic = image.topic(name)
                if topic is None:
                    raise NotFound(f"topic {name!r} does not exist", hint="`tidelog topic list` shows the topics")
                found.append(topic)
        count = sum(topic.partitions for topic in found)
        if count > MAX_PARTITIONS_PER_SNAPSHOT:
            raise InvalidInput(
                f"a snapshot holds up to {MAX_PARTITIONS_PER_SNAPSHOT} partitions, not {count}",
                hint="name fewer topics, and take several snapshots",
            )
        return found

    async def _try(self, name: str, topics: Sequence[TopicRecord]) -> SnapshotRecord:
        keys = [(topic.id, index) for topic in topics for index in range(topic.partitions)]
        by_leader: dict[int, list[PartitionKey]] = {}
        for key in keys:
            by_leader.setdefault(self._leader(key), []).append(key)
        ends: dict[PartitionKey, Ends] = {}
        try:
            async with asyncio.timeout(CUT_S):
                for mine, found in await in_parallel([self._ask(*each) for each in by_leader.items()]):
                    ends.update(zip(mine, found, strict=True))
        except TimeoutError:
            raise Unavailable(
                f"the leaders did not cut the topics of snapshot {name!r} within {CUT_S:g} s",
                hint="`tidelog status` shows who does not answer, and whether the bucket does",
            ) from None
        cuts = [
            TopicCut(topic.id, tuple(ends[topic.id, index] for index in range(topic.partitions))) for topic in topics
        ]
        await self._controller.snapshots.create(name, cuts)
        record = self._controller.image.snapshots.get(name)
        if record is None:
            raise UnknownSnapshot(f"snapshot {name!r} was deleted as soon as it was taken")
        return record

    def _leader(self, key: PartitionKey) -> int:
        image = self._controller.image
        partition = image.partition(*key)
        leader = image.leader(partition)[0] if partition is not None else NO_BROKER
        if leader == NO_BROKER:
            topic = image.topics.get(key[0])
            raise Unavailable(
                f"partition {key[1]} of topic {topic.name if topic is not None else key[0].hex()!r} has no leader",
                hint="`tidelog status` shows why; try again",
            )
        return leader

    async def _ask(self, broker_id: int, keys: list[PartitionKey]) -> tuple[list[PartitionKey], list[Ends]]:
        if broker_id == self._broker_id:
            return keys, await self.cut(keys)
        raw = await self._calls.call(broker_id, CUT, keys, CUT_S)
        try:
            found = _ends.decode(raw)
        except DECODE_ERRORS as error:
            raise CorruptData(f"this is no result of {CUT}: {error}") from error
        if len(found) != len(keys):
            raise CorruptData(f"broker {broker_id} has cut {len(found)} of {len(keys)} partitions")
        return keys, found

    async def _asked(self, params: msgspec.Raw) -> bytes:
        try:
            keys = _keys.decode(params)
        except DECODE_ERRORS as error:
            raise InvalidInput(f"these are no parameters of {CUT}: {error}") from error
        if len(keys) > MAX_PARTITIONS_PER_SNAPSHOT:
            raise InvalidInput(f"{len(keys)} partitions in one call are more than {MAX_PARTITIONS_PER_SNAPSHOT}")
        return msgspec.msgpack.encode(await self.cut(keys))

    async def cut(self, keys: Sequence[PartitionKey]) -> list[Ends]:
        """Return the ends of partitions that this broker leads, when all before them is in the bucket.

        Raises `NotLeader`, `Unavailable` for what may be tried again.
        """
        sets: set[int] = set()
        ends: list[Ends] = []
        try:
            for first in range(0, len(keys), AT_ONCE):
                logs = [self._log(key, sets) for key in keys[first : first + AT_ONCE]]
                ends += await in_parallel([log.cut() for log in logs])
            await in_parallel([self._manager.storages.get(each).upload_now() for each in sorted(sets)])
        except (NotLeader, Unavailable):
            raise
        except TidelogError as error:
            if not error.retriable and not isinstance(error, NotFound):
                raise
            raise Unavailable(f"a partition cannot be cut now: {error.message}", hint=error.hint) from error
        return ends

    def _log(self, key: PartitionKey, sets: set[int]) -> PartitionLog:
        """Return the log of a partition that this broker leads, and add its replica set. Raises `NotLeader`."""
        partition = self._controller.image.partition(*key)
        if partition is None:
            raise NotLeader(f"there is no partition {key[1]} of topic {key[0].hex()} any more")
        sets.add(partition.replica_set)
        return self._manager.get_by_id(*key)


async def in_parallel(works: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run all to their ends and return their results; raise the first error."""
    found = await asyncio.gather(*works, return_exceptions=True)
    results: list[_T] = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        results.append(each)
    return results
