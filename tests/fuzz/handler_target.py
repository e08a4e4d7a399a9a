"""The Kafka listener end to end: bytes into a connection, real handlers on storage in memory, responses out.

Input: a byte that says how the stream is cut into reads, then what a client would send. The oracle: no error logged,
every response decodes (by kio) as an answer to its request, and when the world ends no memory is held.
The world lives for some inputs, so that they meet what earlier ones left; `history` has them for a replay.
"""

from __future__ import annotations

import asyncio
import random
import struct
from typing import Any

from tests.fuzz import samples
from tests.fuzz.base import Mutate, flip
from tests.fuzz.transport import FuzzNetwork, FuzzTransport
from tests.fuzz.world import Stage
from tests.support.kafka_client import decode_response
from tests.support.kafka_world import KafkaWorld, batch
from tests.support.loops import LoopClock
from tidelog.broker.kafka.apis import all_apis
from tidelog.broker.kafka.connection import Connection
from tidelog.broker.settings import KafkaSettings
from tidelog.runtime.errors import TidelogError

INPUTS_A_WORLD = 300
PATIENCE_S = 400.0
"""Virtual seconds that an input's requests may take: the longest rebalance of a sample and more."""
PRODUCE, API_VERSIONS = 0, 18
CHUNKS = (1 << 20, 1, 3, 7, 64, 1000, 4096, 20_000)


