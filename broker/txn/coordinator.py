"""The transaction coordinator: the transactional ids of the state partitions that this broker leads.

It finds the state partition of an id, passes the request to its `TransactionalId`, writes what that wants written, and
answers when the record is confirmed. The markers of a decided transaction go to `tidelog.broker.txn.markers`; when all
partitions have theirs, the Complete record is written. Every ten seconds transactions over their time-out are aborted
and idle ids forgotten.

A request for a partition that this broker does not serve raises `NotCoordinator`, `CoordinatorLoading` or
`CoordinatorNotAvailable`; clients may retry all three.

Invariants: an id answers and sends markers only while its shard is active; a change whose outcome is unknown unloads
its shard, so the record is read again before anything follows from it; a partition is in a transaction only if this
broker's metadata had its topic, and has records of it only if that was the topic they are in (the sender of markers
relies on that).

Entry: `TxnCoordinator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING

from tidelog.broker.coordinators.errors import CoordinatorLoading, CoordinatorNotAvailable, NotCoordinator, WriteError
from tidelog.broker.coordinators.shards import PERSIST_TIMEOUT_S, Shard, ShardPhase, ShardTable
from tidelog.broker.coordinators.store import KeyValue
from tidelog.broker.coordinators.timers import Now
from tidelog.broker.coordinators.topic import TRANSACTION_CONFIGS, TRANSACTION_TOPIC, CoordinatorTopic
from tidelog.broker.coordinators.writer import Write
from tidelog.broker.settings import GroupSettings
from tidelog.broker.txn.calls import AdmitParams, TopicPartition
from tidelog.broker.txn.errors import TxnError
from tidelog.broker.txn.markers import MarkerJob, MarkerSender
from tidelog.broker.txn.records import MAX_ID_BYTES, TxnValue, encode_txn_key, encode_txn_value
from tidelog.broker.txn.state import (
    InitRequest,
    Markers,
    NeedsProducerId,
    ProducerPair,
    TransactionalId,
    TxnDescription,
    TxnLimits,
    TxnReply,
    TxnStep,
)
from tidelog.broker.txn.store import TxnStore
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, TidelogError

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.model.records import BrokerRecord
    from tidelog.stream.partition_log import PartitionLog

LOAD_WAIT_S = 3.0
"""How long requests wait for a partition that is being opened or moved; after that the client backs off."""
RETRY_MS = 500
"""When what could not be written is tried again."""
ADD_VERSION = 2
"""The transaction version of whoever lets brokers add partitions (Produce v12, KIP-890)."""
CONCURRENT_WAIT_S = 0.1
"""How long partitions wait for the end of the transaction before; after that the client backs off."""
_CHECK = "check"
"""The table's deadline for the next search for transactions over their time-out."""

TxnShard = Shard[TxnStore]


class InvalidTransactionalId(InvalidInput):
    """The transactional id is empty or too long. Kafka: INVALID_REQUEST (42)."""


