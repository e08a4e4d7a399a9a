"""`ControllerClient`: client of the controllers, for brokers, tools and Spark.

It implements `tidelog.storage.managers.ObjectManager` and `tidelog.stream.managers.StreamManager`. Reads come from the
local image. A mutating call is one command with its own dedupe id. It is retried (with the same id) after a time-out or
a lost connection until the budget is used up, so it takes effect at most once, and returns when the local image
contains its effect. A refusal of the controller is raised here as the same class of error.

Commands, polls and heartbeats use separate connections: a slow command never delays a broker's heartbeats. Commands
find the active controller among several; the image reports changes of their addresses. A request that a hung controller
leaves unanswered is sent to another one, with the same dedupe id.
Entry: `ControllerClient`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tidelog.controller.client.heartbeat import Heartbeat
from tidelog.controller.client.leases import LeaseClient
from tidelog.controller.client.replica_sets import ReplicaSetClient
from tidelog.controller.client.snapshots import SnapshotClient
from tidelog.controller.image.feed import DeltaFeed
from tidelog.controller.image.follower import (
    RETRY_BASE_S,
    RETRY_CAP_S,
    Callback,
    Follower,
    ImageFollower,
    LocalFollower,
)
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.configs import ANY
from tidelog.controller.model.errors import ErrorInfo, NotController, OutcomeUnknown, TopicIdTaken, from_wire
from tidelog.controller.model.levels import SUPPORTED, UnsupportedLevel, level_key, told_range
from tidelog.controller.model.load import BrokerLoad, HeartbeatReply
from tidelog.controller.model.records import DrainMode, ObjectState, ReplicaSetRecord, TopicRecord
from tidelog.controller.model.wal_notes import WalNote
from tidelog.controller.rpc.connection import (
    ChangeParams,
    CommandParams,
    Endpoint,
    RpcChannel,
    SessionReply,
    TransferParams,
    UnknownObjectsParams,
    UpgradeParams,
)
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, Overloaded, TidelogError, Unavailable
from tidelog.runtime.health import OperationHealth
from tidelog.runtime.log_limit import LogLimiter
from tidelog.runtime.network import Network
from tidelog.runtime.tasks import TaskSet
from tidelog.storage.commits import CommitObjects, CommitRefused, CompactObjects, NotPrepared, ObjectSlice
from tidelog.stream.opened import OpenedStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_IN_FLIGHT = 64
MAX_WINDOW = 100
"""A command waits while a command with a sequence number this much lower has no result. The controller keeps 128
results of a client, and a retried command must not have been evicted by later ones."""
ATTEMPT_S = 10.0
ATTEMPT_OF_MANY_S = 3.0
"""Time-out of one attempt with several controllers: shorter, because another one can be tried."""
BEFORE_UPGRADES = "there is no method 'upgrade'"
"""What controllers before feature levels answer."""
STATUS_S = 2.0
CHECKUP_S = 60.0
"""Time-out of a checkup, whose parts have their own."""
SHORT_BUDGET_S = 5.0
"""Budget of requests for which a person or a script waits: longer than an election."""
WAITING_LOG_S = 10.0
"""Minimum interval between log lines for the same kind of failure."""
FOLLOW_ACTIVE_BROKERS = 10
"""Number of brokers that follow the active controller, which learns first what is committed. Other controllers learn it
with its next message, some milliseconds later, and each command waits for its own effect. Further brokers are spread
over all controllers."""
LAG_S = 1.0
"""If the followed controller does not show a result within this time, the client follows another one."""


@dataclass(frozen=True, slots=True)
class ClientTiming:
    """How long a client tries, and how often it is heard of."""

    budget_s: float = 30.0
    """A command that no controller has answered for so long is `OutcomeUnknown`."""
    heartbeat_interval_s: float = 1.0


DEFAULT_TIMING = ClientTiming()


class ControllerClient:
    """Client of the controllers; see the module docstring. Use it on the event loop's thread only."""

    def __init__(
        self,
        endpoints: list[tuple[str, int]],
        network: Network,
        clock: Clock,
        rng: random.Random,
        *,
        timing: ClientTiming = DEFAULT_TIMING,
        credentials: Credentials | None = None,
        follows_image: bool = True,
        local: DeltaFeed | None = None,
    ) -> None:
        """`local`: the feed of the only controller, in this process; its image is used without a copy."""
        self._clock = clock
        self._rng = rng
        self._budget_s = timing.budget_s
        self._endpoints = list(endpoints)
        self._follows_image = follows_image
        self._network = network
        self._credentials = credentials
        self._commands = RpcChannel(
            endpoints, network, credentials, follows=follows_image, cluster_id=self._own_cluster
        )
        self._polls = RpcChannel(endpoints, network, credentials, follows=follows_image, cluster_id=self._own_cluster)
        self._follower: Follower = ImageFollower(self._polls, clock, rng) if local is None else LocalFollower(local)
        self._follower.subscribe(self._image_changed)
        self._heartbeat = Heartbeat(
            endpoints,
            lambda one: RpcChannel([one], network, credentials, cluster_id=self._own_cluster),
            clock,
            rng,
            timing.heartbeat_interval_s,
        )
        self._heartbeat.version = lambda: self.image.version
        self._heartbeat.on_behind = self._follow_another
        self._tasks = TaskSet("controller-client")
        self._slots = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._client_id = ""
        self._sequence = 0
        self._open_sequences: set[int] = set()
        self._answered = asyncio.Event()
        self.health = OperationHealth("controller command")
        self.replica_sets = ReplicaSetClient(self._command)
        """Requests about replica sets of several members."""
        self.leases = LeaseClient(self._command)
        """Requests about leases of readers outside the cluster."""
        self.snapshots = SnapshotClient(self._command, rng)
        """Requests about snapshots and branches of topics."""

    @property
    def image(self) -> Image:
        """Return the local copy of the metadata."""
        return self._follower.image

    def _own_cluster(self) -> str:
        """Return the cluster that is asked; empty until the first image is there."""
        return self.image.cluster_id

    async def start(self) -> None:
        """Connect and load the first image. Retries indefinitely; repeated failures are logged at a bounded rate."""
        assert not self._client_id, "started already"
        backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
        limiter = LogLimiter(logger, self._clock, burst=1, period_s=WAITING_LOG_S)
        while not self._client_id:
            try:
                raw = await self._commands.call("session", None, self._attempt_s())
                self._client_id = msgspec.msgpack.decode(raw, type=SessionReply).client_id
            except TidelogError as error:
                limiter.line(type(error).__name__, logging.INFO, "waiting for the controller", {"error": str(error)})
                await self._clock.sleep(backoff.next_delay_s())
        self._tasks.keep(self._follower.run, "follow")
        await self._follower.wait_loaded()

    async def close(self, *, leaving: bool = False) -> None:
        """Drop the connections, which ends this broker's session at once.

        With `leaving` the controllers are informed of a clean stop without a drain, so that takeovers are delayed.
        """
        await self._tasks.close()
        if leaving:
            await self._heartbeat.leave()
        await self._heartbeat.close()
        await self._commands.close()
        await self._polls.close()

    def _attempt_s(self) -> float:
        return ATTEMPT_S if len(self._endpoints) == 1 else ATTEMPT_OF_MANY_S

    def _follow_another(self) -> None:
        """The followed controller is silent, or is cut off from the active one: ask the next one, or anew."""
        if self._follower.is_loading:
            return
        at = {"version": self.image.version}
        logger.info("the metadata stay behind the active controller's; following another one", extra=at)
        self._polls.turn()

    def _image_changed(self, delta: Delta) -> None:
        """Take the controllers' addresses, and which one is active, from the image.

        Requests go to a new active controller at once: the previous one may be paused, and would have to time out
        first.
        """
        if not self._follows_image or not any(True for _ in delta.of("cluster")):
            return
        cluster = self.image.cluster
        if cluster is None or not cluster.controllers:
            return
        endpoints = [split_address(address) for _, address in cluster.controllers]
        if set(endpoints) != set(self._endpoints):
            logger.info(
                "list of controllers changed", extra={"members": [address for _, address in cluster.controllers]}
            )
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
        """Call `callback(error)` once when a newer process has registered this broker's id: this process must end."""
        self._heartbeat.on_fenced = callback

    def measure_load(self, measure: Callable[[], BrokerLoad]) -> None:
        """Call `measure()` for each heartbeat and send this broker's load with it."""
        self._heartbeat.measure = measure

    def report_not_uploaded(self, not_uploaded_bytes: Callable[[], int]) -> None:
        """Call `not_uploaded_bytes()` for each heartbeat: the bytes of this broker's WAL that are not uploaded."""
        self._heartbeat.not_uploaded_bytes = not_uploaded_bytes

    def on_hand_overs(self, callback: Callable[[tuple[int, ...]], None]) -> None:
        """Call `callback(replica_sets)` at each answer to a heartbeat: those led here that others will lead soon."""
        self._heartbeat.on_hand_overs = callback

    @property
    def balance(self) -> HeartbeatReply | None:
        """Return the active controller's last reply on the balance; None while none is known to be active."""
        return self._heartbeat.reply

    @property
    def told_version(self) -> int:
        """Return the newest metadata version that an active controller has told this broker; 0: none has."""
        return self._heartbeat.told_version

    def problems(self) -> list[str]:
        """Return what is wrong with the controllers as this process hears them, one sentence each."""
        return self._heartbeat.problems()

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback(delta)` on the loop after each change of the image. Returns a remover."""
        return self._follower.subscribe(callback)

    async def wait_version(self, version: int) -> None:
        """Return when the image contains `version`."""
        await self._follower.wait_version(version)

    async def status(self) -> dict[str, Any]:
        """Return the status of the controller. Raises `Unavailable`."""
        raw = await self._commands.call("status", None, ATTEMPT_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def status_of(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return the status of the controller at `endpoint`. Raises `Unavailable`."""
        channel = RpcChannel([endpoint], self._network, self._credentials)
        try:
            raw = await channel.call("status", None, STATUS_S)
            return msgspec.msgpack.decode(raw, type=dict[str, Any])
        finally:
            await channel.close()

    async def checkup_of(self, endpoint: Endpoint, question: str) -> dict[str, Any]:
        """Have the controller at `endpoint` answer a question of `tidelog.controller.checkup`.

        Raises `InvalidInput` if it is of a version that knows none, `Unavailable`.
        """
        channel = RpcChannel([endpoint], self._network, self._credentials)
        try:
            raw = await channel.call(question, None, CHECKUP_S)
            return msgspec.msgpack.decode(raw, type=dict[str, Any])
        finally:
            await channel.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Return the addresses of the controllers."""
        return list(self._endpoints)

    # The quorum

    async def transfer_leadership(self, node_id: int | None) -> None:
        """Transfer the leadership (None: to the most current member). Raises `InvalidInput`, `Unavailable`."""
        await self._ask_active("transfer", TransferParams(node_id))

    async def change_quorum(self, operation: str, node_id: int, address: str) -> bool:
        """`add` or `rem` a member; succeeds if nothing is to be changed. Raises `InvalidInput`, `Unavailable`.

        Returns false if there is no member to remove, perhaps after an attempt whose answer was lost.
        """
        raw = await self._ask_active("change", ChangeParams(operation, node_id, address))
        return msgspec.msgpack.decode(raw) is not False  # an older active controller does not tell it

    async def upgrade(self, level: int = -1, *, dry_run: bool) -> dict[str, Any]:
        """Raise the feature level (-1: to the highest that all members support); return what was found and done.

        The local image then has the level. Raises `UnsupportedLevel` naming the members that do not support it, and
        `Unavailable`.
        """
        deadline = self._clock.monotonic() + self._budget_s
        budget_s = None if not dry_run else SHORT_BUDGET_S
        try:
            raw = await self._ask_active("upgrade", UpgradeParams(level, dry_run), budget_s)
        except InvalidInput as error:
            if error.message != BEFORE_UPGRADES:
                raise
            raise UnsupportedLevel(
                "the active controller runs a version before feature levels; the cluster is at level 0",
                hint="upgrade every process, the active controller last (`tidelog controller status`)",
            ) from error
        report = msgspec.msgpack.decode(raw, type=dict[str, Any])
        version = report.pop("version", 0)  # an older active controller does not tell it
        if not dry_run:
            await self._reach(version, deadline)
        return report

    # Balance

    async def scale(self) -> dict[str, Any]:
        """Return how many brokers the active controller wants, and why. Raises `Unavailable`."""
        raw = await self._ask_active("scale", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def balance_status(self) -> dict[str, Any]:
        """Return the state of the balancer. Raises `Unavailable`."""
        raw = await self._ask_active("balance-status", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def balance_plan(self) -> dict[str, Any]:
        """Return the plan that the balancer would execute now, with reasons. Raises `Unavailable`."""
        raw = await self._ask_active("balance-plan", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def balance_now(self) -> dict[str, Any]:
        """Start a plan of the balancer and return it, or the one in execution. Raises `Unavailable`."""
        raw = await self._ask_active("balance", None, SHORT_BUDGET_S)
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def _ask_active(self, method: str, params: Any, budget_s: float | None = None) -> msgspec.Raw:
        """Send an idempotent request to the active controller until it succeeds or the budget is used up."""
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

    async def _command(
        self,
        command: c.AnyCommand,
        kind: type[T] | Any = None,
        *,
        budget_s: float | None = None,
        after_all: bool = False,
    ) -> T:
        """Have `command` applied once, and return when its effect is in the local image.

        Raises the error of a refusal, and `OutcomeUnknown` when the budget (seconds; None: the configured one) is used
        up. `after_all`: it is sent when no earlier command of this client is being sent any
        more. Once it has been applied, or refused by the state machine, none of these can take effect that has not: a
        late copy of one is below the number that this one carries as `done`, and refused as `StaleCommand`.
        """
        assert self._client_id, "the client was not started"
        async with self._slots:
            await self._wait_turn(after_all=after_all)
            self._sequence += 1
            sequence = self._sequence
            self._open_sequences.add(sequence)
            budget_s = self._budget_s if budget_s is None else budget_s
            deadline = self._clock.monotonic() + budget_s
            token = self.health.begin(self._clock.monotonic())
            try:
                result = await self._ask(sequence, msgspec.Raw(c.encode(command)), deadline, budget_s)
                self.health.succeeded(self._clock.monotonic(), token)
            except TidelogError as error:
                self.health.failed(self._clock.monotonic(), error, token)
                raise
            finally:
                self.health.dropped(token)
                self._open_sequences.discard(sequence)
                self._answered.set()
        await self._reach(result.version, deadline)
        if result.error is not None:
            raise from_wire(result.error)
        value: T = msgspec.msgpack.decode(result.value, type=kind)
        return value

    async def _reach(self, version: int, deadline: float) -> None:
        """Return when the local image contains `version`. Raises `OutcomeUnknown` after the deadline (monotonic s)."""
        while version > self.image.version:
            try:
                async with asyncio.timeout(LAG_S):
                    await self._follower.wait_version(version)
            except TimeoutError:
                if self._clock.monotonic() > deadline:
                    raise OutcomeUnknown(
                        f"the controllers have answered, but the metadata here did not reach version {version} in time"
                    ) from None
                if len(self._endpoints) > 1:
                    self._polls.turn()

    async def _wait_turn(self, *, after_all: bool) -> None:
        """Wait until the window has room, and (`after_all`) until all commands that were sent before have ended."""
        first = self._sequence + 1 if after_all else 0
        while self._open_sequences and min(self._open_sequences) < max(first, self._sequence + 2 - MAX_WINDOW):
            self._answered.clear()
            await self._answered.wait()

    async def _ask(self, sequence: int, command: msgspec.Raw, deadline: float, budget_s: float) -> c.Result:
        backoff = Backoff(base_s=0.02, cap_s=1.0 if len(self._endpoints) == 1 else 0.25, rng=self._rng)
        while True:
            params = CommandParams(self._client_id, sequence, min(self._open_sequences), command, self.image.version)
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
            if self._clock.monotonic() + delay < deadline:
                await self._clock.sleep(delay)
                if self._clock.monotonic() < deadline:  # else this process was stopped, and its results are forgotten
                    continue
            raise OutcomeUnknown(
                f"the controller did not answer within {budget_s} s: {problem.message}",
                hint="check that the controller is running",
            ) from problem

    # Brokers and replica sets

    async def register_broker(self, registration: c.RegisterBroker) -> int:
        """Register this process and start heartbeats. Creates replica set `broker_id` if it is absent.

        Returns the registration epoch. Raises `BrokerIdInUse`, `DirectoryInUse`, `UnsupportedLevel`,
        `WalNotCommitted`.
        """
        told = msgspec.structs.replace(registration, oldest_level=SUPPORTED.oldest, newest_level=SUPPORTED.newest)
        epoch: int = await self._command(told, int)
        self._heartbeat.begin(registration.broker_id, epoch, self._tasks)
        await self._tell_levels(registration.broker_id, epoch)
        return epoch

    async def _tell_levels(self, broker_id: int, registration_epoch: int) -> None:
        """At level 0 members of before drop the range of a registration, and keep a key."""
        key, value = level_key(broker_id), told_range(registration_epoch, SUPPORTED)
        if self.image.kv.get(key) != value:
            await self.put_kv(key, value)

    async def apply_for_id(self, check_code: str) -> int:
        """Return a broker id that was never allocated before; the same again for the same check code."""
        return await self._command(c.ApplyBrokerId(check_code), int)

    async def elect(self, replica_set_id: int, broker_id: int) -> ReplicaSetRecord:
        """Make the broker master with the next master epoch. Raises `NotEligible`, `NotFound`."""
        return await self._command(c.Elect(replica_set_id, broker_id), ReplicaSetRecord)

    async def allocate_producer_ids(self, broker_id: int, registration_epoch: int) -> tuple[int, int]:
        """Return `(first, count)` of a new block of producer ids. Raises `StaleBrokerEpoch`."""
        return await self._command(c.AllocateProducerIds(broker_id, registration_epoch), tuple[int, int])

    # Moves

    async def move_partitions(self, moves: Sequence[c.PartitionMove]) -> list[TidelogError | None]:
        """Commit new placements (at most 1,024). Returns the refusal of each, or None."""
        return await self._judged(c.MovePartitions(tuple(moves)))

    async def hand_over(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[c.ClosedPartition]
    ) -> list[TidelogError | None]:
        """Close the streams of moving partitions and elect their targets; results as for `move_partitions`.

        Raises `Fenced` for a stale master epoch, and `OutcomeUnknown`: then `reclaim_partitions` must precede any
        reopening.
        """
        return await self._judged(c.HandOver(replica_set_id, master_epoch, tuple(partitions)))

    async def elect_partitions(self, partitions: Sequence[tuple[bytes, int]]) -> list[TidelogError | None]:
        """Elect the targets of moving partitions whose streams are closed; results as for `move_partitions`."""
        return await self._judged(c.ElectPartitions(tuple(partitions)))

    async def reclaim_partitions(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[tuple[bytes, int]]
    ) -> list[TidelogError | None]:
        """Continue with partitions under a new leader epoch; results as for `move_partitions`. Raises `Fenced`."""
        return await self._judged(c.ReclaimPartitions(replica_set_id, master_epoch, tuple(partitions)))

    async def drain_broker(self, broker_id: int, mode: DrainMode, registration_epoch: int = -1) -> None:
        """Start a drain or (`NONE`) end it; see `tidelog.controller.model.commands.DrainBroker`.

        Raises `NotFound`, `NoPlaceToDrain`, `StaleBrokerEpoch`.
        """
        await self._command(c.DrainBroker(broker_id, mode, registration_epoch))

    async def begin_restart(self, broker_id: int, registration_epoch: int) -> None:
        """Begin the drain of a broker whose process ends, to be started again.

        Raises `RestartRefused`, `NotFound`, `StaleBrokerEpoch`.
        """
        await self._command(c.BeginRestart(broker_id, registration_epoch))

    async def remove_broker(self, broker_id: int) -> None:
        """Remove a broker. Raises `NotFound`, `BrokerNotDrained`."""
        await self._command(c.RemoveBroker(broker_id))

    async def _judged(self, command: c.AnyCommand) -> list[TidelogError | None]:
        found: list[ErrorInfo | None] = await self._command(command, list[ErrorInfo | None])
        return [None if info is None else from_wire(info) for info in found]

    # Failover

    async def takeover(self, replica_set_id: int, broker_id: int, master_epoch: int) -> ReplicaSetRecord:
        """Appoint the successor of a dead master. Raises `NotFound`, `Fenced`, `NotEligible`."""
        return await self._command(c.ElectSuccessor(replica_set_id, broker_id, master_epoch), ReplicaSetRecord)

    async def abandon(
        self, replica_set_id: int, master_epoch: int, partitions: Sequence[tuple[bytes, int]], *, force: bool = False
    ) -> tuple[int, int]:
        """Place partitions (at most 1,024) of a dead broker without the records that only its WAL has.

        Returns how many it still has, and the replica set's next master epoch. Raises `NotFound`, `Fenced`,
        `NotEligible`, `InvalidReplicationFactor` (no live broker to place them on).
        """
        command = c.Abandon(replica_set_id, master_epoch, tuple(partitions), force)
        return await self._command(command, tuple[int, int])

    async def note_wal(self, replica_set_id: int, note: WalNote) -> None:
        """Note what the master knows of its WAL. Raises `Fenced`, `NotFound`, `OutcomeUnknown`."""
        await self._command(c.NoteWal(replica_set_id, note))

    async def accept_wal_loss(self, replica_set_id: int, master_epoch: int, lost_epoch: int) -> None:
        """Give up what only a lost WAL had, and record it. Raises `Fenced`, `NotFound`, `InvalidInput`."""
        await self._command(c.AcceptWalLoss(replica_set_id, master_epoch, lost_epoch))

    async def place_taken_over(
        self, replica_set_id: int, master_epoch: int, wal_offset: int, partitions: Sequence[tuple[bytes, int]]
    ) -> int:
        """Place partitions that were taken over (at most 1,024). Returns how many the replica set still has.

        Raises `Fenced`, `NotHandedOver`, `InvalidReplicationFactor`.
        """
        command = c.PlaceTakenOver(replica_set_id, master_epoch, wal_offset, tuple(partitions))
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
        replicas: int = 0,
    ) -> TopicRecord:
        """Create a topic of 1–10,000 partitions; `assignment` names the replica set of each.

        Without one they are placed on sets that have, or get, as many `replicas`; 0: any number. Raises `TopicExists`,
        `InvalidTopic`, `InvalidPartitions`, `InvalidReplicaAssignment`, `InvalidReplicationFactor` (no live broker, or
        no set of so many).
        """
        placed = tuple(assignment) if assignment is not None else None
        while True:
            topic_id = self._rng.randbytes(16)
            try:
                command = c.CreateTopic(
                    topic_id, name, partitions, configs, internal, validate_only, placed, replicas=replicas
                )
                return await self._command(c.at_level(command, self.feature_level), TopicRecord)
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

    async def alter_topic_configs(self, topic_id: bytes, changes: dict[str, str | None], *, base: bytes = ANY) -> None:
        """Set (or with None remove) overrides of a topic.

        `base`: the digest of those that the changes were computed from, checked from feature level 6 on. Raises
        `UnknownTopicId`, `ConfigsChanged` with other overrides there, which the local image then has, `InvalidInput`.
        """
        await self._command(c.AlterTopicConfigs(topic_id, changes, base))

    async def alter_configs(self, kind: str, name: str, changes: dict[str, str | None], *, base: bytes = ANY) -> None:
        """Set (or with None remove) overrides of kind `broker` or `cluster`. `base` and raises: as the method above."""
        await self._command(c.AlterConfigs(kind, name, changes, base))

    # Keys

    async def put_kv(self, key: str, value: bytes) -> None:
        """Write a key (1–256 characters, ≤ 64 KiB). Raises `InvalidInput`."""
        await self._command(c.PutKv(key, value))

    async def get_kv(self, key: str) -> bytes | None:
        """Return a key's value from the local image."""
        return self.image.kv.get(key)

    async def delete_kv(self, key: str) -> None:
        """Remove a key; succeeds if it is absent."""
        await self._command(c.DeleteKv(key))

    # tidelog.stream.managers.StreamManager

    @property
    def feature_level(self) -> int:
        """See `tidelog.stream.managers.StreamManager.feature_level`; 0 as long as it is not known."""
        cluster = self.image.cluster
        return cluster.level if cluster is not None else 0

    async def open_streams(
        self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]
    ) -> list[OpenedStream]:
        """See `tidelog.stream.managers.StreamManager.open_streams`."""
        return await self._command(c.OpenStreams(replica_set_id, master_epoch, tuple(streams)), list[OpenedStream])

    async def close_streams(self, replica_set_id: int, master_epoch: int, streams: Sequence[tuple[int, int]]) -> None:
        """See `tidelog.stream.managers.StreamManager.close_streams`."""
        await self._command(c.CloseStreams(replica_set_id, master_epoch, tuple(streams)))

    async def trim_stream(
        self, replica_set_id: int, master_epoch: int, stream_id: int, epoch: int, start_offset: int
    ) -> None:
        """See `tidelog.stream.managers.StreamManager.trim_stream`."""
        await self._command(c.TrimStream(stream_id, epoch, start_offset, replica_set_id, master_epoch))

    async def release_stream(self, stream_id: int) -> None:
        """Release a quarantined stream, on an operator's request. Raises `NotFound`."""
        await self._command(c.ReleaseStream(stream_id))

    # tidelog.storage.managers.ObjectManager

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        """See `tidelog.storage.managers.ObjectManager.quarantine_stream`."""
        await self._command(c.QuarantineStream(replica_set_id, master_epoch, stream_id, reason))

    def quarantined(self, stream_id: int) -> str:
        """See `tidelog.storage.managers.ObjectManager.quarantined`."""
        record = self.image.streams.get(stream_id)
        return record.quarantined if record is not None else ""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        """See `tidelog.storage.managers.ObjectManager.prepare_objects`."""
        first: int = await self._command(c.PrepareObjects(count, ttl_ms), int)
        return first

    async def unknown_objects(self, object_ids: Sequence[int]) -> list[int]:
        """Return those of the ids that the active controller does not know in any state.

        Its metadata is at least as new as the local image. Raises `Unavailable`.
        """
        params = UnknownObjectsParams(self.image.version, tuple(object_ids))
        raw = await self._ask_active("unknown-objects", params)
        return msgspec.msgpack.decode(raw, type=list[int])

    async def commit_objects(self, commit: CommitObjects) -> None:
        """See `tidelog.storage.managers.ObjectManager.commit_objects`."""
        try:
            await self._command(c.Commit(commit))
        except CommitRefused as error:
            if self.feature_level == 0 and self._has_expired(commit):
                raise NotPrepared(error.message, hint=error.hint) from error
            raise

    def _has_expired(self, commit: CommitObjects) -> bool:
        """Whether an object of a refused commit is not prepared: at level 0 that is no error of its own."""
        replica_set = self.image.replica_sets.get(commit.replica_set_id)
        if replica_set is None or replica_set.master_epoch != commit.master_epoch:
            return False
        rows = (self.image.objects.get(new.object_id) for new in commit.objects)
        return any(row is None or row.state != ObjectState.PREPARED for row in rows)

    async def compact_objects(self, compaction: CompactObjects) -> None:
        """Replace committed objects by compacted ones. Returns when the local image names the new ones.

        Raises `CompactionRefused`, `CommitRefused` (a stale master epoch), and `Unavailable` (outcome unknown: retry
        with the same compaction).
        """
        await self._command(c.Compact(compaction))

    def check_current(self) -> None:
        """See `tidelog.storage.managers.ObjectManager.check_current`."""
        old_s = self._clock.monotonic() - self._heartbeat.readable_until_s
        if old_s > 0:
            raise Unavailable(
                f"this broker may not read from the bucket since {old_s:.1f} s: no active controller has answered its"
                " heartbeats, and objects that its metadata names may be deleted",
                hint="reads go on by themselves when a controller answers; see `tidelog controller status`",
            )

    async def catch_up(self) -> None:
        """See `tidelog.storage.managers.ObjectManager.catch_up`. It takes `SHORT_BUDGET_S` at most."""
        await self._command(c.Barrier(), budget_s=SHORT_BUDGET_S)

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        """See `tidelog.storage.managers.ObjectManager.find_objects`."""
        return self.image.find_objects(stream_id, start_offset, end_offset, limit)

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """See `tidelog.storage.managers.ObjectManager.resolve`."""
        return self.image.resolve(stream_id, start_offset, end_offset)

    def is_held(self, object_id: int) -> bool:
        """See `Image.is_held`."""
        return self.image.is_held(object_id)

    def committed_wal_offset(self, replica_set_id: int) -> int:
        """See `tidelog.storage.managers.ObjectManager.committed_wal_offset`; 0 for an unknown replica set."""
        record = self.image.replica_sets.get(replica_set_id)
        return record.committed_wal_offset if record is not None else 0
