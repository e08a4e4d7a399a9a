"""`ControllerNode`: one controller in this process: replicated log, state machine, RPC server and periodic work.

A member serves polls and images in any role. It accepts commands and heartbeats only while it is *active*: it is Raft's
leader and its own `BecomeActive` of that term has been applied. Loss of the leadership ends this at once; the state
machine refuses commands of an old term that are still in flight.

`start` returns when the log is loaded and the RPC port is open; `wait_active` when commands are accepted.
Entry: `ControllerNode`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from tidelog.controller.active.balancer import Balancer
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.levels import LevelRaise
from tidelog.controller.active.lifecycle import DeleteObjects, Lifecycle
from tidelog.controller.active.members import QuorumChanges
from tidelog.controller.active.peers import Peers
from tidelog.controller.active.readers import Readers
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.active.state_keeper import BucketSuperseded, KeptLog, StateKeeper
from tidelog.controller.checkup import CHECKUP_METHODS, Checkup, CheckupWorld
from tidelog.controller.image.feed import DeltaFeed
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.image.replica import Replica, StateCopy
from tidelog.controller.image.transfer import PLAIN_FORMAT, ImageChunk, ImageParams, PlainChunk, decode_params
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.machine.state import FailedCommand
from tidelog.controller.model import commands as c
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.bucket_state import generation_of
from tidelog.controller.model.errors import NotController, StaleBrokerEpoch, from_wire
from tidelog.controller.model.leases import TakeLease
from tidelog.controller.model.levels import NEWEST, SUPPORTED
from tidelog.controller.model.load import HeartbeatReply
from tidelog.controller.model.overrides import SettingsInForce, report
from tidelog.controller.model.snapshots import CreateBranch
from tidelog.controller.raft.consensus import Consensus, Role
from tidelog.controller.raft.quorum import parse_members
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.controller.rpc.connection import (
    DELTA_VERSION,
    ChangeParams,
    CommandParams,
    HeartbeatParams,
    PollParams,
    PollReply,
    RpcConnection,
    SessionReply,
    TransferParams,
    UnknownObjectsParams,
    UpgradeParams,
)
from tidelog.controller.rpc.listener import RpcListener
from tidelog.runtime import lines
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import Fenced, InvalidInput, StorageFailed, TidelogError
from tidelog.runtime.steps import in_turns
from tidelog.runtime.task_errors import ERRORS
from tidelog.runtime.tasks import TaskSet
from tidelog.runtime.version import VERSION

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4_096
MAX_WAIT_MS = 30_000
"""Bound on a long poll."""
APPLY_S = 0.1
"""How long a command waits for what its caller knows already: the active controller applies it first."""
MAX_UNKNOWN_IDS = 10_000
"""Ids in one `unknown-objects` request, which is answered in one turn of the event loop."""
BALANCE_METHODS = frozenset({"balance", "balance-plan", "balance-status", "scale"})
ADDRESS_FILE = "address"
"""File in the controller's directory: `host:port` of the RPC server, for tools on this machine."""


