"""Short ways to drive a `ControllerState` and a `ControllerNode` in tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from controller import commands as c
from controller.client import ControllerClient
from controller.errors import from_wire
from controller.image import Delta, Image
from controller.node import ControllerNode
from controller.settings import ControllerSettings
from controller.state import ControllerState
from runtime.clock import SystemClock
from runtime.network import TcpNetwork
from storage.managers import CommitObjects, NewObject, pack_ranges

TOPIC = bytes(range(16))
DELAY_MS = 1_000


class Driver:
    """Applies commands to a state and mirrors its mutations into an image, as a follower would."""

    def __init__(self) -> None:
        self.state = ControllerState()
        self.image = Image()
        """Kept by deltas as they are sent: it finds the streams' committed ends itself."""
        self.local_image = Image()
        """Kept by deltas of this process, which have those rows ready."""
        self.index = 0
        self.now_ms = 1_000
        self.term = 1
        self.log: list[c.Envelope] = []
        self.run(c.BecomeActive(0, 1, "cluster", DELAY_MS))

    def envelope(self, command: c.AnyCommand, client: str = "", sequence: int = 0, done: int = 0) -> c.Envelope:
        return c.Envelope(c.FORMAT_VERSION, self.term, self.now_ms, client, sequence, done, command)

    def apply(self, envelope: c.Envelope) -> c.Result:
        self.index += 1
        self.log.append(envelope)
        envelope = c.decode_envelope(c.encode(envelope))  # what the log would have carried
        applied = self.state.apply(envelope, self.index)
        if applied.mutations:
            self.image.apply(Delta(self.index, applied.mutations))
            self.local_image.apply(Delta(self.index, applied.mutations, applied.ends))
        return c.decode_result(applied.result)

    def run(self, command: c.AnyCommand, kind: Any = Any) -> Any:
        """The value of a command, or the error it was refused with, raised."""
        result = self.apply(self.envelope(command))
        if result.error is not None:
            raise from_wire(result.error)
        return msgspec.msgpack.decode(result.value, type=kind)

    def broker(self, broker_id: int = 0, incarnation: str = "a") -> int:
        """Register and elect; the master epoch."""
        self.run(c.RegisterBroker(broker_id, "check", incarnation, "host", 9092, "", ""), int)
        return int(self.run(c.Elect(broker_id, broker_id))[4])

    def topic(self, partitions: int = 1, name: str = "t", topic_id: bytes = TOPIC) -> list[int]:
        """Create a topic; the first stream of each partition."""
        self.run(c.CreateTopic(topic_id, name, partitions, {}, False, False, None))
        return [each.first_stream for each in self.image.partitions(topic_id)]

    def prepare(self, count: int = 1, ttl_ms: int = 10_000) -> int:
        return int(self.run(c.PrepareObjects(count, ttl_ms), int))

    def commit(self, epoch: int, wal: tuple[int, int], *objects: NewObject, replica_set: int = 0) -> None:
        self.run(c.Commit(CommitObjects(replica_set, epoch, *wal, tuple(objects))))


def new_object(object_id: int, *ranges: tuple[int, int, int]) -> NewObject:
    return NewObject(object_id, 1, 100, pack_ranges(ranges))


def make_node(directory: Path, **kwargs: Any) -> ControllerNode:
    settings = kwargs.pop("settings", None) or ControllerSettings()
    return ControllerNode(
        node_id=0,
        directory=directory,
        settings=settings,
        network=TcpNetwork(),
        clock=SystemClock(),
        rng=random.Random(),
        **kwargs,
    )


def make_client(*addresses: tuple[str, int], **kwargs: Any) -> ControllerClient:
    return ControllerClient(list(addresses), TcpNetwork(), SystemClock(), random.Random(), **kwargs)


async def until(
    condition: Callable[[], bool], timeout_s: float = 60.0, nudge: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait for a condition, with a deadline; `nudge` is done between looks."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            if nudge is not None:
                await nudge()
            await asyncio.sleep(0.005)
