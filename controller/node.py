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
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from controller import commands as c
from controller.consensus import Consensus, Role
from controller.errors import NotController, StaleBrokerEpoch, from_wire
from controller.feed import DeltaFeed
from controller.image import Delta, Image
from controller.lifecycle import DeleteObjects, Lifecycle
from controller.raft import RaftConsensus, RaftSettings
from controller.replica import Replica
from controller.rpc import CommandParams, HeartbeatParams, PollParams, PollReply, RpcConnection, SessionReply
from controller.sessions import BrokerSessions
from controller.settings import ControllerSettings
from runtime.clock import Clock
from runtime.errors import Fenced, InvalidInput, StorageFailed, TidelogError
from runtime.network import Listener, Network
from runtime.tasks import Backoff, TaskSet

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4_096
MAX_WAIT_MS = 30_000
"""Bound on a long poll."""
ADDRESS_FILE = "address"
"""In the controller's directory: `host:port` of the RPC server, for the tools of this machine."""


class ControllerNode:
    """See the module. `directory` holds journal, snapshot and the address file; only one process may use it.

    `delete_objects` deletes destroyed objects from the bucket (without it they stay, and stay known). `on_failed` is
    called when this controller cannot go on (its disk failed, or a defect ended a background task).
    """

    def __init__(
        self,
        *,
        node_id: int,
        directory: Path,
        settings: ControllerSettings,
        network: Network,
        clock: Clock,
        rng: random.Random,
        delete_delay_ms: int = 60_000,
        delete_objects: DeleteObjects | None = None,
        on_failed: Callable[[Exception], None] | None = None,
        consensus: Consensus | None = None,
    ) -> None:
        self._node_id = node_id
        self._directory = directory
        self._settings = settings
        self._network = network
        self._clock = clock
        self._rng = rng
        self._delete_delay_ms = delete_delay_ms
        self._consensus = consensus or RaftConsensus(
            RaftSettings(directory=directory, snapshot_entries=settings.snapshot_entries), clock
        )
        self._consensus.set_on_role(self._role_changed)
        self._consensus.set_on_failed(self._consensus_failed)
        self._feed = DeltaFeed()
        self._on_failed = on_failed or (lambda error: None)
        self._tasks = TaskSet("controller", self._task_failed)
        self._closing = False
        self._sessions = BrokerSessions(settings.session_timeout_ms / 1000)
        self._lifecycle = Lifecycle(
            image=lambda: self._feed.image,
            sessions=self._sessions,
            propose=self._propose_own,
            is_active=lambda: self._active_term is not None,
            clock=clock,
            delete=delete_objects,
            reelect_timeout_ms=settings.reelect_timeout_ms,
        )
        self._active_term: int | None = None
        self._active = asyncio.Event()
        self._activation: asyncio.Task[None] | None = None
        self._client_numbers = itertools.count(1)
        self._connections: set[RpcConnection] = set()
        self._listener: Listener | None = None

    @property
    def image(self) -> Image:
        """This member's copy of the metadata."""
        return self._feed.image

    @property
    def address(self) -> tuple[str, int]:
        """Where the RPC server listens."""
        assert self._listener is not None, "not started"
        return self._listener.address

    @property
    def is_active(self) -> bool:
        """Whether commands are accepted here."""
        return self._active_term is not None

    async def start(self) -> None:
        """Load, listen, take part. Raises `CorruptData`, `StorageFailed`, `ConfigError`, `AddressInUse`."""
        loop = asyncio.get_running_loop()
        self._listener = await self._network.listen(self._accept, self._settings.host, self._settings.port)
        try:
            await self._consensus.start(Replica(loop, self._take_deltas, self._take_image))
            self._write_address()
        except (TidelogError, OSError):
            await self._listener.close()
            await self._consensus.close()
            raise
        self._tasks.spawn(self._lifecycle.run(), "lifecycle")
        log.info("controller started", extra={"node": self._node_id, "address": "{}:{}".format(*self.address)})

    def _write_address(self) -> None:
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
        await self._feed.wait_newer(result.version - 1, 10.0)
        if self.image.version < result.version:
            raise NotController("the metadata did not reach this member in time")
        return msgspec.msgpack.decode(result.value, type=int)

    async def close(self) -> None:
        """Stop serving; everything acknowledged is durable."""
        self._closing = True
        self._deactivate()
        if self._listener is not None:
            await self._listener.close()
        await self._tasks.close()
        for connection in list(self._connections):
            await connection.close()
        await self._consensus.close()

    def status(self) -> dict[str, int | float | str | bool]:
        """Facts for operators."""
        return {
            "node": self._node_id,
            "active": self.is_active,
            "version": self.image.version,
            "cluster_id": self.image.cluster_id,
            "connections": len(self._connections),
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
        self._sessions.clear()
        self._client_numbers = itertools.count(1)
        self._active_term = term
        self._active.set()
        self._lifecycle.hurry()
        log.info("this controller is active", extra={"node": self._node_id, "term": term})

    def _require_active(self) -> int:
        if self._active_term is None:
            leader = self._consensus.role.leader
            raise NotController("this controller is not active", hint=f"the leader is {leader}" if leader else None)
        return self._active_term

    async def _propose(self, command: c.AnyCommand, term: int) -> c.Result:
        data = await self._propose_envelope(command, term, "", 0, 0)
        result = c.decode_result(data)
        if result.error is not None:
            raise from_wire(result.error)
        return result

    async def _propose_own(self, command: c.AnyCommand) -> None:
        result = await self._propose(command, self._require_active())
        await self._feed.wait_newer(result.version - 1, 1.0)

    async def _propose_envelope(self, command: c.AnyCommand, term: int, client: str, sequence: int, done: int) -> bytes:
        now_ms = self._clock.time_ms()
        envelope = c.Envelope(c.FORMAT_VERSION, term, now_ms, client, sequence, done, command)
        return await self._consensus.propose(c.encode(envelope), self._settings.command_timeout_ms / 1000)

    # What the consensus thread posts

    def _take_deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._feed.append(delta)

    def _take_image(self, image: Image) -> None:
        self._feed.reset(image)

    # RPC

    def _accept(self) -> RpcConnection:
        return RpcConnection(handler=self._handle, on_made=self._made, on_lost=self._lost)

    def _made(self, connection: RpcConnection) -> None:
        self._connections.add(connection)
        if len(self._connections) > MAX_CONNECTIONS:
            log.warning("too many connections; one is refused", extra={"peer": connection.peer})
            connection.abort()

    def _lost(self, connection: RpcConnection) -> None:
        self._connections.discard(connection)
        self._feed.forget(connection)
        if self._sessions.connection_closed(connection):
            self._lifecycle.hurry()
        if not self._closing:
            self._tasks.spawn(connection.close(), "closed-connection")

    async def _handle(self, connection: RpcConnection, method: str, params: msgspec.Raw) -> bytes:
        if method == "command":
            return await self._command(msgspec.msgpack.decode(params, type=CommandParams))
        if method == "poll":
            return msgspec.msgpack.encode(await self._poll(msgspec.msgpack.decode(params, type=PollParams)))
        if method == "image":
            return msgspec.msgpack.encode(self._feed.image_chunk(connection))
        if method == "heartbeat":
            self._heartbeat(connection, msgspec.msgpack.decode(params, type=HeartbeatParams))
            return b"\xc0"
        if method == "session":
            return msgspec.msgpack.encode(await self._session())
        if method == "status":
            return msgspec.msgpack.encode(self.status())
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
        return await self._propose_envelope(command, term, params.client_id, params.sequence, params.done)

    async def _session(self) -> SessionReply:
        """Unique: one term has one active controller, and this process counts within it."""
        term = self._require_active()
        return SessionReply(f"{term}.{self._node_id}.{next(self._client_numbers)}", self.image.cluster_id)

    def _heartbeat(self, connection: RpcConnection, params: HeartbeatParams) -> None:
        self._require_active()
        record = self.image.brokers.get(params.broker_id)
        if record is None or record.registration_epoch != params.registration_epoch:
            current = record.registration_epoch if record is not None else None
            raise StaleBrokerEpoch(
                f"registration {params.registration_epoch} of broker {params.broker_id} is not current ({current})"
            )
        now_s = self._clock.monotonic()
        self._sessions.heartbeat(params.broker_id, params.registration_epoch, connection, now_s)
        if not record.alive:
            self._lifecycle.hurry()

    async def _poll(self, params: PollParams) -> PollReply:
        cluster_id = self.image.cluster_id
        if params.cluster_id and cluster_id and params.cluster_id != cluster_id:
            raise Fenced(
                f"the caller belongs to cluster {params.cluster_id}; this is {cluster_id}",
                hint="the controller's directory was replaced, or the endpoint is another cluster's",
            )
        await self._feed.wait_newer(params.from_version, max(0, min(params.wait_ms, MAX_WAIT_MS)) / 1000)
        deltas = self._feed.after(params.from_version)
        return PollReply(self.image.cluster_id, deltas is None, deltas or [], self.image.version)
