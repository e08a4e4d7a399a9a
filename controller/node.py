"""`ControllerNode`: one controller in this process: replicated log, state machine, RPC server and life-cycle work.

A member serves polls and images whatever its role. It accepts commands and heartbeats only while it is *active*: it is
Raft's leader and its own `BecomeActive` of that term has been applied. Losing the leadership ends that at once; the
state machine refuses what an old term still has under way.

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
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from controller import commands as c
from controller.addresses import split_address
from controller.balancer import Balancer
from controller.consensus import Consensus, Role
from controller.errors import NotController, StaleBrokerEpoch, from_wire
from controller.feed import DeltaFeed
from controller.handshake import Credentials
from controller.image import Delta, Image
from controller.lifecycle import DeleteObjects, Lifecycle
from controller.load import HeartbeatReply
from controller.quorum_file import MAX_MEMBERS, MembershipChange, parse_member, parse_members
from controller.raft import RaftConsensus, RaftSettings
from controller.replica import Replica
from controller.rpc import (
    DELTA_VERSION,
    ChangeParams,
    CommandParams,
    HeartbeatParams,
    PollParams,
    PollReply,
    RpcChannel,
    RpcConnection,
    SessionReply,
    TransferParams,
)
from controller.rpc_listener import RpcListener
from controller.sessions import BrokerSessions
from controller.settings import BalancerSettings, ControllerSettings, ScaleSettings
from runtime.clock import Clock
from runtime.errors import Fenced, InvalidInput, StorageFailed, TidelogError
from runtime.network import Network, refuses
from runtime.tasks import Backoff, TaskSet

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4_096
MEET_S = 3.0
ASK_S = 1.0
"""A host that is there refuses at once."""
MAX_WAIT_MS = 30_000
"""Bound on a long poll."""
BALANCE_METHODS = frozenset({"balance", "balance-plan", "balance-status", "scale"})
ADDRESS_FILE = "address"
"""In the controller's directory: `host:port` of the RPC server, for the tools of this machine."""


