"""The group coordinator: the interface for the handlers of all group APIs.

It finds the offsets partition of a group, passes the request to the group or its offsets, and returns the response; the
partitions themselves are in `tidelog.broker.groups.shards`. Acknowledged changes are durable. A request for a partition
that this broker does not serve raises `NotCoordinator`, `CoordinatorLoading` or `CoordinatorNotAvailable`; clients may
retry all three.

Entry: `GroupCoordinator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.coordinators.errors import (
    CoordinatorLoading,
    CoordinatorNotAvailable,
    NotCoordinator,
    WriteError,
)
from tidelog.broker.coordinators.shards import ShardPhase
from tidelog.broker.coordinators.store import TxnProducer
from tidelog.broker.coordinators.topic import OFFSETS_CONFIGS, OFFSETS_TOPIC, CoordinatorTopic
from tidelog.broker.coordinators.writer import OfTransaction, TxnMarker, Write
from tidelog.broker.groups.errors import CommitTooLarge, GroupError, InvalidGroupId, InvalidGroupRequest
from tidelog.broker.groups.members import MEMBER_BYTES, MemberIdentity, protocols_bytes
from tidelog.broker.groups.messages import JoinRequest, JoinResult, SyncRequest, SyncResult, TxnCommitRequest
from tidelog.broker.groups.records import (
    MAX_STRING_BYTES,
    MemberValue,
    OffsetKey,
    OffsetValue,
    encode_offset_key,
    encode_offset_value,
)
from tidelog.broker.groups.shards import GroupShard, GroupShards
from tidelog.broker.groups.state import ClassicGroup, GroupState
from tidelog.broker.groups.store import Removal
from tidelog.broker.settings import GroupSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import Closed
from tidelog.stream.errors import InvalidProducerEpoch

if TYPE_CHECKING:
    from tidelog.broker.partitions.manager import PartitionManager
    from tidelog.controller.client.client import ControllerClient
    from tidelog.controller.model.records import BrokerRecord
    from tidelog.stream.partition_log import PartitionLog
    from tidelog.stream.producer_state import VerificationGuard

MAX_ID_BYTES = MAX_STRING_BYTES - 64
"""Maximum size of ids that clients choose; a member id is such an id and a UUID, and must fit in a record."""
MAX_PROTOCOLS = 100
"""Bound of the protocols of a member; clients have one for each of their assignors."""
MAX_KEYS_BYTES = 32 << 20
"""Bound of the keys of a commit's records: each has the id of its group, which may be as long as `MAX_ID_BYTES`."""
NOT_LEADER_OR_FOLLOWER = 6
CONCURRENT_TRANSACTIONS = 51
CONCURRENT_WAIT_S = 0.1
"""How long the end of a producer's last transaction is waited for (add.partitions.to.txn.retry.backoff.max.ms)."""
CONCURRENT_PAUSE_S = 0.02
"""Pause between questions meanwhile (add.partitions.to.txn.retry.backoff.ms)."""
MAX_QUESTIONS = 2
"""How often a commit is tried if a marker comes between the coordinator's answer and the append."""
LOAD_WAIT_S = 3.0
"""How long requests wait for a partition that is being opened or moved; after that the client backs off."""


class GroupDescription(NamedTuple):
    """A group in the responses of DescribeGroups and ListGroups."""

    group_id: str
    state: GroupState
    protocol_type: str
    """Empty for a group that only has offsets."""
    protocol: str
    """Empty unless Stable, as in Kafka; so is the members' metadata."""
    members: tuple[MemberValue, ...]