class TxnCoordinator:
    """Serves the transactional ids of the state partitions that this broker leads. It owns the shards' table."""

    def __init__(
        self,
        partitions: PartitionManager,
        controller: ControllerClient,
        sender: MarkerSender,
        clock: Clock,
        settings: GroupSettings,
        rng: random.Random,
    ) -> None:
        """`sender` is closed with this coordinator."""
        self._settings = settings
        self._clock = clock
        self._sender = sender
        self._limits = TxnLimits(
            settings.transaction_max_timeout_ms,
            settings.transactional_id_expiration_ms,
            settings.transaction_two_phase_commit,
        )
        self._topic = CoordinatorTopic(
            controller, TRANSACTION_TOPIC, settings.transaction_topic_partitions, TRANSACTION_CONFIGS
        )
        self._controller = controller
        self._table: ShardTable[TxnStore] = ShardTable(
            TRANSACTION_TOPIC, self, partitions=partitions, controller=controller, clock=clock, rng=rng
        )
        self._epoch_ms = clock.time_ms() - int(clock.monotonic() * 1000)
        self._new_id: Callable[[], Awaitable[int]]
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        """Requests that wait for the next change of an id."""

    # --- life cycle ----------------------------------------------------------------------------------------------

    def start(self, new_id: Callable[[], Awaitable[int]]) -> None:
        """Load the open state partitions, and those that open.

        `new_id` allocates a producer id that was never given before, and raises `Unavailable` or `Fenced`.
        """
        self._new_id = new_id
        self._table.start()
        self._check_later()

    async def close(self) -> None:
        """Fail all waiting requests with NOT_COORDINATOR, send nothing more, and stop. The partitions stay open."""
        await self._table.close()
        await self._sender.close()

    async def load_partition(self, partition_log: PartitionLog) -> None:
        """Read a state partition; its ids are served afterwards. `start` calls this automatically."""
        await self._table.load(partition_log)

    def problems(self) -> list[str]:
        """Return the partitions that are led here and not served, one sentence each, for operators."""
        return self._table.problems()

    def stats(self) -> dict[str, int]:
        """Counts for metrics: partitions led and not yet active, ids, transactions that are open, markers unsent."""
        shards = self._table.all()
        counts = [shard.store.counts() for shard in shards]
        return {
            "partitions": len(shards),
            "loading": sum(shard.phase is not ShardPhase.ACTIVE for shard in shards),
            "transactional_ids": sum(each["transactional_ids"] for each in counts),
            "open": sum(each["open"] for each in counts),
            "markers_waiting": self._sender.waiting(),
            **{f"markers_{name}": count for name, count in self._sender.counts.items()},
        }

    def _now_ms(self) -> int:
        """The time since the Unix epoch, which a clock that is set does not move."""
        return self._epoch_ms + int(self._clock.monotonic() * 1000)

    # --- what the table asks for ---------------------------------------------------------------------------------

    def new_store(self) -> TxnStore:
        """Return an empty store."""
        return TxnStore(self._limits, self._now_ms())

    def activated(self, shard: TxnShard) -> None:
        """Send the markers of the transactions that were decided under the coordinator before this one."""
        for one in list(shard.store.ids.values()):
            self._follow(shard, one, one.resume(self._now_ms()))

    def unloading(self, shard: TxnShard) -> None:
        """Send no more markers: another coordinator does, or this one after it has read the records again."""
        self._sender.drop(shard)

    def due(self, shard: TxnShard | None, key: Hashable, now: Now) -> None:
        """The time to look for what is over its time-out, of all ids or of one."""
        if shard is not None:
            one = shard.store.ids.get(str(key))
            if one is not None:
                self._follow(shard, one, one.tick(self._now_ms()))
            return
        for each in self._table.active():
            for one in list(each.store.ids.values()):
                self._follow(each, one, one.tick(self._now_ms()))
        self._check_later()

    def topics_deleted(self, shard: TxnShard, names: set[str]) -> None:
        """Wait no more for the markers of deleted topics."""
        for one in list(shard.store.ids.values()):
            self._follow(shard, one, one.topics_deleted(names, self._now_ms()))

    def _check_later(self) -> None:
        now = self._table.now()
        self._table.set_timer(_CHECK, now.mono_ms + self._settings.transaction_check_interval_ms)

    # --- finding -------------------------------------------------------------------------------------------------

    async def find(self, transactional_id: str) -> BrokerRecord:
        """Return an id's coordinator; creates the topic on first use. Raises `CoordinatorNotAvailable`."""
        broker = await self._topic.find(transactional_id)
        if await self._arrival(transactional_id):
            broker = await self._topic.find(transactional_id)  # the partition may have moved meanwhile
        return broker

    async def leader_of(self, transactional_id: str) -> BrokerRecord:
        """As `find`, but an id whose topic does not exist has no coordinator. Raises `NotCoordinator`, too."""
        if self._topic.record is None:
            raise NotCoordinator(f"{TRANSACTION_TOPIC} does not exist yet")
        return await self._topic.find(transactional_id)

    async def _arrival(self, transactional_id: str) -> bool:
        """Wait briefly while the id's partition is moving to or from this broker; False if it is not moving."""
        index = self._topic.partition_of(transactional_id)
        if not self._table.is_coming(index):
            return False
        with contextlib.suppress(TimeoutError):  # the client gets COORDINATOR_LOAD_IN_PROGRESS
            async with asyncio.timeout(LOAD_WAIT_S):
                await self._table.wait_until_loaded(index)
        return True

    async def _shard(self, transactional_id: str) -> TxnShard:
        if len(transactional_id.encode()) > MAX_ID_BYTES:
            raise InvalidTransactionalId(f"a transactional id is longer than {MAX_ID_BYTES} bytes")
        await self._arrival(transactional_id)
        return self._table.get(self._topic.partition_of(transactional_id))

    # --- requests ------------------------------------------------------------------------------------------------

    async def init_producer_id(self, transactional_id: str, request: InitRequest) -> TxnReply:
        """InitProducerId: a producer id and an epoch that fences the clients before.

        Raises `InvalidTransactionalId`, and `CoordinatorLoading` also where no producer id can be allocated: every
        client tries again after that, as in Kafka.
        """
        if not transactional_id:
            return TxnReply(TxnError.INVALID_REQUEST)
        return await self._call(
            transactional_id,
            lambda one, fresh_id: one.init_producer_id(request, self._now_ms(), fresh_id),
            makes=True,
        )

    async def add_partitions(
        self, transactional_id: str, producer: ProducerPair, partitions: Collection[TopicPartition], version: int
    ) -> TxnError:
        """Add partitions to the transaction.

        While the end of the transaction before is written, this waits for up to `CONCURRENT_WAIT_S`. Raises
        `CoordinatorNotAvailable` while this broker's metadata are behind those of who asks: it would take the topic
        for a deleted one, and send it no marker.
        """

        def added(one: TransactionalId, _fresh_id: int | None) -> TxnStep:
            if not all(self.knows(each) for each in partitions):
                raise CoordinatorNotAvailable("the coordinator's metadata do not have a topic of the transaction yet")
            return one.add_partitions(producer, partitions, self._now_ms(), version)

        deadline = self._clock.monotonic() + CONCURRENT_WAIT_S
        while True:
            reply = await self._call(transactional_id, added)
            if reply.error is not TxnError.CONCURRENT_TRANSACTIONS:
                return reply.error
            if not await self._change_of(transactional_id, deadline - self._clock.monotonic()):
                return reply.error

    async def _change_of(self, transactional_id: str, timeout_s: float) -> bool:
        """Wait until a record of an id has been written or refused; False if that takes longer than `timeout_s`."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(transactional_id, set())
        waiting.add(change)
        try:
            async with asyncio.timeout(timeout_s):
                await change
        except TimeoutError:
            return False
        finally:
            waiting.discard(change)
            if not waiting and self._waiting.get(transactional_id) is waiting:
                del self._waiting[transactional_id]
        return True

    async def end(self, transactional_id: str, producer: ProducerPair, *, commit: bool, version: int) -> TxnReply:
        """EndTxn: decide the transaction. `version`: 2 answers with the pair of the next one (KIP-890)."""
        return await self._call(
            transactional_id, lambda one, fresh_id: one.end(producer, commit, version, self._now_ms(), fresh_id)
        )

    async def admit(self, params: AdmitParams) -> list[int]:
        """Whether partitions are in a transaction, or add them: an error code for each, in order.

        Raises `CoordinatorNotAvailable` where a topic was deleted and created again, and one of the two brokers has not
        heard of that: the coordinator would take the deletion for one of the topic that is written to.
        """
        producer = ProducerPair(params.producer_id, params.producer_epoch)
        shard = await self._shard(params.transactional_id)
        for topic, topic_id in params.topic_ids.items():
            if self.topic_id(topic) != topic_id:
                raise CoordinatorNotAvailable(f"the coordinator's metadata have another topic {topic}, or none")
        one = shard.store.ids.get(params.transactional_id)
        if one is None:
            return [TxnError.INVALID_PRODUCER_ID_MAPPING] * len(params.partitions)
        if not params.add:
            found = one.verify(producer, params.partitions)
            return [found[each] for each in params.partitions]
        error = await self.add_partitions(params.transactional_id, producer, params.partitions, ADD_VERSION)
        return [error] * len(params.partitions)

    def topic_id(self, name: str) -> bytes:
        """The id of the topic that this broker's metadata have under a name; empty if there is none."""
        record = self._controller.image.topic(name)
        return record.id if record is not None else b""

    def knows(self, partition: TopicPartition) -> bool:
        """Whether this broker's metadata have a partition."""
        record = self._controller.image.topic(partition[0])
        return record is not None and 0 <= partition[1] < record.partitions

    async def describe(self, transactional_id: str) -> TxnDescription | None:
        """DescribeTransactions; None if the id is unknown."""
        shard = await self._shard(transactional_id)
        one = shard.store.ids.get(transactional_id)
        return None if one is None else one.description()

    def list_transactions(self) -> list[TxnDescription]:
        """ListTransactions: every id of the partitions led here. Raises `CoordinatorLoading` while any is loading."""
        shards = self._table.all()
        for shard in shards:
            if shard.phase is ShardPhase.LOADING:
                raise CoordinatorLoading(f"{TRANSACTION_TOPIC}-{shard.index} is being loaded")
        found = (one.description() for shard in shards for one in shard.store.ids.values())
        return [each for each in found if each is not None]

    def age_ms(self, description: TxnDescription) -> int:
        """How long ago a transaction began; -1 if none is open."""
        return -1 if description.started_ms < 0 else max(0, self._now_ms() - description.started_ms)

    # --- changes -------------------------------------------------------------------------------------------------

    async def _call(
        self,
        transactional_id: str,
        event: Callable[[TransactionalId, int | None], TxnStep | NeedsProducerId],
        *,
        makes: bool = False,
    ) -> TxnReply:
        """Pass an event to an id and return its reply. `makes`: it may make an id that is unknown."""
        fresh_id: int | None = None
        while True:
            shard = await self._shard(transactional_id)
            one = shard.store.obtain(transactional_id) if makes else shard.store.ids.get(transactional_id)
            if one is None:
                return TxnReply(TxnError.INVALID_PRODUCER_ID_MAPPING)
            step = event(one, fresh_id)
            if not isinstance(step, NeedsProducerId):
                break
            shard.store.drop_if_blank(one)
            fresh_id = await self._allocate()  # meanwhile the id may change: ask again
        if step.persist is None:
            shard.store.drop_if_blank(one)
            assert step.reply is not None and step.markers is None
            return step.reply
        replied: asyncio.Future[TxnReply] = asyncio.get_running_loop().create_future()

        def reply(given: TxnReply) -> None:
            if not replied.done():
                replied.set_result(given)

        self._write(shard, one, step, reply)
        try:
            async with asyncio.timeout(PERSIST_TIMEOUT_S):
                return await replied
        except TimeoutError as error:
            raise CoordinatorNotAvailable(f"{TRANSACTION_TOPIC}-{shard.index} does not confirm in time") from error

    async def _allocate(self) -> int:
        try:
            return await self._new_id()
        except TidelogError as error:
            raise CoordinatorLoading(f"no producer id can be allocated now: {error}") from error

    def _follow(self, shard: TxnShard, one: TransactionalId, step: TxnStep) -> None:
        """Carry out a step that nobody waits for."""
        self._send(shard, one, step.markers)
        if step.persist is not None:
            self._write(shard, one, step, None)

    def _write(
        self, shard: TxnShard, one: TransactionalId, step: TxnStep, reply: Callable[[TxnReply], None] | None
    ) -> None:
        """Persist a step's record, apply it when it is confirmed, and carry out what follows."""
        assert step.persist is not None
        value = encode_txn_value(step.persist) if isinstance(step.persist, TxnValue) else None
        records: list[KeyValue] = [(encode_txn_key(one.transactional_id), value)]
        shard.writer.submit(Write(lambda: records, functools.partial(self._written, shard, one, reply)))

    def _written(
        self,
        shard: TxnShard,
        one: TransactionalId,
        reply: Callable[[TxnReply], None] | None,
        error: WriteError,
    ) -> None:
        if error is WriteError.NOT_COORDINATOR:  # the shard is unloaded, and nobody knows what its log holds
            if reply is not None:
                reply(TxnReply(TxnError.NOT_COORDINATOR))
            return
        after = one.persisted(TxnError(error), self._now_ms())
        shard.store.drop_if_blank(one)
        if reply is not None and after.reply is not None:
            reply(after.reply)
        if error is not WriteError.NONE:
            self._table.set_timer(one.transactional_id, self._table.now().mono_ms + RETRY_MS, shard)
        self._follow(shard, one, after)
        for change in self._waiting.pop(one.transactional_id, ()):
            if not change.done():
                change.set_result(None)

    def _send(self, shard: TxnShard, one: TransactionalId, markers: Markers | None) -> None:
        if markers is not None and self._table.is_current(shard):
            marked = functools.partial(self._marked, shard, one)
            self._sender.send(MarkerJob(shard, shard.log.leader_epoch, markers, marked))

    def _marked(
        self, shard: TxnShard, one: TransactionalId, markers: Markers, partitions: Iterable[TopicPartition]
    ) -> None:
        self._follow(shard, one, one.marked(markers, partitions, self._now_ms()))
