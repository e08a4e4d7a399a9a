"""Quorums of `RaftConsensus` members in one process, over real sockets: each pair of members has its own path, which a
test can cut one way or both."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.controller.controller_helpers import until
from tidelog.controller.raft.quorum import MembershipChange
from tidelog.controller.raft.thread import RaftConsensus, RaftSettings
from tidelog.controller.rpc.connection import RpcConnection
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.network import Listener, TcpNetwork

SECRET = b"a secret that nobody else has"


class Applied:
    """A state machine that remembers the numbered commands it was given; a number counts once, as with dedupe ids."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}

    def apply(self, blob: bytes, index: int) -> bytes:
        number = int(blob.split(b" ", 1)[0])
        self.numbers[number] = self.numbers.get(number, 0) + 1
        return b"done %d" % number

    def flush(self) -> None:
        pass

    def level(self) -> int:
        return 1

    def freeze(self) -> Callable[[], bytes]:
        data = json.dumps(sorted(self.numbers.items())).encode()
        return lambda: data

    def load(self, data: bytes) -> None:
        self.numbers = dict(json.loads(data))


class Route:
    """A TCP path from one member to another that can be cut: it then drops what is open and takes nothing new."""

    def __init__(self) -> None:
        self.is_cut = False
        self.is_frozen = False
        self.rest_s = 0.0
        """After each 64 KiB: how slow it is."""
        self.target: tuple[str, int] | None = None
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self.is_cut or self.target is None:
                return
            onward_reader, onward = await asyncio.open_connection(*self.target)
            try:
                await asyncio.gather(self._copy(reader, onward), self._copy(onward_reader, writer))
            finally:
                onward.close()
        except (OSError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            while self.is_frozen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if self.rest_s:
                await asyncio.sleep(self.rest_s * len(data) / (1 << 16))
            writer.write(data)
            await writer.drain()
        writer.close()

    def cut(self) -> None:
        self.is_cut = True
        for task in list(self._tasks):
            task.cancel()

    def heal(self) -> None:
        self.is_cut = False

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()


class Member:
    """One member with its listener."""

    def __init__(self, world: QuorumWorld, node_id: int, secret: bytes) -> None:
        self.node_id = node_id
        self.machine = Applied()
        self._world = world
        self._credentials = Credentials(secret, node_id)
        self._listener: Listener | None = None
        self.raft: RaftConsensus

    async def start(self, members: dict[int, str], **settings: object) -> None:
        directory = self._world.directory / str(self.node_id)
        self.raft = RaftConsensus(
            RaftSettings(directory=directory, credentials=self._credentials, members=members, **settings),  # type: ignore[arg-type]
            SystemClock(),
        )

        async def nothing(connection: RpcConnection, method: str, params: object) -> bytes:
            return b"\xc0"

        def accept() -> RpcConnection:
            return RpcConnection(handler=nothing, credentials=self._credentials, adopt_peer=self.raft.adopt_peer)

        self._listener = await TcpNetwork().listen(accept, "127.0.0.1", 0)
        self._world.listening(self.node_id, self._listener.address)
        await self.raft.start(self.machine)

    async def stop(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        await self.raft.close()


class QuorumWorld:
    """Members by id, and a path for each ordered pair."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.settings = settings
        self.members: dict[int, Member] = {}
        self.paths: dict[tuple[int, int], Route] = {}
        self._addresses: dict[tuple[int, int], str] = {}
        self.bound: dict[int, tuple[str, int]] = {}

    def listening(self, node_id: int, address: tuple[str, int]) -> None:
        self.bound[node_id] = address
        for (_, target), path in self.paths.items():
            if target == node_id:
                path.target = address

    async def address(self, source: int, target: int) -> str:
        """Where `source` reaches `target`."""
        if (source, target) not in self.paths:
            path = self.paths[source, target] = Route()
            path.target = self.bound.get(target)
            self._addresses[source, target] = await path.start()
        return self._addresses[source, target]

    async def start(self, node_id: int, ids: tuple[int, ...] = (1, 2, 3), secret: bytes = SECRET) -> Member:
        members = {each: await self.address(node_id, each) for each in ids}
        member = self.members[node_id] = Member(self, node_id, secret)
        await member.start(members, **self.settings)
        return member

    async def stop(self, node_id: int) -> None:
        await self.members.pop(node_id).stop()

    def isolate(self, node_id: int, *, inward: bool = True, outward: bool = True) -> None:
        for (source, target), path in self.paths.items():
            if (outward and source == node_id) or (inward and target == node_id):
                path.cut()

    def heal(self) -> None:
        for path in self.paths.values():
            path.heal()

    def leaders(self) -> list[int]:
        return [node_id for node_id, member in self.members.items() if member.raft.role.is_leader]

    async def leader(self, among: set[int] | None = None) -> Member:
        """The one leader among some members, when there is one."""
        found: list[int] = []

        def one() -> bool:
            found[:] = [each for each in self.leaders() if among is None or each in among]
            return len(found) == 1

        await until(one)
        return self.members[found[0]]

    async def propose(self, number: int, padding: int = 0) -> None:
        """Until some leader has committed it: more than once if an answer was lost."""

        async def attempt() -> None:
            await (await self.leader()).raft.propose(b"%d " % number + bytes(padding), 3)

        await self.retry(attempt)

    async def retry(self, attempt: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(TidelogError):
                    await attempt()
                    return
                await asyncio.sleep(0.05)

    async def change(self, operation: str, node_id: int) -> None:
        async def attempt() -> None:
            leader = await self.leader()
            address = await self.address(leader.node_id, node_id)
            directory = ""
            if operation == "add":
                directory = str(self.members[node_id].raft.status()["directory"])
            change = MembershipChange(operation, node_id, address, directory)  # type: ignore[arg-type]
            await leader.raft.change_membership(change, 5)

        await self.retry(attempt)

    async def agree(self, numbers: set[int], among: set[int] | None = None) -> None:
        """Until the members have applied exactly these."""

        def same() -> bool:
            return all(
                set(member.machine.numbers) == numbers
                for node_id, member in self.members.items()
                if among is None or node_id in among
            )

        await until(same)

    async def close(self) -> None:
        for node_id in list(self.members):
            await self.stop(node_id)
        for path in self.paths.values():
            await path.close()