class GroupCoordinator:
    """Serves the groups of the offsets partitions that this broker leads."""

    def __init__(
        self,
        partitions: PartitionManager,
        controller: ControllerClient,
        clock: Clock,
        settings: GroupSettings,
        rng: random.Random,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._topic = CoordinatorTopic(controller, OFFSETS_TOPIC, settings.offsets_topic_partitions, OFFSETS_CONFIGS)
        self._shards = GroupShards(partitions, controller, clock, settings, rng)
        self._table = self._shards.table

    # --- life cycle ----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Subscribe to openings and closings of partitions, and load the open ones."""
        self._shards.start()

    async def close(self) -> None:
        """Complete all waiting requests with NOT_COORDINATOR and stop. The partitions stay open."""
        await self._table.close()

    async def load_partition(self, partition_log: PartitionLog) -> None:
        """Read an offsets partition; its groups are served afterwards. `start` calls this automatically."""
        await self._table.load(partition_log)

    async def wait_until_loaded(self, index: int | None) -> None:
        """Wait while an offsets partition is moving to or from this broker."""
        await self._table.wait_until_loaded(index)

    def unload_partition(self, index: int) -> None:
        """Stop serving a partition that this broker no longer leads. `start` calls this automatically."""
        self._table.unload(index)

    def problems(self) -> list[str]:
        """Return the partitions that are led here and not served, one sentence each, for operators."""
        return self._table.problems()

    def stats(self) -> dict[str, int]:
        """Counts for metrics: partitions led and not yet active, groups, offsets, waiting requests."""
        shards = self._table.all()
        return {
            "partitions": len(shards),
            "loading": sum(shard.phase is not ShardPhase.ACTIVE for shard in shards),
            "groups": sum(len(shard.store.groups) for shard in shards),
            "offsets": sum(shard.store.offsets.count for shard in shards),
            "pending": sum(shard.store.pending.count for shard in shards),
            "waiting": self._shards.waiting(),
        }

    # --- membership ----------------------------------------------------------------------------------------------

    async def find(self, group_id: str) -> BrokerRecord:
        """Return a group's coordinator; creates the offsets topic on first use. Raises `CoordinatorNotAvailable`."""
        broker = await self._topic.find(group_id)
        if await self.arrival(group_id):
            broker = await self._topic.find(group_id)  # the partition may have moved meanwhile
        return broker

    def partition_of(self, group_id: str) -> int | None:
        """The offsets partition of a group; None before the topic exists."""
        return self._topic.partition_of(group_id)

    async def find_partition(self, group_id: str) -> int:
        """The offsets partition of a group; creates the topic on first use. Raises `CoordinatorNotAvailable`."""
        return await self._topic.find_partition(group_id)

    async def arrival(self, group_id: str) -> bool:
        """Wait briefly while the group's partition is moving to or from this broker; False if it is not moving.

        A move takes tens of milliseconds. A client that is sent to FindCoordinator before there is a new coordinator,
        or that gets COORDINATOR_LOAD_IN_PROGRESS, would back off for longer, or abandon a commit after a few attempts.
        """
        index = self._topic.partition_of(group_id)
        if not self._table.is_coming(index):
            return False
        with contextlib.suppress(TimeoutError):  # the client gets COORDINATOR_LOAD_IN_PROGRESS
            async with asyncio.timeout(LOAD_WAIT_S):
                await self.wait_until_loaded(index)
        return True

    async def join(self, group_id: str, request: JoinRequest) -> JoinResult:
        """JoinGroup; returns when the round is over.

        Raises `InvalidGroupId`, `InvalidGroupRequest`, and `CoordinatorNotAvailable` if there is no memory for it.
        """
        _check_id(group_id)
        _check_request(request)
        await self.arrival(group_id)
        shard = self._shard(group_id)
        low, high = self.settings.min_session_timeout_ms, self.settings.max_session_timeout_ms
        if not low <= request.session_timeout_ms <= high:
            return JoinResult(GroupError.INVALID_SESSION_TIMEOUT, request.identity.member_id)
        self._require_memory(_growth(shard.store.groups.get(group_id), request))
        group = shard.store.obtain(group_id)
        now = self._table.now()
        result = await self._shards.wait_for(shard, group, lambda waiter: group.join(waiter, request, now))
        assert isinstance(result, JoinResult)
        await self._known(group_id, result.error)
        return result

    async def sync(self, group_id: str, request: SyncRequest) -> SyncResult:
        """SyncGroup; returns when the leader's assignment is durable.

        Raises `InvalidGroupId`, and `CoordinatorNotAvailable` if there is no memory for the assignments.
        """
        _check_id(group_id)
        await self.arrival(group_id)
        shard = self._shard(group_id)
        group = shard.store.groups.get(group_id)
        if group is None:
            return SyncResult(GroupError.UNKNOWN_MEMBER_ID)
        if request.assignments:
            held = sum(len(member.assignment) for member in group.members)
            self._require_memory(sum(map(len, request.assignments.values())) - held)
        result = await self._shards.wait_for(shard, group, lambda waiter: group.sync(waiter, request))
        assert isinstance(result, SyncResult)
        await self._known(group_id, result.error)
        return result

    def _require_memory(self, more: int) -> None:
        """Raise `CoordinatorNotAvailable` if the members of all groups may not take so many bytes more."""
        if more > 0 and self._shards.members_bytes() + more > self.settings.members_max_bytes:
            raise CoordinatorNotAvailable("the members of all groups take group.members_max_bytes")

    def heartbeat(self, group_id: str, identity: MemberIdentity, generation: int) -> GroupError:
        """Heartbeat. Raises `InvalidGroupId`."""
        _check_id(group_id)
        shard = self._shard(group_id)
        group = shard.store.groups.get(group_id)
        if group is None:
            return GroupError.UNKNOWN_MEMBER_ID
        error = group.heartbeat(identity, generation, self._table.now())
        self._shards.settle(shard, group)
        return error

    def leave(self, group_id: str, identities: Sequence[MemberIdentity]) -> list[GroupError]:
        """LeaveGroup: an error for each member. Raises `InvalidGroupId`."""
        _check_id(group_id)
        shard = self._shard(group_id)
        group = shard.store.groups.get(group_id)
        if group is None:
            return [GroupError.UNKNOWN_MEMBER_ID] * len(identities)
        errors = group.leave(identities, self._table.now())
        self._shards.settle(shard, group)
        return errors

    # --- offsets -------------------------------------------------------------------------------------------------

    async def commit(
        self,
        group_id: str,
        identity: MemberIdentity,
        generation: int,
        offsets: Sequence[tuple[OffsetKey, OffsetValue]],
    ) -> GroupError:
        """OffsetCommit: `NONE` once all offsets are durable and visible. The group id may be empty, as in Kafka.

        An offset for a topic that is deleted meanwhile is dropped, and does not replace an offset of a new topic with
        the same name. The caller bounds the metadata strings. Raises `InvalidGroupId`, `CommitTooLarge`,
        `CoordinatorNotAvailable`.
        """
        _check_id(group_id, may_be_empty=True)
        _check_size(group_id, offsets)
        await self.arrival(group_id)
        shard = self._shard(group_id)
        group = shard.store.groups.get(group_id)
        if group is None:
            error = GroupError.ILLEGAL_GENERATION if generation >= 0 else GroupError.NONE
        else:
            error = group.check_commit(identity, generation, self._table.now())
            self._shards.settle(shard, group)
        offsets = [(key, value) for key, value in offsets if self._shards.is_of(key.topic, value)]
        if error is not GroupError.NONE or not offsets:
            return error
        if shard.writer.is_full:
            raise CoordinatorNotAvailable(f"too many commits wait for offsets partition {shard.index}")
        records = [(encode_offset_key(key), encode_offset_value(value)) for key, value in offsets]
        error = GroupError(await self._table.write(shard, records, lambda: shard.store.put_offsets(offsets)))
        await self._known(group_id, error)
        return error

    async def commit_pending(
        self, group_id: str, request: TxnCommitRequest, admit: Callable[[int], Awaitable[int]]
    ) -> int:
        """TxnOffsetCommit: a Kafka error code, 0 once all offsets are durable in the producer's transaction.

        They are committed by the transaction's marker. `admit` asks the coordinator of the transaction whether this
        offsets partition is in it, and returns a code for the client; it is asked only if the transaction is not open
        in the partition's log, and again for `CONCURRENT_WAIT_S` if it answers CONCURRENT_TRANSACTIONS. Raises
        `InvalidGroupId`, `CommitTooLarge`, `CoordinatorNotAvailable`.
        """
        _check_id(group_id)
        _check_size(group_id, request.offsets)
        await self.arrival(group_id)
        shard = self._shard(group_id)
        error = _txn_commit_error(shard, group_id, request)
        offsets = [(key, value) for key, value in request.offsets if self._shards.is_of(key.topic, value)]
        if error is not GroupError.NONE or not offsets:
            return error
        for _ in range(MAX_QUESTIONS):
            code, guard = await self._admitted(shard, request.producer, admit)
            if code:
                return code
            error = _txn_commit_error(shard, group_id, request)  # a rebalance may have taken place meanwhile
            if error is not GroupError.NONE:
                return error
            error = await self._write_pending(shard, request.producer, offsets, guard)
            if error is not GroupError.INVALID_TXN_STATE or guard is None:
                break  # without a question the transaction was open, and was decided meanwhile: its client has gone on
            # The marker of the producer's last transaction came between question and append.
        await self._known(group_id, error)
        return error

    async def _admitted(
        self, shard: GroupShard, producer: TxnProducer, admit: Callable[[int], Awaitable[int]]
    ) -> tuple[int, VerificationGuard | None]:
        """Ask `admit` if necessary, and again for a while if the producer's last transaction is not over yet.

        Each question has a guard of its own: the marker of that last transaction may remove the one before.
        """
        until = self._clock.monotonic() + CONCURRENT_WAIT_S
        while self._table.is_current(shard):
            if shard.log.has_open_transaction(*producer):
                return 0, None
            try:
                guard = shard.log.begin_verification(*producer)
            except Closed:
                break
            except InvalidProducerEpoch as error:
                return error.kafka_code, None
            code = await admit(shard.index)
            if code != CONCURRENT_TRANSACTIONS or self._clock.monotonic() >= until:
                return code, guard
            await self._clock.sleep(CONCURRENT_PAUSE_S)
        return GroupError.NOT_COORDINATOR, None

    async def _write_pending(
        self,
        shard: GroupShard,
        producer: TxnProducer,
        offsets: Sequence[tuple[OffsetKey, OffsetValue]],
        guard: VerificationGuard | None,
    ) -> GroupError:
        if not self._table.is_current(shard):
            return GroupError.NOT_COORDINATOR
        if shard.writer.is_full:
            raise CoordinatorNotAvailable(f"too many commits wait for offsets partition {shard.index}")
        records = [(encode_offset_key(key), encode_offset_value(value)) for key, value in offsets]

        def done(failure: WriteError) -> None:
            if failure is WriteError.NONE:
                shard.store.put_pending(producer, offsets)

        write = Write(lambda: records, done, of=OfTransaction(producer, guard))
        return GroupError(await self._table.submit(shard, write))

    async def write_marker(
        self,
        partition: int,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        transaction_version: int,
    ) -> int:
        """End a producer's transaction in an offsets partition. Returns a Kafka error code for the marker's sender.

        0 once the marker is durable and applied: the pending offsets are the committed ones, or gone. It is written
        for a producer without pending offsets, too, and again if it is sent again. NOT_LEADER_OR_FOLLOWER: this broker
        does not serve the partition, or does not confirm the marker in time; INVALID_PRODUCER_EPOCH,
        TRANSACTION_COORDINATOR_FENCED: the log knows a newer epoch.
        """
        try:
            shard = self._table.get(partition)

            def done(failure: WriteError) -> None:
                if failure is WriteError.NONE:
                    shard.store.end_transaction(producer_id, commit=commit)

            producer = TxnProducer(producer_id, producer_epoch)
            marker = TxnMarker(producer, coordinator_epoch, commit, transaction_version)
            error = await self._table.submit(shard, Write(list, done, of=marker))
        except (NotCoordinator, CoordinatorLoading, CoordinatorNotAvailable):
            return NOT_LEADER_OR_FOLLOWER
        if error in (WriteError.COORDINATOR_NOT_AVAILABLE, WriteError.NOT_COORDINATOR):
            return NOT_LEADER_OR_FOLLOWER
        return error

    def committed(
        self, group_id: str, topics: Mapping[str, Collection[int]] | None
    ) -> dict[str, dict[int, OffsetValue | None]]:
        """OffsetFetch: the durable offsets of the given partitions (None: not committed), or of all partitions.

        An offset of an earlier topic with the same name is ignored: a coordinator that was not running when the topic
        was deleted still has it.
        """
        offsets = self._shard(group_id).store.offsets
        if topics is None:
            known: dict[str, dict[int, OffsetValue | None]] = {}
            for key, value in offsets.items(group_id):
                if self._shards.is_of(key.topic, value):
                    known.setdefault(key.topic, {})[key.partition] = value
            return known
        found: dict[str, dict[int, OffsetValue | None]] = {}
        for topic, partitions in topics.items():
            values = found[topic] = {}
            for partition in partitions:
                one = offsets.get(group_id, topic, partition)
                is_current = one is not None and self._shards.is_of(topic, one)
                values[partition] = one if is_current else None
        return found

    def offsets_of(self, topic: str, partition: int) -> Iterator[tuple[str, OffsetValue]]:
        """Yield the groups coordinated here that have committed an offset of a partition, and the offset."""
        for shard in self._table.active():
            offsets = shard.store.offsets
            for group_id in offsets.groups():
                found = offsets.get(group_id, topic, partition)
                if found is not None and self._shards.is_of(topic, found):
                    yield group_id, found

    def loading(self) -> list[int]:
        """Return the offsets partitions led here that are being loaded: their groups are not known yet."""
        return [shard.index for shard in self._table.all() if shard.phase is ShardPhase.LOADING]

    def unstable(self, group_id: str) -> set[tuple[str, int]]:
        """The topics and partitions whose committed offsets an open transaction may change (KIP-447)."""
        pending = self._shard(group_id).store.pending
        return {
            (key.topic, key.partition)
            for key, value in pending.values(group_id)
            if self._shards.is_of(key.topic, value)
        }

    def all_committed(self) -> Iterator[tuple[OffsetKey, int]]:
        """Iterate over the durable offsets of all groups that are coordinated here."""
        for shard in self._table.active():
            offsets = shard.store.offsets
            for group_id in offsets.groups():
                for key, value in offsets.items(group_id):
                    if self._shards.is_of(key.topic, value):
                        yield key, value.offset

    async def delete_offsets(
        self, group_id: str, partitions: Sequence[tuple[str, int]]
    ) -> tuple[GroupError, list[GroupError]]:
        """OffsetDelete: an error for the group, and one for each `(topic, partition)`."""
        shard = self._shard(group_id)
        error = shard.store.offset_delete_error(group_id)
        if error is not GroupError.NONE:
            return error, []
        keys = [OffsetKey(group_id, topic, partition) for topic, partition in partitions]
        errors: list[GroupError] = []

        def plan() -> Removal:
            nonlocal errors
            errors, removal = shard.store.plan_delete_offsets(group_id, keys)
            return removal

        error = await self._shards.remove(shard, plan)
        return error, errors

    # --- administration ------------------------------------------------------------------------------------------

    def describe(self, group_id: str) -> GroupDescription | None:
        """DescribeGroups; None if the group does not exist."""
        group = self._shard(group_id).store.groups.get(group_id)
        return None if group is None or group.state is GroupState.DEAD else _describe(group)

    def list_groups(self) -> list[GroupDescription]:
        """ListGroups: every group of the partitions led here. Raises `CoordinatorLoading` while any of them loads."""
        shards = self._table.all()
        for shard in shards:
            if shard.phase is ShardPhase.LOADING:
                raise CoordinatorLoading(f"offsets partition {shard.index} is being loaded")
        groups = (group for shard in shards for group in shard.store.groups.values())
        return [_describe(group) for group in groups if group.state is not GroupState.DEAD]

    async def delete_group(self, group_id: str) -> GroupError:
        """DeleteGroups for one group: delete it with all its offsets, if it has no members."""
        shard = self._shard(group_id)
        refused = GroupError.NONE

        def plan() -> Removal:
            nonlocal refused
            refused, removal = shard.store.plan_delete_group(group_id)
            return removal

        error = await self._shards.remove(shard, plan)
        return refused if error is GroupError.NONE else error

    async def _known(self, group_id: str, error: GroupError) -> None:
        """If the partition has moved away, wait until its new broker is known before sending the client there."""
        if error is GroupError.NOT_COORDINATOR:
            await self.arrival(group_id)

    def _shard(self, group_id: str) -> GroupShard:
        return self._table.get(self._topic.partition_of(group_id))


def _txn_commit_error(shard: GroupShard, group_id: str, request: TxnCommitRequest) -> GroupError:
    group = shard.store.groups.get(group_id)
    if group is not None:
        return group.check_txn_commit(request.identity, request.generation)
    return GroupError.ILLEGAL_GENERATION if request.generation >= 0 else GroupError.NONE


def _check_id(group_id: str, *, may_be_empty: bool = False) -> None:
    if not group_id and not may_be_empty:
        raise InvalidGroupId("the group id is empty")
    if len(group_id.encode()) > MAX_ID_BYTES:
        raise InvalidGroupId(f"the group id is longer than {MAX_ID_BYTES} bytes")


def _check_size(group_id: str, offsets: Sequence[tuple[OffsetKey, OffsetValue]]) -> None:
    size = len(offsets) * len(group_id.encode()) + sum(len(key.topic) for key, _ in offsets)
    if size > MAX_KEYS_BYTES:
        raise CommitTooLarge(f"the keys of a commit of {len(offsets)} offsets take {size} bytes")


def _growth(group: ClassicGroup | None, request: JoinRequest) -> int:
    """How many bytes more a group's members take with what a request brings."""
    wanted = MEMBER_BYTES + protocols_bytes(request.protocols)
    if group is None:
        return wanted
    member_id, instance_id = request.identity
    known = group.members.get(member_id or group.members.static_member_id(instance_id) or "")
    return wanted if known is None else protocols_bytes(request.protocols) - protocols_bytes(known.protocols)


def _check_request(request: JoinRequest) -> None:
    if len(request.protocols) > MAX_PROTOCOLS:
        raise InvalidGroupRequest(f"a member has {len(request.protocols)} protocols: at most {MAX_PROTOCOLS}")
    texts = [request.identity.instance_id or "", request.client_id, request.protocol_type]
    texts += [name for name, _ in request.protocols]
    if any(len(text.encode()) > MAX_ID_BYTES for text in texts):
        raise InvalidGroupRequest(f"an id or name is longer than {MAX_ID_BYTES} bytes")


def _describe(group: ClassicGroup) -> GroupDescription:
    protocol = group.protocol if group.state is GroupState.STABLE else None
    return GroupDescription(
        group.group_id, group.state, group.protocol_type, protocol or "", group.members.values(protocol)
    )