class Handlers:
    """See the module."""

    def __init__(self) -> None:
        self._apis = {api.api_key: api for api in all_apis()}
        self._versions = [
            (api.api_key, version)
            for api in self._apis.values()
            for version in range(max(api.min_version, 3 if api.api_key == PRODUCE else 0), api.max_version + 1)
        ]
        self._versions += [(API_VERSIONS, version) for version in range(5)]
        self._stage = Stage()
        self._world: KafkaWorld | None = None
        self._network = FuzzNetwork()
        self.history: list[bytes] = []

    def seeds(self) -> list[bytes]:
        """A request of every version, and some conversations."""
        rng = random.Random(3)
        single = [b"\x00" + _framed(samples.request_frame(*pair, rng)) for pair in self._versions]
        talks = [b"\x00" + b"".join(self._frames(rng, 6)) for _ in range(50)]
        return single + talks

    def _frames(self, rng: random.Random, most: int) -> list[bytes]:
        chosen = [rng.choice(self._versions) for _ in range(rng.randint(1, most))]
        return [_framed(samples.request_frame(*pair, rng)) for pair in chosen]

    def mutate(self, data: bytes, limit: int, rng: random.Random, mutate: Mutate) -> bytes:
        """Another conversation: requests added, dropped, repeated, or damaged behind their header."""
        mode = data[:1] or b"\x00"
        frames = _cut(data[1:])
        choice = rng.randrange(8)
        if choice == 0:
            mode = bytes([rng.randrange(256)])
        if choice <= 2 or not frames:
            frames = self._frames(rng, 4) if rng.random() < 0.5 else frames + self._frames(rng, 2)
        elif choice == 3:
            frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))
        elif choice == 4 and len(frames) > 1:
            frames.pop(rng.randrange(len(frames)))
        elif choice == 5:
            return (mode + mutate(b"".join(frames), limit - 1))[:limit]
        else:
            at = rng.randrange(len(frames))
            body = frames[at][16:]
            body = flip(body, rng) if rng.random() < 0.5 else mutate(body, len(body) + 64)
            frames[at] = _framed(frames[at][4:16] + body)
        return (mode + b"".join(frames))[:limit]

    def one(self, data: bytes) -> None:
        """One connection's life."""
        if not data:
            return
        if len(self.history) >= INPUTS_A_WORLD:
            self._end_world()
        self.history.append(data)
        self._stage.run(self._connection(data[:1] + _numbered(data[1:])))

    async def _connection(self, data: bytes) -> None:
        if self._world is None:
            self._world = await self._make_world()
        protocol = self._network.factory()
        assert isinstance(protocol, Connection)
        transport = FuzzTransport(protocol)
        protocol.connection_made(transport)
        step = CHUNKS[data[0] % len(CHUNKS)]
        rest = memoryview(data)[1:]
        deadline = self._stage.loop.time() + PATIENCE_S
        while transport.open and self._stage.loop.time() < deadline:
            if rest and transport.reading:
                room = protocol.get_buffer(-1)
                count = min(step, len(rest), len(room))
                room[:count] = rest[:count]
                del room
                rest = rest[count:]
                protocol.buffer_updated(count)
                continue
            if protocol.idle and not rest:
                break
            await asyncio.sleep(0.01 if self._stage.loop.time() < deadline - PATIENCE_S + 1 else 5)
        transport.close()
        await asyncio.sleep(0)
        self._check_responses(data, bytes(transport.written))

    def _check_responses(self, data: bytes, written: bytes) -> None:
        asked = [_ids(frame) for frame in _cut(data[1:])]
        for frame in _cut(written):
            (correlation_id,) = struct.unpack_from(">i", frame, 4)
            while asked and asked[0][2] != correlation_id:
                asked.pop(0)  # acks=0
            assert asked, f"a response to nothing: {correlation_id}"
            api_key, version, _ = asked.pop(0)
            if api_key == API_VERSIONS and not 0 <= version <= 4:
                version = 0
            if api_key == PRODUCE and version < 3:
                continue
            decode_response(api_key, version, frame[4:])

    async def _make_world(self) -> KafkaWorld:
        kafka = KafkaSettings(port=0, auto_create_topics=True, num_partitions=1)
        world = KafkaWorld(
            kafka=kafka, apis=list(self._apis.values()), clock=LoopClock(), network=self._network, groups=True
        )
        await world.__aenter__()
        for name, partitions in (("t", 2), ("u", 1), ("__consumer_offsets", 2), ("__transaction_state", 2)):
            await world.topic(name, partitions)
        for number in range(5):
            world.log("t").append(memoryview(bytearray(batch(b"value", timestamp=1_700_000_000_000 + number))))
        return world

    def _end_world(self) -> None:
        if self._world is not None:
            world, self._world = self._world, None
            self._stage.run(self._close(world))
        self.history.clear()

    async def _close(self, world: KafkaWorld) -> None:
        try:
            await world.__aexit__(None, None, None)
        except TidelogError as error:
            raise AssertionError(f"the world did not end well: {error}") from error
        await asyncio.sleep(1)
        metrics: Any = world.services.metrics
        assert world.server.connections == 0 and metrics.connections == 0
        assert world.server.in_flight_bytes == 0, f"{world.server.in_flight_bytes} bytes are still held"
        assert world.server.unread_bytes == 0
        assert metrics.connections_dropped["defect"] == 0

    def close(self) -> None:
        """End the last world, with its checks."""
        self._end_world()
        self._stage.close()


def _framed(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame)) + frame


def _cut(data: bytes) -> list[bytes]:
    """The whole frames at the start of a stream, sizes included."""
    frames, at = [], 0
    while at + 4 <= len(data):
        (size,) = struct.unpack_from(">i", data, at)
        if size <= 0 or at + 4 + size > len(data):
            break
        frames.append(data[at : at + 4 + size])
        at += 4 + size
    return frames


def _numbered(data: bytes) -> bytes:
    """The stream with its whole requests numbered, so that each response can be told from the others."""
    out = bytearray(data)
    at = 0
    for number, frame in enumerate(_cut(data)):
        if len(frame) >= 12:
            struct.pack_into(">i", out, at + 8, number)
        at += len(frame)
    return bytes(out)


def _ids(frame: bytes) -> tuple[int, int, int]:
    return struct.unpack_from(">hhi", frame, 4) if len(frame) >= 12 else (-1, -1, -1)