class ControllerNode:
    """One controller.

    `on_failed` is called when this controller cannot continue (its disk failed, or an unexpected exception ended a
    background task).
    """

    def __init__(
        self,
        identity: ControllerIdentity,
        sections: ControllerSections,
        world: ControllerWorld,
        *,
        on_failed: Callable[[Exception], None] | None = None,
    ) -> None:
        settings, clock = sections.controller, world.clock
        self._node_id = identity.node_id
        self._directory = identity.directory
        self._credentials = identity.credentials
        self._settings = self._used = settings
        self._in_force = SettingsInForce("controller", settings, lambda: self.image.cluster_configs)
        self._sections = {"controller": settings, "balancer": sections.balancer, "scale": sections.scale}
        self._delete_delay_ms = sections.delete_delay_ms
        self._clock = clock
        self._rng = world.rng
        self._members = parse_members(settings.members)
        self._consensus = world.consensus or self._raft()
        self._consensus.set_on_role(self._role_changed)
        self._consensus.set_on_failed(self._consensus_failed)
        self.feed = DeltaFeed(finds_objects=identity.serves_broker, limits=sections.feed)
        """The metadata, for followers in this and other processes."""
        self._on_failed = on_failed or (lambda error: None)
        self._tasks = TaskSet("controller", self._task_failed)
        self._closing = False
        self._failed_command: Callable[[], FailedCommand | None] = lambda: None
        self._replica: Replica | None = None
        self._not_uploaded: dict[int, tuple[int, int]] = {}
        """By broker: bytes of its WAL that were not uploaded at the last heartbeat, and the time of that."""
        self._sessions = BrokerSessions(settings.session_timeout_ms / 1000, settings.startup_timeout_ms / 1000)
        self._readers = Readers(settings.read_grace_ms / 1000)
        self._term_began = (0, 0.0)
        """A term, and the monotonic time at which this controller became active in it."""
        peers = Peers(world.network, identity.credentials)
        role = ActiveRole(
            lambda: self.feed.image, self._propose_own, lambda: self._active_term is not None, self._cluster_time_ms
        )
        self._duties = Duties(role.image, self._sessions, lambda: self._consensus.members, settings)
        self._lifecycle = Lifecycle(
            role,
            sessions=self._sessions,
            readers=self._readers,
            clock=clock,
            delete=self._deleting(world.delete_objects),
            duties=self._duties,
            refuses=peers.refuses,
            partitions_per_deletion=sections.partitions_per_deletion,
        )
        self._partitions_per_deletion = sections.partitions_per_deletion
        self._quorum_changes = self._make_quorum_changes(role, peers)
        self._level_raise = LevelRaise(
            role,
            identity.node_id,
            lambda: self._consensus.members,
            peers.ask_status,
            self._term_age_ms,
            self._quorum_changes.changing,
        )
        self._checkup = self._make_checkup(identity, world, peers)
        self._balancer = Balancer(sections.balancer, sections.scale, role, clock)
        self._keeper = self._make_keeper(role, world)
        self.more_problems: Callable[[], list[str]] = list
        """Returns what else of the work beside the active controller fails in this process, one clause each."""
        self._active_term: int | None = None
        self._active = asyncio.Event()
        self._activation: asyncio.Task[None] | None = None
        self._client_numbers = itertools.count(1)
        self._life = ""
        """Drawn at each activation."""
        self._rpc = RpcListener(
            self._handle,
            network=world.network,
            clock=clock,
            credentials=identity.credentials,
            max_connections=MAX_CONNECTIONS,
            on_lost=self._lost,
            adopt_peer=self._consensus.adopt_peer,
        )

    def _make_quorum_changes(self, role: ActiveRole, peers: Peers) -> QuorumChanges:
        return QuorumChanges(
            self._node_id,
            self._consensus,
            role.image,
            lambda: self._level,
            peers.ask_status,
            self._not_active,
            self._settings.command_timeout_ms / 1000,
        )

    def _make_checkup(self, identity: ControllerIdentity, world: ControllerWorld, peers: Peers) -> Checkup:
        def others() -> list[tuple[int, str]]:
            return [each for each in sorted(self._consensus.members.items()) if each[0] != identity.node_id]

        return Checkup(
            CheckupWorld(
                node=identity.node_id,
                roles=["controller"],
                network=world.network,
                clock=world.clock,
                image=lambda: self.image,
                controllers=others,
                ask_status=peers.ask_status,
                own=identity.own,
            )
        )

    def _make_keeper(self, role: ActiveRole, world: ControllerWorld) -> StateKeeper | None:
        if world.state_store is None:
            return None

        def refused(error: Exception) -> None:
            logger.critical("the bucket is not this cluster's", extra={"error": str(error)})
            self._consensus_failed(error)

        return StateKeeper(
            role,
            world.state_store,
            self._settings,
            self._clock,
            log=KeptLog(self._ask_copy, self._require_active, self._confirm_term),
            on_refused=refused,
            proof=world.bucket_proof,
        )

    async def _confirm_term(self) -> int:
        """Return the term that this controller leads in after a new entry of the log was committed, or -1.

        Until that moment no controller of a later term was elected.
        """
        before = self._consensus.role
        await self._consensus.barrier(self._settings.command_timeout_ms / 1000)
        now = self._consensus.role
        return now.term if before.is_leader and now.is_leader and now.term == before.term else -1

    def _ask_copy(self) -> asyncio.Future[StateCopy]:
        assert self._replica is not None, "the controller was not started"
        return self._replica.ask_copy()

    def _deleting(self, delete: DeleteObjects | None) -> DeleteObjects | None:
        """As `delete`, by the owner of the bucket only."""

        async def delete_as_owner(object_ids: Sequence[int]) -> None:
            assert delete is not None
            if self._keeper is not None:
                await self._keeper.check_owner()
            await delete(object_ids)

        return delete_as_owner if delete is not None else None

    def _raft(self) -> Consensus:
        assert self._directory is not None, "the Raft log needs a directory"
        return RaftConsensus(
            RaftSettings(
                directory=self._directory,
                credentials=self._credentials if self._members else None,
                members=self._members,
                snapshot_entries=self._settings.snapshot_entries,
                snapshot_bytes=self._settings.snapshot_bytes,
            ),
            self._clock,
        )

    @property
    def image(self) -> Image:
        """Return this member's copy of the metadata."""
        return self.feed.image

    def hears(self, broker_id: int) -> bool:
        """Whether this member gets heartbeats of the broker, which it does without being active, too."""
        return self._sessions.hears(broker_id)

    @property
    def address(self) -> tuple[str, int]:
        """Return the address of the RPC server."""
        return self._rpc.address

    @property
    def is_active(self) -> bool:
        """Whether this controller accepts commands."""
        return self._active_term is not None

    async def start(self) -> None:
        """Load, listen and join the quorum. Raises `CorruptData`, `StorageFailed`, `ConfigError`, `AddressInUse`."""
        loop = asyncio.get_running_loop()
        await self._rpc.start(*self._listen_address())
        try:
            replica = self._replica = Replica(loop, self._take_deltas, self._take_image, self.feed.new_image)
            self._failed_command = lambda: replica.state.failed
            await self._consensus.start(replica)
            self._write_address()
        except (TidelogError, OSError):
            await self._rpc.close()
            await self._consensus.close()
            raise
        self._tasks.keep(self._lifecycle.run, "lifecycle")
        self._tasks.keep(self._lifecycle.run_removals, "removals")
        self._tasks.keep(self._lifecycle.run_deletions, "deletions")
        self._tasks.keep(self._lifecycle.run_asking, "asking")
        self._tasks.keep(self._balancer.run, "balancer")
        if self._keeper is not None:
            self._tasks.keep(self._keeper.run, "metadata state")
        logger.info("controller started", extra={"node": self._node_id, "address": "{}:{}".format(*self.address)})

    def _listen_address(self) -> tuple[str, int]:
        settings = self._settings
        if settings.port == 0 and self._node_id in self._members:
            return split_address(self._members[self._node_id])
        return settings.host, settings.port

    def _write_address(self) -> None:
        if self._directory is None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._directory / (ADDRESS_FILE + ".tmp")
        temporary.write_text("{}:{}\n".format(*self.address))
        temporary.replace(self._directory / ADDRESS_FILE)

    async def wait_active(self, timeout_s: float) -> None:
        """Return when this controller accepts commands. Raises `NotController` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._active.wait()
        except TimeoutError:
            raise NotController(f"this controller did not become active within {timeout_s} s") from None

    async def fence_objects(self) -> int:
        """Return an object id newer than all allocated ones; `image` then contains all before it. Raises `Unavailable`.

        The id expires at once: nothing is written under it.
        """
        result = await self._propose(c.PrepareObjects(1, 1), self._require_active())
        await self.feed.wait_newer(result.version - 1, 10.0)
        if self.image.version < result.version:
            raise NotController("the metadata did not reach this member in time")
        return msgspec.msgpack.decode(result.value, type=int)

    async def unknown_objects(self, object_ids: Sequence[int], version: int = 0) -> list[int]:
        """Return those of the ids that metadata of at least `version` does not name in any state.

        An id that was given out before `version` and is unknown then stays unknown. Raises `NotController` unless this
        controller is active and has that version.
        """
        self._require_active()
        if len(object_ids) > MAX_UNKNOWN_IDS:
            raise InvalidInput(f"{len(object_ids)} ids in one request; at most {MAX_UNKNOWN_IDS}")
        await self.feed.wait_newer(version - 1, 1.0)
        self._require_active()
        if self.image.version < version:
            raise NotController(f"this member's metadata is of version {self.image.version}, older than {version}")
        return [object_id for object_id in object_ids if object_id not in self.image.objects]

    async def close(self) -> None:
        """Stop serving. Everything acknowledged is durable."""
        self._closing = True
        if self._keeper is not None:
            await self._keeper.write_last()
        if self.is_active and len(self._consensus.members) > 1:
            with contextlib.suppress(TidelogError, TimeoutError):
                await self._consensus.transfer(None)  # avoids an election time-out for the other members
        self._deactivate()
        await self._rpc.close()
        await self._checkup.close()
        await self._tasks.close()
        await self._consensus.close()

    def status(self) -> dict[str, Any]:
        """Return facts for operators."""
        members = self._consensus.members
        failed = self._failed_command()
        return {
            "address": "{}:{}".format(*self.address),
            "leader": self._consensus.role.leader,
            "members": {str(node_id): members[node_id] for node_id in sorted(members)},
            "node": self._node_id,
            "pid": os.getpid(),
            "release": VERSION,
            "time_ms": self._clock.time_ms(),
            "active": self.is_active,
            "version": self.image.version,
            "cluster_id": self.image.cluster_id,
            "level": self._level,
            "levels": [SUPPORTED.oldest, SUPPORTED.newest],
            "connections": len(self._rpc.connections),
            "read_versions": {str(each): version for each, version in self._readers.versions().items()},
            "receiving_bytes": self._rpc.receiving_bytes,
            "not_uploaded": {
                str(each): told for each, told in self._not_uploaded.items() if each in self.image.brokers
            },
            "failed_command": msgspec.structs.asdict(failed) if failed is not None else None,
            "bucket_state": self.bucket_state(),
            "not_deleted": self._lifecycle.not_deleted if self.is_active else "",
            "failing": [*self._lifecycle.problems(), *self.more_problems()] if self.is_active else [],
            "unexpected_errors": ERRORS.problems() + lines.problems(),
            "settings": report(self._sections, self.image.cluster_configs),
            **self._consensus.status(),
        }

    def bucket_state(self) -> dict[str, Any] | None:
        """The newest state that this controller has written to the bucket, while it is active; None: it is not."""
        if self._keeper is None or not self.is_active:
            return None
        written = self._keeper.written
        return {
            "generation": generation_of(self.image.kv),
            "version": written.version if written is not None else None,
            "at_ms": written.at_ms if written is not None else None,
            "age_s": (self._clock.time_ms() - written.at_ms) / 1000 if written is not None else None,
            "size_bytes": written.size_bytes if written is not None else None,
            "problem": self._keeper.problem,
        }

    def _consensus_failed(self, error: Exception) -> None:
        self._deactivate()
        self._on_failed(error)

    def _task_failed(self, error: BaseException) -> None:
        """Fail the controller: without a background task that ended it would work only in part."""
        self._on_failed(error if isinstance(error, Exception) else StorageFailed(f"a task ended: {error!r}"))

    # Role

    def _role_changed(self, role: Role) -> None:
        self._deactivate()
        if role.is_leader and not self._closing:
            self._activation = self._tasks.keep(partial(self._activate, role.term), "activate")

    def _deactivate(self) -> None:
        self._active_term = None
        self._active.clear()
        if self._activation is not None:
            self._activation.cancel()
            self._activation = None

    async def _activate(self, term: int) -> None:
        backoff = Backoff(0.05, 5.0, self._rng)
        while True:
            drawn = self._rng.randbytes(16)
            cluster_id = base64.urlsafe_b64encode(drawn).decode().rstrip("=")
            try:
                if self.image.cluster is None or self._level < NEWEST:  # what is not applied yet may be another level
                    await self._consensus.barrier(self._settings.command_timeout_ms / 1000)
                if self._keeper is not None:
                    await self._keeper.look_first(term)
                become = c.BecomeActive(self._node_id, term, cluster_id, self._delete_delay_ms)
                active_at = (await self._propose(become, term)).version
                break
            except BucketSuperseded:
                return  # it has been reported: this controller ends
            except TidelogError as error:
                logger.warning("not active yet", extra={"term": term, "error": str(error)})
                await self._clock.sleep(backoff.next_delay_s())
        while self.image.version < active_at:
            await self.feed.wait_newer(active_at - 1, 1.0)
        self._term_began = (term, self._clock.monotonic())
        self._sessions.activated(self._clock.monotonic())
        self._readers.activated(self._clock.monotonic())
        self._balancer.schedule.activated(self._clock.monotonic())
        self._client_numbers, self._life = itertools.count(1), drawn[:6].hex()
        self._active_term = term
        self._active.set()
        self._lifecycle.wake()
        self._lifecycle.activated()
        logger.info("this controller is active", extra={"node": self._node_id, "term": term})

    def _require_active(self) -> int:
        if self._active_term is None:
            raise self._not_active("this controller is not active")
        return self._active_term

    def _not_active(self, message: str) -> NotController:
        leader = self._consensus.role.leader
        error = NotController(message, hint=f"the leader is {leader}" if leader else None)
        if leader is not None and leader.isdecimal() and int(leader) != self._node_id:
            error.address = self._consensus.members.get(int(leader), "")
        return error

    def _elapsed_ms(self, term: int) -> int:
        """Return the time since the term began by the monotonic clock: what the cluster time is moved on by."""
        began_term, began_s = self._term_began
        return int((self._clock.monotonic() - began_s) * 1000) if term == began_term else 0

    def _term_age_ms(self) -> int:
        return self._elapsed_ms(self._require_active())

    @property
    def _level(self) -> int:
        """The feature level as this member knows it: commands are written at it. A new cluster has the newest."""
        cluster = self.image.cluster
        return cluster.level if cluster is not None else NEWEST

    def _cluster_time_ms(self) -> int:
        cluster, term = self.image.cluster, self._require_active()
        assert cluster is not None  # an active controller has applied its `BecomeActive`
        if cluster.level == 0:
            return self._clock.time_ms()
        return cluster.active_since_ms + self._elapsed_ms(term)

    async def _propose(self, command: c.AnyCommand, term: int) -> c.Result:
        data = await self._propose_envelope(command, term, "", 0, 0)
        result = c.decode_result(data)
        if result.error is not None:
            raise from_wire(result.error)
        return result

    async def _propose_own(self, command: c.AnyCommand) -> None:
        result = await self._propose(command, self._require_active())
        await self.feed.wait_newer(result.version - 1, 1.0)

    async def _propose_envelope(self, command: c.AnyCommand, term: int, client: str, sequence: int, done: int) -> bytes:
        now_ms, elapsed_ms = self._clock.time_ms(), self._elapsed_ms(term)
        envelope = c.Envelope(c.FORMAT_VERSION, term, now_ms, client, sequence, done, command, elapsed_ms)
        data = c.encode_envelope(envelope, self._level)
        return await self._consensus.propose(data, self._settings.command_timeout_ms / 1000)

    # Callbacks posted by the consensus thread

    def _take_deltas(self, deltas: list[Delta]) -> None:
        """A copy that cannot follow would be out of date for good, and nobody would know: this controller ends."""
        for delta in deltas:
            try:
                self.feed.append(delta)
                self._balancer.schedule.note(delta, self._clock.monotonic())
            except Exception as error:
                logger.critical("the metadata cannot follow a command", extra={"index": delta.version}, exc_info=error)
                failure = StorageFailed(
                    f"the copy of the metadata cannot follow the command at index {delta.version}: {error!r}",
                    hint="restart this controller: it builds the copy anew from its snapshot and journal",
                )
                self._consensus_failed(failure)
                return

        self._use_settings()

    def _take_image(self, image: Image) -> None:
        self.feed.reset(image)
        self._use_settings()

    def _use_settings(self) -> None:
        """Use the session time-out that is in force: in any role, because every member hears the heartbeats."""
        settings = self._in_force.now
        if settings is not self._used:
            changed = {
                name: getattr(settings, name)
                for name in settings.__struct_fields__
                if getattr(settings, name) != getattr(self._used, name)
            }
            logger.info("settings of the controllers were changed by a command", extra={"now": changed})
            self._used = settings
            self._sessions.use_timeout(settings.session_timeout_ms / 1000)

    # RPC

    def _lost(self, connection: RpcConnection) -> None:
        self.feed.forget(connection)
        if self._sessions.connection_closed(connection):
            self._lifecycle.wake()

    async def _handle(self, connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        connection.require_cluster(self.image.cluster_id)  # the ids that others would be given are in use there
        if method == "command":
            return await self._command(msgspec.msgpack.decode(params, type=CommandParams))
        if method == "poll":
            return msgspec.msgpack.encode(await self._poll(msgspec.msgpack.decode(params, type=PollParams)))
        if method == "image":
            return msgspec.msgpack.encode(self._image_chunk(connection, decode_params(params, self._level)))
        if method == "heartbeat":
            return msgspec.msgpack.encode(
                self._heartbeat(connection, msgspec.msgpack.decode(params, type=HeartbeatParams))
            )
        if method == "session":
            return msgspec.msgpack.encode(await self._session())
        if method in BALANCE_METHODS:
            return msgspec.msgpack.encode(await self._ask_balancer(method))
        if method == "unknown-objects":
            asked = msgspec.msgpack.decode(params, type=UnknownObjectsParams)
            return msgspec.msgpack.encode(await self.unknown_objects(asked.object_ids, asked.version))
        if method == "status":
            return msgspec.msgpack.encode(self.status())
        if method in CHECKUP_METHODS:
            return msgspec.msgpack.encode(await self._checkup.answer(method))
        if method == "upgrade":
            return msgspec.msgpack.encode(await self._upgrade(msgspec.msgpack.decode(params, type=UpgradeParams)))
        if method == "transfer":
            self._require_active()
            await self._quorum_changes.transfer(msgspec.msgpack.decode(params, type=TransferParams).node_id)
            return b"\xc0"
        if method == "change":
            self._require_active()
            changed = await self._quorum_changes.change(msgspec.msgpack.decode(params, type=ChangeParams))
            self._lifecycle.wake()
            return msgspec.msgpack.encode(changed)
        raise InvalidInput(f"there is no method {method[:50]!r}", hint="the caller is newer than this controller")

    def _image_chunk(self, connection: RpcConnection, params: ImageParams) -> ImageChunk | PlainChunk:
        if params.format == PLAIN_FORMAT:
            return self.feed.plain_image_chunk(connection)
        return self.feed.image_chunk(connection, params)

    async def _command(self, params: CommandParams) -> bytes:
        term = self._require_active()
        if len(memoryview(params.command)) > c.MAX_COMMAND_BYTES - 1024:
            raise InvalidInput(f"a command exceeds the limit of {c.MAX_COMMAND_BYTES} bytes")
        command = c.decode_command(params.command)
        if type(command) in c.INTERNAL:
            raise InvalidInput(f"{type(command).__name__} is reserved for the controller")
        if not params.client_id:
            raise InvalidInput("a command needs a dedupe id", hint="call `session` first")
        if isinstance(command, c.RegisterBroker):
            c.require_member(command, self._level)
        await self._require_as_new(params.version, term)
        completed = self._completed(command)
        result = await self._propose_envelope(completed, term, params.client_id, params.sequence, params.done)
        if isinstance(command, c.RegisterBroker):  # written at level 0, it may have come to its place after a raise
            await self.feed.wait_newer(c.decode_result(result).version - 1, 1.0)
            c.require_member(command, self._level)
        drains = isinstance(command, c.DrainBroker | c.BeginRestart | c.HandOver)
        if drains and any(one.draining for one in self.image.brokers.values()):
            self._lifecycle.wake()  # the next partitions may move
        if isinstance(command, c.HandOver):
            self._balancer.wake()
        if isinstance(command, c.DeleteTopic):
            self._lifecycle.wake_deletions()
        return result

    async def _require_as_new(self, version: int, term: int) -> None:
        """Refuse who has newer metadata than this controller's log: the ids that it would be given are in use.

        This one was deposed, or its directory is an older copy.
        """
        if version <= self.image.version:
            return
        await self.feed.wait_newer(version - 1, APPLY_S)
        if self.image.version >= version:
            return
        if await self._confirm_term() != term or self.image.version < version:
            raise self._not_active(
                f"the caller has metadata of version {version}; this controller's is of {self.image.version}"
            )

    def _completed(self, command: c.AnyCommand) -> c.AnyCommand:
        """Return a client's command with what the active controller adds: its settings, and the load of brokers."""
        if isinstance(command, c.DeleteTopic):
            return msgspec.structs.replace(command, at_once=self._partitions_per_deletion)
        if isinstance(command, TakeLease):
            hold_ms = min(command.hold_ms, self._in_force.now.lease_max_hold_ms)
            return msgspec.structs.replace(command, hold_ms=hold_ms)
        if isinstance(command, c.CreateTopic | c.CreatePartitions | CreateBranch):
            loads = self._balancer.schedule.weights(self._clock.monotonic())
            return msgspec.structs.replace(command, loads=loads)
        return command

    async def _ask_balancer(self, method: str) -> dict[str, Any]:
        self._require_active()
        now_s = self._clock.monotonic()
        if method == "scale":
            return self._balancer.schedule.scale(now_s)
        if method == "balance-plan":
            return await in_turns(self._balancer.schedule.plan(now_s, self._clock.time_ms()))
        return await self._balancer.carry_out() if method == "balance" else self._balancer.schedule.status(now_s)

    async def _upgrade(self, params: UpgradeParams) -> dict[str, Any]:
        self._require_active()
        return await self._level_raise.run(params.level, dry_run=params.dry_run)

    async def _session(self) -> SessionReply:
        """Return a unique session id: a term has one active controller, and this process counts within the term.

        Two lives of one log may begin the same term: over a copy of the directory, or rebuilt from an older state.
        """
        term = self._require_active()
        client_id = f"{term}.{self._node_id}.{self._life}.{next(self._client_numbers)}"
        return SessionReply(client_id, self.image.cluster_id)

    def _heartbeat(self, connection: RpcConnection, params: HeartbeatParams) -> HeartbeatReply | None:
        """Record a heartbeat, on every member, for the next active controller."""
        record = self.image.brokers.get(params.broker_id)
        if self._keeper is not None and connection.cluster_id and record is not None:
            self._keeper.note_version(record, params.registration_epoch, params.version)
        if record is None or record.registration_epoch != params.registration_epoch:
            current = record.registration_epoch if record is not None else None
            if self._may_know_less(params, current):
                return None
            raise StaleBrokerEpoch(
                f"registration {params.registration_epoch} of broker {params.broker_id} is not current ({current})"
            )
        now_s = self._clock.monotonic()
        age_s = params.age_ms / 1000
        self._sessions.heartbeat(params.broker_id, params.registration_epoch, connection, now_s, age_s)
        self._readers.heartbeat(params.broker_id, params.registration_epoch, params.version, now_s)
        if params.leaving:
            self._sessions.leaving(params.broker_id, now_s)
        if params.not_uploaded_bytes >= 0:
            self._not_uploaded[params.broker_id] = (params.not_uploaded_bytes, self._clock.time_ms())
        if params.load is not None:
            self._balancer.schedule.loads.note(params.broker_id, params.registration_epoch, params.load, now_s)
        if self.is_active and not record.alive:
            self._lifecycle.wake()
        if not self.is_active:
            return None
        told = self._balancer.schedule.told() or HeartbeatReply(0, 0, 0, 0)
        return msgspec.structs.replace(
            told,
            read_grace_ms=self._settings.read_grace_ms,
            version=self.image.version,
            hand_overs=self._duties.hand_overs(params.broker_id),
        )

    def _may_know_less(self, params: HeartbeatParams, current: int | None) -> bool:
        """Whether the registration may be newer than this member's metadata.

        A follower's may be behind. So may an active one's that does not know that another one is active, because its
        disk hangs; epochs only grow, also those of a broker that was removed meanwhile.
        """
        if current is not None:
            return current < params.registration_epoch
        return not self.is_active or self.image.version < params.version

    def _require_leader(self) -> None:
        """Refuse followers while no leader is known: this member may be cut off, and another may not be."""
        if self._consensus.role.leader is None:
            raise self._not_active("this controller knows no leader")

    async def _poll(self, params: PollParams) -> PollReply:
        cluster_id = self.image.cluster_id
        if params.cluster_id and cluster_id and params.cluster_id != cluster_id:
            raise Fenced(
                f"the caller belongs to cluster {params.cluster_id}; this is {cluster_id}",
                hint="the controller's directory was replaced, or the endpoint is another cluster's",
            )
        if params.delta_version < DELTA_VERSION:
            raise InvalidInput(
                f"the caller reads deltas of version {params.delta_version}; this controller sends {DELTA_VERSION}",
                hint="upgrade the caller to this controller's version",
            )
        self._require_leader()
        await self.feed.wait_newer(params.from_version, max(0, min(params.wait_ms, MAX_WAIT_MS)) / 1000)
        self._require_leader()
        deltas = self.feed.after(params.from_version)
        return PollReply(self.image.cluster_id, deltas is None, deltas or [], self.image.version)
