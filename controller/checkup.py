"""What a node finds out about itself and its surroundings when an operator asks (`tidelog doctor`).

A checkup syncs a nameless file on the node's disks, tries each right in the bucket (brokers), and tries the addresses
of all other nodes: those that brokers have registered, and those of the quorum. A caller names none, so nobody can have
a node connect to anything else. One checkup runs at a time: who asks meanwhile gets the same one, and who asks right
after it, its report.

Brokers answer by admin HTTP, controllers by RPC. Entry: `Checkup`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from tidelog.controller.image.image import Image
from tidelog.controller.model.addresses import split_address
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import InvalidInput, TidelogError
from tidelog.runtime.facts.disk import DiskFacts, DiskProbes
from tidelog.runtime.facts.node import NodeFacts, OwnFacts, own_facts
from tidelog.runtime.facts.reach import AddressTry, ClockSample, NodeAddress, Tries
from tidelog.runtime.facts.stacks import stacks
from tidelog.runtime.network import Network
from tidelog.storage.bucket.rights import RightsFacts

KEPT_S: Final = 2.0
"""A report that is no older answers a further question."""

CHECKUP_METHODS: Final = frozenset({"node", "checkup", "stacks"})
"""What may be asked; as RPC, the methods' names."""

TryRights = Callable[[], Awaitable[RightsFacts]]


class ControllerTry(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller answered to this node."""

    node: int
    address: str
    error: str = ""
    release: str = ""
    """Empty: an older version, which does not tell it."""
    levels: list[int] = []
    clock: ClockSample | None = None


class CheckupReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one checkup found."""

    node: int
    disks: list[DiskFacts] = []
    rights: RightsFacts | None = None
    addresses: list[AddressTry] = []
    controllers: list[ControllerTry] = []


@dataclass(frozen=True, slots=True)
class CheckupWorld:
    """What a checkup needs of its node."""

    node: int
    roles: Sequence[str]
    network: Network
    clock: Clock
    image: Callable[[], Image]
    controllers: Callable[[], Sequence[tuple[int, str]]]
    """The members of the quorum, each with its address."""
    ask_status: Callable[[str], Awaitable[dict[str, Any]]]
    """Returns what the controller at an address says of itself. Raises `TidelogError`."""
    own: OwnFacts = field(default_factory=OwnFacts)
    try_rights: TryRights | None = None
    """None: this node does not try the bucket."""
    between_brokers: Network | None = None


class Checkup:
    """The checkups of one node."""

    def __init__(self, world: CheckupWorld) -> None:
        self._world = world
        self._disks = DiskProbes(world.own.folders, world.clock)
        self._running: asyncio.Task[CheckupReport] | None = None
        self._last: tuple[float, CheckupReport] | None = None

    async def answer(self, method: str) -> Any:
        """Answer a question by its name: `node`, `checkup` or `stacks`. Raises `InvalidInput`."""
        if method == "node":
            return msgspec.to_builtins(await self.facts())
        if method == "checkup":
            return msgspec.to_builtins(await self.run())
        if method == "stacks":
            return stacks()
        raise InvalidInput(f"there is no question {method[:50]!r}")

    def clock(self) -> dict[str, Any]:
        """Who this is, and what time it has."""
        world = self._world
        return {"node": world.node, "cluster_id": world.image().cluster_id, "time_ms": world.clock.time_ms()}

    async def facts(self) -> NodeFacts:
        """Return what this node knows of itself. Files are looked at in a thread."""
        world, image = self._world, self._world.image()
        return await asyncio.to_thread(
            own_facts, world.node, world.roles, world.own, world.clock, image.cluster_id, table_sizes(image)
        )

    async def run(self) -> CheckupReport:
        """Make a checkup, or take part in the one that runs."""
        now_s = self._world.clock.monotonic()
        if self._last is not None and now_s - self._last[0] < KEPT_S:
            return self._last[1]
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run(), name="checkup")
            self._running.add_done_callback(self._done)
        return await asyncio.shield(self._running)

    def _done(self, task: asyncio.Task[CheckupReport]) -> None:
        self._running = None
        if not task.cancelled() and task.exception() is None:
            self._last = (self._world.clock.monotonic(), task.result())

    async def close(self) -> None:
        """End a checkup that runs."""
        if (task := self._running) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> CheckupReport:
        world = self._world
        tries = Tries(world.network, world.clock, between_brokers=world.between_brokers)
        addresses, controllers, rights = await asyncio.gather(
            tries.run(broker_addresses(world.image(), besides=world.node)),
            asyncio.gather(*(self._ask(*each) for each in world.controllers())),
            self._rights(),
        )
        disks = await self._disks.run()  # last: the bucket may be on the same disk
        return CheckupReport(
            node=world.node, disks=disks, rights=rights, addresses=addresses, controllers=list(controllers)
        )

    async def _rights(self) -> RightsFacts | None:
        return await self._world.try_rights() if self._world.try_rights is not None else None

    async def _ask(self, node: int, address: str) -> ControllerTry:
        clock = self._world.clock
        before_ms = clock.time_ms()
        try:
            told = await self._world.ask_status(address)
        except TidelogError as failure:
            return ControllerTry(node=node, address=address, error=failure.message)
        sample = ClockSample(before_ms, told["time_ms"], clock.time_ms()) if "time_ms" in told else None
        wrong = "" if node in (told["node"], -1) else f"controller {told['node']} answers there"
        return ControllerTry(
            node=told["node"] if node == -1 else node,
            address=address,
            error=wrong,
            release=told.get("release", ""),
            levels=list(told.get("levels") or ()),
            clock=sample,
        )


def broker_addresses(image: Image, *, besides: int) -> list[NodeAddress]:
    """Return the addresses that living brokers other than `besides` have registered."""
    found = []
    for broker in sorted(image.brokers.values(), key=lambda each: each.id):
        if broker.id == besides or not broker.alive:
            continue
        found.append(NodeAddress("kafka", broker.id, broker.host, broker.port))
        admin = urlsplit(broker.admin_url)
        if admin.hostname and admin.port:
            found.append(NodeAddress("admin", broker.id, admin.hostname, admin.port))
        if broker.peer_address:
            found.append(NodeAddress("peer", broker.id, *split_address(broker.peer_address)))
    return found


def table_sizes(image: Image) -> dict[str, int]:
    """Return the version of the metadata and the number of rows of its tables."""
    tables = ("brokers", "replica_sets", "topics", "streams", "objects", "leases", "configs", "kv")
    return {"version": image.version, **{name: len(getattr(image, name)) for name in tables}}
