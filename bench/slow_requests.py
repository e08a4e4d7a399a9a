"""CPU time of a Produce request with the recorder of slow requests and the WAL's history, and without them.

    python -m bench.slow_requests [--blocks 400] [--requests 100]

Requests of one record of 100 bytes, five in flight, arrive at a connection of the real listener, are handled by real
logs, and their responses are written; the WAL and the bucket are in memory, and the socket is a buffer. So what
`tidelog explain` costs is compared with less than a request costs in production, where a kernel and a disk come to it.

Two brokers in one process, one with both and one without, take turns block by block, so that load from elsewhere and a
changing clock rate meet both alike; the figure is the median of the ratios of two neighbouring blocks, with its
quartiles. `--same` leaves both off in both, for the noise of the method.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from statistics import quantiles
from typing import Any

from bench._common import pin, quick, row
from bench.produce_requests import one_record_frame
from tests.support.kafka_world import KafkaWorld
from tidelog.broker.settings import KafkaSettings
from tidelog.runtime import memory
from tidelog.runtime.network import Listener, Network
from tidelog.storage.settings import CacheSettings, UploadSettings

TOPIC = "bench"
IN_FLIGHT = 5
GOAL = 1.01
WARM_UP_BLOCKS = 20


class _NoListener:
    """Listens to nothing."""

    address = ("127.0.0.1", 0)

    async def close(self) -> None:
        """Nothing is open."""


class _ByHand:
    """A `Network` whose connections are made by hand, and have no socket."""

    def __init__(self) -> None:
        self.factory: Any = None

    async def listen(self, factory: Any, host: str, port: int) -> Listener:
        """Remember how connections are made."""
        self.factory = factory
        return _NoListener()

    async def connect(self, *_arguments: Any, **_named: Any) -> Any:
        """Nobody is there."""
        raise AssertionError("nothing connects here")


class _Pipe(asyncio.Transport):
    """Takes responses and counts their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0
        self._protocol: Any = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set who is told of the end."""
        self._protocol = protocol

    def write(self, data: Any) -> None:
        """Count the bytes."""
        self.written += len(data)

    def writelines(self, list_of_data: Any) -> None:
        """Count the bytes."""
        self.written += sum(map(len, list_of_data))

    def get_write_buffer_size(self) -> int:
        """Everything is sent."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def is_closing(self) -> bool:
        """It stays open."""
        return False

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""

    def abort(self) -> None:
        """Tell the protocol that the connection has ended, once."""
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, None)

    close = abort


class _Broker:
    """A broker and one producer."""

    def __init__(self, *, explains: bool) -> None:
        self._network = _ByHand()
        network: Network = self._network
        self.world = KafkaWorld(
            kafka=KafkaSettings(port=0, slow_requests=8 if explains else 0),
            cache=CacheSettings(log_bytes=4 << 30),
            upload=UploadSettings(age_ms=3_600_000, size_bytes=1 << 40),
            network=network,
        )
        self._explains = explains
        self._frames = one_record_frame(TOPIC, 0, 100) * IN_FLIGHT
        self._pipe = _Pipe()
        self._connection: Any = None

    async def start(self) -> None:
        """Create the topic and connect."""
        await self.world.topic(TOPIC)
        if not self._explains:
            self.world.storage.history.left = 0
            self.world.storage.confirm.observe(_ignore)
        self._connection = self._network.factory()
        self._pipe.set_protocol(self._connection)
        self._connection.connection_made(self._pipe)
        await self.block(1)
        self._answer_bytes = self._pipe.written

    async def block(self, rounds: int) -> float:
        """Send `rounds` times `IN_FLIGHT` requests; return the CPU time in seconds."""
        connection, pipe, frames = self._connection, self._pipe, self._frames
        started = time.process_time()
        for _ in range(rounds):
            expected = pipe.written + getattr(self, "_answer_bytes", 1)
            connection.get_buffer(-1)[: len(frames)] = frames
            connection.buffer_updated(len(frames))
            while pipe.written < expected:  # noqa: ASYNC110 — a turn of the loop for the WAL in memory, no wait
                await asyncio.sleep(0)
        return time.process_time() - started


def _ignore(_offset: int) -> None:
    """No history."""


async def _measure(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    without, explaining = _Broker(explains=False), _Broker(explains=not args.same)
    async with without.world, explaining.world:
        for one in (without, explaining):
            await one.start()
        memory.tune()
        gc.freeze()
        rounds = args.requests // IN_FLIGHT
        ratios, costs = [], []
        for number in range(args.blocks + WARM_UP_BLOCKS):
            first, second = (without, explaining) if number % 2 else (explaining, without)
            spent = {first: await first.block(rounds), second: await second.block(rounds)}
            if number >= WARM_UP_BLOCKS:
                ratios.append(spent[explaining] / spent[without])
                costs.append(spent[without] / rounds / IN_FLIGHT * 1e6)
        return ratios, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100 if quick() else 400)
    parser.add_argument("--requests", type=int, default=100, help="in a block")
    parser.add_argument("--same", action="store_true", help="both without")
    args = parser.parse_args()
    pin({0})
    ratios, costs = asyncio.run(_measure(args))
    low, middle, high = quantiles(ratios, n=4)
    row(
        "one-record produce requests with the recorder of slow requests" + (" (none in both)" if args.same else ""),
        f"{middle:.4f} times the CPU time (quartiles {low:.4f}, {high:.4f})",
        limit=f"without {quantiles(costs, n=4)[1]:.1f} µs of CPU a request",
        ratio=f"{middle:.4f}",
        goal=f"≤ {GOAL}",
        holds=middle <= GOAL,
    )


if __name__ == "__main__":
    main()