class ControllerNode:
    """See the module. `directory` holds journal, snapshot and the address file; only one process may use it. None is
    for a `consensus` that is passed in and keeps its own.

    `delete_objects` deletes destroyed objects from the bucket (without it they stay, and stay known). `on_failed` is
    called when this controller cannot go on (its disk failed, or a defect ended a background task). `serves_broker`: a
    broker of this process will use the image through `feed`.
    """

    def __init__(
        self,
        *,
        node_id: int,
        directory: Path | None,
        settings: ControllerSettings,
        network: Network,
        clock: Clock,
        rng: random.Random,
        delete_delay_ms: int = 60_000,
        delete_objects: DeleteObjects | None = None,
        on_failed: Callable[[Exception], None] | None = None,
        consensus: Consensus | None = None,
        credentials: Credentials | None = None,
        serves_broker: bool = False,
        balancer: BalancerSettings | None = None,
        scale: ScaleSettings | None = None,
    ) -> None:
        self._node_id = node_id
        self._directory = directory
        self._settings = settings
        self._network = network
        self._clock = clock
        self._rng = rng
        self._delete_delay_ms = delete_delay_ms
        self._credentials = credentials
        self._members = parse_members(settings.members)
        self._consensus = consensus or self._raft()
        self._consensus.set_on_role(self._role_changed)
        self._consensus.set_on_failed(self._consensus_failed)
        self.feed = DeltaFeed(finds_objects=serves_broker)
        """The metadata, for followers elsewhere and in this process."""
        self._on_failed = on_failed or (lambda error: None)
        self._tasks = TaskSet("controller", self._task_failed)
        self._closing = False
        self._unsaved: dict[int, tuple[int, int]] = {}
        """By broker: bytes of its WAL that were not in the bucket at the last heartbeat, and when that was."""
        self._sessions = BrokerSessions(settings.session_timeout_ms / 1000, settings.startup_timeout_ms / 1000)
        self._lifecycle = Lifecycle(
            image=lambda: self.feed.image,
            sessions=self._sessions,
            propose=self._propose_own,
            is_active=lambda: self._active_term is not None,
            clock=clock,
            delete=delete_objects,
            reelect_timeout_ms=settings.reelect_timeout_ms,
            controllers=lambda: self._consensus.members,
            refuses=self._refuses,
        )
        self._balancer = Balancer(
            balancer or BalancerSettings(),
            scale or ScaleSettings(),
            image=lambda: self.feed.image,
            propose=self._propose_own,
            is_active=lambda: self._active_term is not None,
            clock=clock,
        )
        self._active_term: int | None = None
        self._active = asyncio.Event()
        self._activation: asyncio.Task[None] | None = None
        self._client_numbers = itertools.count(1)
        self._rpc = RpcListener(
            self._handle,
            network=network,
            clock=clock,
            credentials=credentials,
            max_connections=MAX_CONNECTIONS,
            on_lost=self._lost,
            adopt_peer=self._consensus.adopt_peer,
        )

    def _raft(self) -> Consensus:
        assert self._directory is not None, "the Raft log needs a directory"
        return RaftConsensus(
            RaftSettings(
                directory=self._directory,
                credentials=self._credentials if self._members else None,
                members=self._members,
                snapshot_entries=self._settings.snapshot_entries,
            ),
            self._clock,
        )

    @property
    def image(self) -> Image:
        """This member's copy of the metadata."""
        return self.feed.image

    @property
    def address(self) -> tuple[str, int]:
        """Where the RPC server listens."""
        return self._rpc.address

    @property
    def is_active(self) -> bool:
        """Whether commands are accepted here."""
        return self._active_term is not None

    async def start(self) -> None:
        """Load, listen, take part. Raises `CorruptData`, `StorageFailed`, `ConfigError`, `AddressInUse`."""
        loop = asyncio.get_running_loop()
        await self._rpc.start(*self._listen_address())
        try:
            replica = Replica(loop, self._take_deltas, self._take_image, self.feed.new_image)
            await self._consensus.start(replica)
            self._write_address()
        except (TidelogError, OSError):
            await self._rpc.close()
            await self._consensus.close()
            raise
        self._tasks.spawn(self._lifecycle.run(), "lifecycle")
        self._tasks.spawn(self._lifecycle.run_removals(), "removals")
        self._tasks.spawn(self._lifecycle.run_asking(), "asking")
        self._tasks.spawn(self._balancer.run(), "balancer")
        log.info("controller started", extra={"node": self._node_id, "address": "{}:{}".format(*self.address)})

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
        """Return when commands are accepted here. Raises `NotController` after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._active.wait()
        except TimeoutError:
            raise NotController(f"this controller did not become active within {timeout_s} s") from None

    async def fence_objects(self) -> int:
        """An object id newer than all given out so far; `image` contains everything before it. Raises `Unavailable`.

        The id is given up at once: nothing is written under it.
        """
        result = await self._propose(c.PrepareObjects(1, 1), self._require_active())
        await self.feed.wait_newer(result.version - 1, 10.0)
        if self.image.version < result.version:
            raise NotController("the metadata did not reach this member in time")
        return msgspec.msgpack.decode(result.value, type=int)

    async def close(self) -> None:
        """Stop serving; everything acknowledged is durable."""
        self._closing = True
        if self.is_active and len(self._consensus.members) > 1:
            with contextlib.suppress(TidelogError, TimeoutError):
                await self._consensus.transfer(None)  # spare the others an election time-out
        self._deactivate()
        await self._rpc.close()
        await self._tasks.close()
        await self._consensus.close()

    def status(self) -> dict[str, Any]:
        """Facts for operators."""
        members = self._consensus.members
        return {
            "address": "{}:{}".format(*self.address),
            "leader": self._consensus.role.leader,
            "members": {str(node_id): members[node_id] for node_id in sorted(members)},
            "node": self._node_id,
            "pid": os.getpid(),
            "active": self.is_active,
            "version": self.image.version,
            "cluster_id": self.image.cluster_id,
            "connections": len(self._rpc.connections),
            "receiving_bytes": self._rpc.receiving_bytes,
            "unsaved": {str(each): told for each, told in self._unsaved.items() if each in self.image.brokers},
            **self._consensus.status(),
        }

    def _consensus_failed(self, error: Exception) -> None:
        self._deactivate()
        self._on_failed(error)

    def _task_failed(self, error: BaseException) -> None:
        """A defect ended a background task: this controller must not linger half alive."""
        self._on_failed(error if isinstance(error, Exception) else StorageFailed(f"a task ended: {error!r}"))

    # Role

    def _role_changed(self, role: Role) -> None:
        self._deactivate()
        if role.is_leader and not self._closing:
            self._activation = self._tasks.spawn(self._activate(role.term), "activate")

    def _deactivate(self) -> None:
        self._active_term = None
        self._active.clear()
        if self._activation is not None:
            self._activation.cancel()
            self._activation = None

    async def _activate(self, term: int) -> None:
        backoff = Backoff(rng=self._rng)
        while True:
            cluster_id = base64.urlsafe_b64encode(self._rng.randbytes(16)).decode().rstrip("=")
            try:
                await self._propose(c.BecomeActive(self._node_id, term, cluster_id, self._delete_delay_ms), term)
                break
            except TidelogError as error:
                log.warning("not active yet", extra={"term": term, "error": str(error)})
                await self._clock.sleep(backoff.next_delay_s())
        self._sessions.activated(self._clock.monotonic())
        self._balancer.activated(self._clock.monotonic())
        self._client_numbers = itertools.count(1)
        self._active_term = term
        self._active.set()
        self._lifecycle.hurry()
        log.info("this controller is active", extra={"node": self._node_id, "term": term})

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
        now_ms = self._clock.time_ms()
        envelope = c.Envelope(c.FORMAT_VERSION, term, now_ms, client, sequence, done, command)
        return await self._consensus.propose(c.encode(envelope), self._settings.command_timeout_ms / 1000)

    # What the consensus thread posts

    def _take_deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self.feed.append(delta)
            self._balancer.note(delta)

    def _take_image(self, image: Image) -> None:
        self.feed.reset(image)

    # RPC

    def _lost(self, connection: RpcConnection) -> None:
        self.feed.forget(connection)
        if self._sessions.connection_closed(connection):
            self._lifecycle.hurry()

    async def _handle(self, connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        if method == "command":
            return await self._command(msgspec.msgpack.decode(params, type=CommandParams))
        if method == "poll":
            return msgspec.msgpack.encode(await self._poll(msgspec.msgpack.decode(params, type=PollParams)))
        if method == "image":
            return msgspec.msgpack.encode(self.feed.image_chunk(connection))
        if method == "heartbeat":
            return msgspec.msgpack.encode(
                self._heartbeat(connection, msgspec.msgpack.decode(params, type=HeartbeatParams))
            )
        if method == "session":
            return msgspec.msgpack.encode(await self._session())
        if method in BALANCE_METHODS:
            return msgspec.msgpack.encode(await self._ask_balancer(method))
        if method == "status":
            return msgspec.msgpack.encode(self.status())
        if method == "transfer":
            await self._transfer(msgspec.msgpack.decode(params, type=TransferParams))
            return b"\xc0"
        if method == "change":
            await self._change(msgspec.msgpack.decode(params, type=ChangeParams))
            return b"\xc0"
        raise InvalidInput(f"there is no method {method[:50]!r}", hint="the caller is newer than this controller")

    async def _command(self, params: CommandParams) -> bytes:
        term = self._require_active()
        if len(memoryview(params.command)) > c.MAX_COMMAND_BYTES - 1024:
            raise InvalidInput(f"a command exceeds the limit of {c.MAX_COMMAND_BYTES} bytes")
        command = c.decode_command(params.command)
        if type(command) in c.INTERNAL:
            raise InvalidInput(f"{type(command).__name__} is for the controller itself")
        if not params.client_id:
            raise InvalidInput("a command needs a dedupe id", hint="call `session` first")
        if isinstance(command, c.CreateTopic | c.CreatePartitions):
            command = msgspec.structs.replace(command, loads=self._balancer.weights())
        result = await self._propose_envelope(command, term, params.client_id, params.sequence, params.done)
        if isinstance(command, c.DrainBroker | c.HandOver) and any(one.draining for one in self.image.brokers.values()):
            self._lifecycle.hurry()  # the next partitions may go
        if isinstance(command, c.HandOver):
            self._balancer.hurry()
        return result

    async def _ask_balancer(self, method: str) -> dict[str, Any]:
        self._require_active()
        if method == "scale":
            return self._balancer.scale()
        if method == "balance-plan":
            return self._balancer.plan()
        return await self._balancer.carry_out() if method == "balance" else self._balancer.status()

    async def _session(self) -> SessionReply:
        """Unique: one term has one active controller, and this process counts within it."""
        term = self._require_active()
        return SessionReply(f"{term}.{self._node_id}.{next(self._client_numbers)}", self.image.cluster_id)

    async def _transfer(self, params: TransferParams) -> None:
        self._require_active()
        members = self._quorum()
        if params.node_id is not None and params.node_id not in members:
            raise InvalidInput(f"node {params.node_id} is not a member of the quorum {sorted(members)}")
        if params.node_id != self._node_id:
            await self._consensus.transfer(params.node_id)

    def _quorum(self) -> dict[int, str]:
        members = self._consensus.members
        if not members:
            raise InvalidInput(
                "this cluster has a single controller without a quorum",
                hint="start it with controller.members and controller.secret_file; `tidelog up --brokers 3` does",
            )
        return members

    async def _change(self, params: ChangeParams) -> None:
        self._require_active()
        members = self._quorum()
        timeout_s = self._settings.command_timeout_ms / 1000
        if params.operation == "add":
            node_id, address = parse_member(f"{params.node_id}@{params.address}")
            if members.get(node_id) == address:
                return
            self._check_newcomer(members, node_id, address)
            await self._meet(node_id, address)
            await self._consensus.change_membership(MembershipChange("add", node_id, address), timeout_s)
        elif params.operation == "rem":
            if params.node_id not in members:
                return
            if len(members) == 1:
                raise InvalidInput("the last controller cannot be removed")
            if params.node_id == self._node_id:
                await self._consensus.transfer(None)
                raise self._not_active(f"controller {self._node_id} has handed over before it is removed; ask again")
            change = MembershipChange("rem", params.node_id, members[params.node_id])
            await self._consensus.change_membership(change, timeout_s)
        else:
            raise InvalidInput(f"there is no operation {params.operation[:20]!r}")
        self._lifecycle.hurry()

    @staticmethod
    def _check_newcomer(members: dict[int, str], node_id: int, address: str) -> None:
        if node_id in members:
            raise InvalidInput(
                f"controller {node_id} is a member at {members[node_id]}",
                hint="remove it first; to change its address, change controller.members and restart the nodes",
            )
        if address in members.values():
            raise InvalidInput(f"another controller has the address {address}")
        if len(members) >= MAX_MEMBERS:
            raise InvalidInput(f"a quorum has at most {MAX_MEMBERS} members")

    async def _meet(self, node_id: int, address: str) -> None:
        """The new member must answer, and be who it should be: adding one that does not costs availability."""
        channel = RpcChannel([split_address(address)], self._network, self._credentials)
        try:
            raw = await channel.call("status", None, MEET_S)
        except TidelogError as error:
            raise InvalidInput(
                f"controller {node_id} does not answer at {address}: {error.message}",
                hint="start its process first, with this quorum and itself in controller.members",
            ) from error
        finally:
            await channel.close()
        found = msgspec.msgpack.decode(raw, type=dict[str, Any])
        if found["node"] != node_id:
            raise InvalidInput(f"node {found['node']} answers at {address}, not {node_id}")
        if found["cluster_id"] not in ("", self.image.cluster_id):
            raise InvalidInput(f"controller {node_id} belongs to another cluster, {found['cluster_id']}")

    async def _refuses(self, address: str) -> bool:
        return await refuses(self._network, *split_address(address), ASK_S)

    def _heartbeat(self, connection: RpcConnection, params: HeartbeatParams) -> HeartbeatReply | None:
        """Taken by every member, so that the next active one knows who lives; a follower's image may be behind."""
        record = self.image.brokers.get(params.broker_id)
        known = record.registration_epoch if record is not None else 0
        if not self.is_active and (record is None or known < params.registration_epoch):
            return None
        if record is None or known != params.registration_epoch:
            current = record.registration_epoch if record is not None else None
            raise StaleBrokerEpoch(
                f"registration {params.registration_epoch} of broker {params.broker_id} is not current ({current})"
            )
        now_s = self._clock.monotonic()
        age_s = params.age_ms / 1000
        self._sessions.heartbeat(params.broker_id, params.registration_epoch, connection, now_s, age_s)
        if params.leaving:
            self._sessions.leaving(params.broker_id, now_s)
        if params.unsaved_bytes >= 0:
            self._unsaved[params.broker_id] = (params.unsaved_bytes, self._clock.time_ms())
        if params.load is not None:
            self._balancer.loads.note(params.broker_id, params.registration_epoch, params.load, now_s)
        if self.is_active and not record.alive:
            self._lifecycle.hurry()
        return self._balancer.told() if self.is_active else None

    def _require_leader(self) -> None:
        """A member that knows no leader may be cut off: who follows it should follow another."""
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
