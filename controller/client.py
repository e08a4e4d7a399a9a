"""`ControllerClient`: the controller, as brokers, tools and Spark see it.

It implements `storage.managers.ObjectManager` and `stream.managers.StreamManager`. Reads come from the local image;
a mutating call is one command with a dedupe id of its own, asked again (same id) after a time-out or a lost connection
until the budget is spent, so that it takes effect at most once; it returns when the local image contains its effect.
What the controller refuses is raised here as the same class of error.

Commands, polls and heartbeats have connections of their own: a slow command never makes a broker look dead. Commands
find the active controller among several; the image says who they are when they change. What a controller that hangs
leaves unanswered is asked of another one, with the same dedupe id.
Entry: `ControllerClient`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from controller import commands as c
from controller.addresses import split_address
from controller.errors import ErrorInfo, NotController, OutcomeUnknown, TopicIdTaken, from_wire
from controller.feed import DeltaFeed
from controller.follower import Callback, Follower, ImageFollower, LocalFollower
from controller.handshake import Credentials
from controller.heartbeat import Heartbeat
from controller.image import Delta, Image
from controller.load import BrokerLoad, HeartbeatReply
from controller.model import DrainMode, ReplicaSetRecord, TopicRecord
from controller.rpc import ChangeParams, CommandParams, Endpoint, RpcChannel, SessionReply, TransferParams
from runtime.clock import Clock
from runtime.errors import Overloaded, TidelogError, Unavailable
from runtime.log_limit import LogLimiter
from runtime.network import Network
from runtime.tasks import Backoff, TaskSet
from storage.managers import CommitObjects, CompactObjects, ObjectSlice
from stream.managers import OpenedStream

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_IN_FLIGHT = 64
MAX_WINDOW = 100
"""A command is not begun while one begun so many earlier has no answer: the controller remembers 128 of a client's
answers, and one that is asked again must not have been pushed out by its successors."""
ATTEMPT_S = 10.0
ATTEMPT_OF_MANY_S = 3.0
"""With several controllers another one is asked earlier."""
STATUS_S = 2.0
SHORT_BUDGET_S = 5.0
"""For questions that a person or a script waits for: longer than an election takes."""
WAITING_LOG_S = 10.0
"""A kind of failure to reach a controller is logged once in so long."""
FOLLOW_ACTIVE_BROKERS = 10
"""So many brokers follow the active controller, which knows first what is committed: the others hear of it by its next
message, some milliseconds later, and each command waits for its own effect. More brokers are shared among them all."""
LAG_S = 1.0
"""A result that the followed controller does not show for so long makes us follow another one."""


class ControllerClient:
    """See the module. All methods are for the event loop's thread."""

    def __init__(
        self,
        endpoints: list[tuple[str, int]],
        network: Network,
        clock: Clock,
        rng: random.Random,
        *,
        budget_s: float = 30.0,
        heartbeat_interval_s: float = 1.0,
        credentials: Credentials | None = None,
        follows_image: bool = True,
        local: DeltaFeed | None = None,
    ) -> None:
        """`local`: of the only controller, in this process; its image is used as it is, without a copy."""
        self._clock = clock
        self._rng = rng
        self._budget_s = budget_s
        self._endpoints = list(endpoints)
        self._follows_image = follows_image
        self._network = network
        self._credentials = credentials
        self._commands = RpcChannel(endpoints, network, credentials)
        self._polls = RpcChannel(endpoints, network, credentials)
        self._follower: Follower = ImageFollower(self._polls, clock, rng) if local is None else LocalFollower(local)
        self._follower.subscribe(self._image_changed)
        self._heartbeat = Heartbeat(
            endpoints, lambda one: RpcChannel([one], network, credentials), clock, rng, heartbeat_interval_s
        )
        self._tasks = TaskSet("controller-client")
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._client_id = ""
        self._sequence = 0
        self._open_sequences: set[int] = set()
        self._answered = asyncio.Event()

    @property
    def image(self) -> Image:
        """The local copy of the metadata."""
        return self._follower.image

    async def start(self) -> None:
        """Connect and load the first image. Retries for ever; equal failures are logged once in a while."""
        assert not self._client_id, "started already"
        backoff = Backoff(rng=self._rng)
        limiter = LogLimiter(log, self._clock, burst=1, period_s=WAITING_LOG_S)
        while not self._client_id:
            try:
                raw = await self._commands.call("session", None, self._attempt_s())
                self._client_id = msgspec.msgpack.decode(raw, type=SessionReply).client_id
            except TidelogError as error:
                limiter.line(type(error).__name__, logging.INFO, "waiting for the controller", {"error": str(error)})
                await self._clock.sleep(backoff.next_delay_s())
        self._tasks.spawn(self._follower.run(), "follow")
        await self._follower.wait_loaded()

    async def close(self, *, leaving: bool = False) -> None:
        """Drop the connections; the controller sees this broker's session end at once.

        With `leaving` it is told that this is a stop in good order without a drain: others do not take over at once.
        """
        await self._tasks.close()
        if leaving:
            await self._heartbeat.leave()
        await self._heartbeat.close()
        await self._commands.close()
        await self._polls.close()

    def _attempt_s(self) -> float:
        return ATTEMPT_S if len(self._endpoints) == 1 else ATTEMPT_OF_MANY_S

    def _image_changed(self, delta: Delta) -> None:
        """The controllers' addresses ride in the image, and which one is active.

        Who became active is asked from then on: the one before may be paused, and would be waited for.
        """
        if not self._follows_image or not any(True for _ in delta.of("cluster")):
            return
        cluster = self.image.cluster
        if cluster is None or not cluster.controllers:
            return
        endpoints = [split_address(address) for _, address in cluster.controllers]
        if set(endpoints) != set(self._endpoints):
            log.info("the controllers are", extra={"members": [address for _, address in cluster.controllers]})
            self._endpoints = endpoints
            self._commands.set_endpoints(endpoints)
            self._polls.set_endpoints(endpoints)
            self._heartbeat.set_endpoints(endpoints)
        active = dict(cluster.controllers).get(cluster.active_node)
        if active is not None:
            self._commands.prefer(split_address(active))
            if len(self.image.brokers) <= FOLLOW_ACTIVE_BROKERS:
                self._polls.prefer(split_address(active))

    def on_fenced(self, callback: Callable[[TidelogError], None]) -> None:
        """`callback(error)` once, when a newer process has registered this broker's id: this one is to end."""
        self._heartbeat.on_fenced = callback

    def measure_load(self, measure: Callable[[], BrokerLoad]) -> None:
        """`measure()` with each heartbeat: what this broker carries."""
        self._heartbeat.measure = measure

    def tell_unsaved(self, unsaved_bytes: Callable[[], int]) -> None:
        """`unsaved_bytes()` with each heartbeat: how much of this broker's WAL is not in the bucket yet."""
        self._heartbeat.unsaved_bytes = unsaved_bytes

    @property
    def balance(self) -> HeartbeatReply | None:
        """What the active controller told last of the cluster's balance; None while none is known to be active."""
        return self._heartbeat.reply

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """`callback(delta)` on the loop after each change of the image; returns a remover."""
        return self._follower.subscribe(callback)

    async def wait_version(self, version: int) -> None:
        """Return when the image contains `version`."""
        await self._follower.wait_version(version)

    async def status(self) -> dict[str, Any]:
        """What the controller says of itself. Raises `Unavailable`."""
        raw = await self._commands.call("status", None, ATTEMPT_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def status_of(self, endpoint: Endpoint) -> dict[str, Any]:
        """What the controller at `endpoint` says of itself. Raises `Unavailable`."""
        channel = RpcChannel([endpoint], self._network, self._credentials)
        try:
            raw = await channel.call("status", None, STATUS_S)
            return msgspec.msgpack.decode(raw, type=dict[str, Any])
        finally:
            await channel.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where the controllers are."""
        return list(self._endpoints)

    # The quorum

    async def transfer_leadership(self, node_id: int | None) -> None:
        """Have the active controller hand over (None: to whichever has most). Raises `InvalidInput`, `Unavailable`."""
        await self._ask_active("transfer", TransferParams(node_id))

    async def change_quorum(self, operation: str, node_id: int, address: str) -> None:
        """`add` or `rem` a member; success if it is (or is not) one already. Raises `InvalidInput`, `Unavailable`."""
        await self._ask_active("change", ChangeParams(operation, node_id, address))

    # Balance

    async def scale(self) -> dict[str, Any]:
        """How many brokers the active controller wants, and why. Raises `Unavailable`."""
        raw = await self._ask_active("scale", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def balance_status(self) -> dict[str, Any]:
        """How the balancer stands. Raises `Unavailable`."""
        raw = await self._ask_active("balance-status", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def balance_plan(self) -> dict[str, Any]:
        """What the balancer would do now, each move explained. Raises `Unavailable`."""
        raw = await self._ask_active("balance-plan", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def balance_now(self) -> dict[str, Any]:
        """Have the balancer plan and begin; the plan. Asked while it is at it: that plan. Raises `Unavailable`."""
        raw = await self._ask_active("balance", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def _ask_active(self, method: str, params: Any, budget_s: float | None = None) -> msgspec.Raw:
        """Ask for what is success when asked twice, until it is done or the budget is spent."""
        backoff = Backoff(base_s=0.05, cap_s=1.0, rng=self._rng)
        deadline = self._clock.monotonic() + (self._budget_s if budget_s is None else budget_s)
        while True:
            try:
                return await self._commands.call(method, params, min(ATTEMPT_S, budget_s or ATTEMPT_S))
            except Unavailable:
                delay = backoff.next_delay_s()
                if self._clock.monotonic() + delay >= deadline:
                    raise
            await self._clock.sleep(delay)

    # Commands

    async def _command(self, command: c.AnyCommand, kind: type[T] | Any = None) -> T:
        """Have `command` applied once, and its effect in the local image. Raises what the controller refuses with,
        and `Unavailable` when the budget is spent (the outcome is then unknown)."""
        assert self._client_id, "the client was not started"
        async with self._slots:
            while self._open_sequences and self._sequence + 1 - min(self._open_sequences) >= MAX_WINDOW:
                self._answered.clear()
                await self._answered.wait()
            self._sequence += 1
            sequence = self._sequence
            self._open_sequences.add(sequence)
            deadline = self._clock.monotonic() + self._budget_s
            try:
                result = await self._ask(sequence, msgspec.Raw(c.encode(command)), deadline)
            finally:
                self._open_sequences.discard(sequence)
                self._answered.set()
        while result.version > self.image.version:
            try:
                async with asyncio.timeout(LAG_S):
                    await self._follower.wait_version(result.version)
            except TimeoutError:
                if self._clock.monotonic() > deadline:
                    raise Unavailable(f"the metadata did not reach version {result.version} in time") from None
                if len(self._endpoints) > 1:
                    self._polls.turn()
        if result.error is not None:
            raise from_wire(result.error)
        value: T = msgspec.msgpack.decode(result.value, type=kind)
        return value

    async def _ask(self, sequence: int, command: msgspec.Raw, deadline: float) -> c.Result:
        backoff = Backoff(base_s=0.02, cap_s=1.0 if len(self._endpoints) == 1 else 0.25, rng=self._rng)
        while True:
            params = CommandParams(self._client_id, sequence, min(self._open_sequences), command)
            try:
                left = deadline - self._clock.monotonic()
                attempt_s = max(0.1, min(left, self._attempt_s()))
                result = c.decode_result(await self._commands.call("command", params, attempt_s))
                if result.error is None or result.error.name != NotController.__name__:
                    return result
                problem: TidelogError = from_wire(result.error)
            except (Unavailable, Overloaded) as error:
                problem = error
            delay = backoff.next_delay_s()
            if self._clock.monotonic() + delay >= deadline:
                raise OutcomeUnknown(
                    f"the controller did not answer within {self._budget_s} s: {problem.message}",
                    hint="is the controller up?",
                ) from problem
            await self._clock.sleep(delay)

    # Brokers and replica sets

    async def register_broker(
        self,
        *,
        broker_id: int,
        check_code: str,
        incarnation: str,
        host: str,
        port: int,
        rack: str = "",
        admin_url: str = "",
        wal_kind: str = "",
        peer_address: str = "",
        directory: str = "",
    ) -> int:
        """Register this process; creates replica set `broker_id` if there is none; heartbeats run from here on.

        `directory` tells copies of a data directory apart. Returns the registration epoch. Raises `BrokerIdInUse`,
        `DirectoryInUse`.
        """
        texts = (rack, admin_url, wal_kind, peer_address, directory)
        epoch: int = await self._command(c.RegisterBroker(broker_id, check_code, incarnation, host, port, *texts), int)
        self._heartbeat.begin(broker_id, epoch, self._tasks)
        return epoch

    async def apply_for_id(self, check_code: str) -> int:
        """A broker id that nobody has or had; the same again for the same check code."""
        return await self._command(c.ApplyBrokerId(check_code), int)

    async def elect(self, replica_set_id: int, broker_id: int) -> ReplicaSetRecord:
        """Make the broker master with the next master epoch. Raises `NotEligible`, `NotFound`."""
        return await self._command(c.Elect(replica_set_id, broker_id), ReplicaSetRecord)

    async def allocate_producer_ids(self, broker_id: int, registration_epoch: int) -> tuple[int, int]:
        """`(first, count)` of a block of producer ids nobody else gets. Raises `StaleBrokerEpoch`."""
        return await self._command(c.AllocateProducerIds(broker_id, registration_epoch), tuple[int, int])

    # Moves

    async def move_partitions(self, moves: Sequence[c.PartitionMove]) -> list[TidelogError | None]:
        """Commit new placements (at most 1,024); what each was refused with, or None."""
        return await self._judged(c.MovePartitions(tuple(moves)))

    async def hand_over(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[c.ClosedPartition]
    ) -> list[TidelogError | None]:
        """Close the streams of partitions that move and have their targets elected; as `move_partitions`.

        Raises `Fenced` for a stale master epoch, and `OutcomeUnknown`: then `reclaim_partitions` must come before any
        reopening.
        """
        return await self._judged(c.HandOver(replica_set_id, master_epoch, tuple(partitions)))

    async def elect_partitions(self, partitions: Sequence[tuple[bytes, int]]) -> list[TidelogError | None]:
        """Elect the targets of moving partitions whose streams are closed; as `move_partitions`."""
        return await self._judged(c.ElectPartitions(tuple(partitions)))

    async def reclaim_partitions(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[tuple[bytes, int]]
    ) -> list[TidelogError | None]:
        """Go on with partitions under a new leader epoch; as `move_partitions`. Raises `Fenced`."""
        return await self._judged(c.ReclaimPartitions(replica_set_id, master_epoch, tuple(partitions)))

    async def drain_broker(self, broker_id: int, mode: DrainMode, registration_epoch: int = -1) -> None:
        """Have a broker give its partitions away, or (`NONE`) stop that; see `controller.commands.DrainBroker`.

        Raises `NotFound`, `NoPlaceToDrain`, `StaleBrokerEpoch`.
        """
        await self._command(c.DrainBroker(broker_id, mode, registration_epoch))

    async def remove_broker(self, broker_id: int) -> None:
        """Forget a broker. Raises `NotFound`, `BrokerNotDrained`."""
        await self._command(c.RemoveBroker(broker_id))

    async def _judged(self, command: c.AnyCommand) -> list[TidelogError | None]:
        found: list[ErrorInfo | None] = await self._command(command, list[ErrorInfo | None])
        return [None if info is None else from_wire(info) for info in found]

    # Failover

    async def salvage(self, replica_set_id: int, broker_id: int, master_epoch: int) -> ReplicaSetRecord:
        """Have a broker salvage the replica set of a dead master. Raises `NotFound`, `Fenced`, `NotEligible`."""
        return await self._command(c.Salvage(replica_set_id, broker_id, master_epoch), ReplicaSetRecord)

    async def abandon(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[tuple[bytes, int]], *, force: bool = False
    ) -> tuple[int, int]:
        """Give partitions (at most 1,024) of a dead broker new owners without what its WAL alone has.

        Returns how many it still has, and the replica set's next master epoch. Raises `NotFound`, `Fenced`,
        `NotEligible`, `InvalidReplicationFactor` (no living broker to place them on).
        """
        command = c.Abandon(replica_set_id, master_epoch, tuple(partitions), force)
        return await self._command(command, tuple[int, int])

    async def place_salvaged(
        self, replica_set_id: int, master_epoch: int, wal_offset: int, partitions: Sequence[tuple[bytes, int]]
    ) -> int:
        """Give salvaged partitions (at most 1,024) new owners; how many the replica set still has.

        Raises `Fenced`, `NotHandedOver`, `InvalidReplicationFactor`.
        """
        command = c.PlaceSalvaged(replica_set_id, master_epoch, wal_offset, tuple(partitions))
        left: int = await self._command(command, int)
        return left

    # Topics and configs

    async def create_topic(
        self,
        name: str,
        partitions: int,
        configs: dict[str, str],
        *,
        internal: bool = False,
        validate_only: bool = False,
        assignment: list[int] | None = None,
    ) -> TopicRecord:
        """Create a topic of 1–10,000 partitions; `assignment` names the replica set of each.

        Raises `TopicExists`, `InvalidTopic`, `InvalidPartitions`, `InvalidReplicaAssignment`,
        `InvalidReplicationFactor` (no live broker).
        """
        placed = tuple(assignment) if assignment is not None else None
        while True:
            topic_id = self._rng.randbytes(16)
            try:
                return await self._command(
                    c.CreateTopic(topic_id, name, partitions, configs, internal, validate_only, placed), TopicRecord
                )
            except TopicIdTaken:
                continue

    async def delete_topic(self, topic_id: bytes) -> None:
        """Delete a topic, its partitions and streams. Raises `UnknownTopicId`."""
        await self._command(c.DeleteTopic(topic_id))

    async def create_partitions(
        self, topic_id: bytes, total: int, *, assignment: list[int] | None = None, validate_only: bool = False
    ) -> TopicRecord:
        """Grow a topic to `total` partitions. Raises `UnknownTopicId`, `InvalidPartitions`, the placement errors."""
        placed = tuple(assignment) if assignment is not None else None
        return await self._command(c.CreatePartitions(topic_id, total, placed, validate_only), TopicRecord)

    async def alter_topic_configs(self, topic_id: bytes, changes: dict[str, str | None]) -> None:
        """Set (or with None remove) overrides of a topic. Raises `UnknownTopicId`, `InvalidInput`."""
        await self._command(c.AlterTopicConfigs(topic_id, changes))

    async def alter_configs(self, kind: str, name: str, changes: dict[str, str | None]) -> None:
        """Set (or with None remove) overrides of kind `broker` or `cluster`. Raises `InvalidInput`."""
        await self._command(c.AlterConfigs(kind, name, changes))

    # Keys

    async def put_kv(self, key: str, value: bytes) -> None:
        """Write a key (1–256 characters, ≤ 64 KiB). Raises `InvalidInput`."""
        await self._command(c.PutKv(key, value))

    async def get_kv(self, key: str) -> bytes | None:
        """A key's value, from the local image."""
        return self.image.kv.get(key)

    async def delete_kv(self, key: str) -> None:
        """Remove a key; an absent one is success."""
        await self._command(c.DeleteKv(key))

    # stream.managers.StreamManager

    async def open_streams(
        self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        """See `stream.managers.StreamManager.open_streams`."""
        return await self._command(c.OpenStreams(replica_set_id, master_epoch, tuple(streams)), list[OpenedStream])

    async def close_streams(self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]) -> None:
        """See `stream.managers.StreamManager.close_streams`."""
        await self._command(c.CloseStreams(replica_set_id, master_epoch, tuple(streams)))

    async def trim_stream(self, stream_id: int, epoch: int, start_offset: int) -> None:
        """See `stream.managers.StreamManager.trim_stream`."""
        await self._command(c.TrimStream(stream_id, epoch, start_offset))

    async def release_stream(self, stream_id: int) -> None:
        """Lift a stream's quarantine (an operator's decision). Raises `NotFound`."""
        await self._command(c.ReleaseStream(stream_id))

    # storage.managers.ObjectManager

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        """See `storage.managers.ObjectManager.quarantine_stream`."""
        await self._command(c.QuarantineStream(replica_set_id, master_epoch, stream_id, reason))

    def quarantined(self, stream_id: int) -> str:
        """See `storage.managers.ObjectManager.quarantined`."""
        record = self.image.streams.get(stream_id)
        return record.quarantined if record is not None else ""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        """See `storage.managers.ObjectManager.prepare_objects`."""
        first: int = await self._command(c.PrepareObjects(count, ttl_ms), int)
        return first

    async def commit_objects(self, commit: CommitObjects) -> None:
        """See `storage.managers.ObjectManager.commit_objects`."""
        await self._command(c.Commit(commit))

    async def compact_objects(self, compaction: CompactObjects) -> None:
        """Replace committed objects by compacted ones. Returns when the local image names the new ones.

        Raises `CompactionRefused`, `CommitRefused` (a stale master epoch), and `Unavailable` (outcome unknown: ask
        again with the same compaction).
        """
        await self._command(c.Compact(compaction))

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        """See `storage.managers.ObjectManager.find_objects`."""
        return self.image.find_objects(stream_id, start_offset, end_offset, limit)

    def committed_wal_offset(self, replica_set_id: int) -> int:
        """See `storage.managers.ObjectManager.committed_wal_offset`; 0 for an unknown replica set."""
        record = self.image.replica_sets.get(replica_set_id)
        return record.committed_wal_offset if record is not None else 0
