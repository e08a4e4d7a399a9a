"""CPU time of a Produce request with the recorder of slow requests and the WAL's history, and without them.

    python -m bench.slow_requests [--blocks 400] [--requests 100] [--same | --trace RATIO]

Requests of one record of 100 bytes, five in flight, arrive at a connection of the real listener, are handled by real
logs, and their responses are written; the WAL and the bucket are in memory, and the socket is a buffer. So what
`tidelog explain` costs is compared with less than a request costs in production, where a kernel and a disk come to it.

Two brokers in one process, one with both and one without, take turns block by block, so that load from elsewhere and a
changing clock rate meet both alike; the figure is the median of the ratios of two neighbouring blocks, with its
quartiles. `--same` leaves both off in both, for the noise of the method.

`--trace RATIO` compares traces instead: both brokers have the recorder and the history, and one of them traces that
share of its requests, and sends its spans to a collector in a child process that takes them unread. The CPU time is
that of all threads, so that of the exporter's is in it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from bench._common import pin, quick, row
from bench.produce_requests import one_record_frame
from tests.support.kafka_world import KafkaWorld
from tidelog.broker.settings import KafkaSettings, TracingSettings
from tidelog.broker.telemetry.tracing_setup import open_tracing
from tidelog.runtime import memory
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import Listener, Network
from tidelog.storage.settings import CacheSettings, UploadSettings

if TYPE_CHECKING:
    from tidelog.broker.telemetry.tracing import Tracing

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

    def __init__(self, *, explains: bool, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
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
        if self._tracing is not None:
            self._tracing.start("bench", 1)
            self.world.services.tracing = self._tracing
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


class _Sink(BaseHTTPRequestHandler):
    """Takes spans unread."""

    def do_POST(self) -> None:
        """Answer one export."""
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


@contextmanager
def _collector() -> Iterator[str]:
    """Run a collector in a child process; yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    child = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    child.start()
    server.server_close()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        child.terminate()
        child.join()


def _tracing(endpoint: str, ratio: float) -> Tracing:
    tracing = open_tracing(TracingSettings(endpoint=endpoint, sample_ratio=ratio), SystemClock(), random.Random())
    assert tracing is not None
    return tracing


async def _measure(args: argparse.Namespace, endpoint: str = "") -> tuple[list[float], list[float]]:
    tracing = _tracing(endpoint, args.trace) if endpoint else None
    without = _Broker(explains=tracing is not None)
    explaining = _Broker(explains=tracing is not None or not args.same, tracing=tracing)
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
        if tracing is not None:
            print(tracing.report())
            await tracing.close()
        return ratios, costs


def _trace(args: argparse.Namespace) -> None:
    with _collector() as endpoint:
        ratios, costs = asyncio.run(_measure(args, endpoint))
    low, middle, high = quantiles(ratios, n=4)
    row(
        f"one-record produce requests of which {args.trace:g} are traced",
        f"{middle:.4f} times the CPU time (quartiles {low:.4f}, {high:.4f})",
        limit=f"without {quantiles(costs, n=4)[1]:.1f} µs of CPU a request",
        ratio=f"{middle:.4f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100 if quick() else 400)
    parser.add_argument("--requests", type=int, default=100, help="in a block")
    parser.add_argument("--same", action="store_true", help="both without")
    parser.add_argument("--trace", type=float, metavar="RATIO", help="the share of requests that one broker traces")
    args = parser.parse_args()
    if args.trace is not None:
        _trace(args)
        return
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
