"""The controller's RPC port end to end: bytes into a connection of a real controller node on a log in memory.

Input: a byte that says how the stream is cut and whether the rest is raw bytes or messages to be framed (each behind a
two-byte length), then those. The oracle: no error logged; every response decodes; the state can be dumped and loaded.
"""

from __future__ import annotations

import asyncio
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tests.fuzz import samples
from tests.fuzz.base import Mutate, flip
from tests.fuzz.transport import FuzzNetwork, FuzzTransport
from tests.fuzz.world import Stage
from tests.support.loops import LoopClock
from tidelog.controller.image.replica import Replica
from tidelog.controller.image.transfer import ImageParams
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.raft.consensus import MemoryConsensus, StateMachine
from tidelog.controller.rpc.connection import (
    REQUEST,
    RESPONSE,
    CommandParams,
    HeartbeatParams,
    PollParams,
    UnknownObjectsParams,
)
from tidelog.runtime.errors import CorruptData
from tidelog.runtime.wire import HEADER_BYTES, FrameDecoder, encode_frame

INPUTS_A_WORLD = 500
CHUNKS = (1 << 20, 1, 5, 64)
_RAW = 0x80
_PATIENT = 0x70
"""With one of these bits, wait until even a long poll has ended."""


class _WatchedConsensus(MemoryConsensus):
    """Consensus that knows the state of the machine it was started with."""

    async def start(self, machine: StateMachine) -> None:
        assert isinstance(machine, Replica)
        self.state = machine.state
        await super().start(machine)


class Rpc:
    """See the module."""

    def __init__(self) -> None:
        self._stage = Stage()
        self._network = FuzzNetwork()
        self._node: ControllerNode | None = None
        self._consensus = _WatchedConsensus()
        self._place = tempfile.TemporaryDirectory(prefix="tidelog-fuzz-")
        self.history: list[bytes] = []

    def _message(self, rng: random.Random) -> bytes:
        others = ("poll", "image", "unknown-objects", "heartbeat", "session", "x")
        method = rng.choice(("command", "command", "command", "command", *others))
        if method == "command":
            kinds = c.AnyCommand.__args__
            body = msgspec.Raw(samples.command(rng.choice(kinds), rng))
            params: Any = CommandParams(rng.choice(("a", "b", "")), rng.randint(0, 9), rng.randint(0, 9), body)
        elif method == "poll":
            params = PollParams(
                rng.randint(-1, 30), rng.choice((0, 5, -1, 1 << 40)), rng.choice(("", "x")), rng.randint(1, 3)
            )
        elif method == "heartbeat":
            params = HeartbeatParams(rng.randint(-1, 3), rng.randint(-1, 9))
        elif method == "image":
            params = ImageParams(rng.choice((2, 2, 2, 1)), rng.randint(0, 2), rng.choice((0, 0, 5)))
        elif method == "unknown-objects":
            params = UnknownObjectsParams(rng.randint(-1, 30), tuple(range(rng.randint(0, 5))))
        else:
            params = None
        return msgspec.msgpack.encode([rng.randint(0, 1000), method, params])

    def _talk(self, rng: random.Random, most: int) -> bytes:
        return b"".join(_short(self._message(rng)) for _ in range(rng.randint(1, most)))

    def seeds(self) -> list[bytes]:
        """Conversations of all methods and commands, framed here and framed already."""
        rng = random.Random(4)
        talks = [b"\x00" + self._talk(rng, 6) for _ in range(80)]
        raw = [bytes([_RAW]) + encode_frame(REQUEST, self._message(rng)) for _ in range(10)]
        return talks + raw

    def mutate(self, data: bytes, limit: int, rng: random.Random, mutate: Mutate) -> bytes:
        """More messages, a damaged one, or libFuzzer's idea."""
        mode = data[:1] or b"\x00"
        messages = [] if mode[0] & _RAW else _cut(data[1:])
        choice = rng.randrange(6)
        if choice == 0:
            return (bytes([rng.choice((0, 1, 2, 3, _PATIENT))]) + self._talk(rng, 4))[:limit]
        if choice == 1 and messages:
            return (mode + data[1:] + self._talk(rng, 2))[:limit]
        if choice <= 3 and messages:
            at = rng.randrange(len(messages))
            messages[at] = flip(messages[at], rng) if choice == 2 else mutate(messages[at], len(messages[at]) + 32)
            return (mode + b"".join(map(_short, messages)))[:limit]
        return (mode + mutate(data[1:], limit - 1))[:limit]

    def one(self, data: bytes) -> None:
        """One connection's life."""
        if not data:
            return
        if len(self.history) >= INPUTS_A_WORLD:
            self._end_world()
        self.history.append(data)
        self._stage.run(self._connection(data))

    async def _connection(self, data: bytes) -> None:
        if self._node is None:
            self._consensus = _WatchedConsensus()
            self._node = ControllerNode(
                ControllerIdentity(0, Path(self._place.name)),
                ControllerSections(ControllerSettings()),
                ControllerWorld(self._network, LoopClock(), random.Random(1), consensus=self._consensus),
            )
            await self._node.start()
            await self._node.wait_active(10)
        protocol: Any = self._network.factory()
        transport = FuzzTransport(protocol)
        protocol.connection_made(transport)
        rest = data[1:]
        if not data[0] & _RAW:
            rest = b"".join(encode_frame(REQUEST, message) for message in _cut(rest))
        step = CHUNKS[data[0] % len(CHUNKS)]
        for at in range(0, len(rest), step):
            if not transport.open:
                break
            protocol.data_received(rest[at : at + step])
        await asyncio.sleep(40 if data[0] & _PATIENT else 0.1)
        decoder = FrameDecoder()
        for frame in decoder.feed(bytes(transport.written)):
            assert frame.kind == RESPONSE
            _, error, _ = msgspec.msgpack.decode(frame.payload)
            assert error is None or isinstance(error, list), error
        assert decoder.buffered_bytes == 0 < HEADER_BYTES
        transport.close()
        await asyncio.sleep(0)

    def _end_world(self) -> None:
        if self._node is not None:
            node, self._node = self._node, None
            state = self._consensus.state
            self._stage.run(node.close())
            copy = ControllerState()
            try:
                copy.load(state.dump())
            except CorruptData as error:
                raise AssertionError(f"the state does not survive a snapshot: {error}") from error
            assert copy.dump() == state.dump()
        self.history.clear()

    def close(self) -> None:
        """End the last world, with its checks."""
        self._end_world()
        self._stage.close()
        self._place.cleanup()


def _short(message: bytes) -> bytes:
    return struct.pack(">H", len(message) & 0xFFFF) + message[:0xFFFF]


def _cut(data: bytes) -> list[bytes]:
    messages, at = [], 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from(">H", data, at)
        messages.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return messages
