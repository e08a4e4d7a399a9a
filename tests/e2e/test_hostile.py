"""Thousands of hostile connections at all listeners of a real process: nothing leaks, and good clients are served."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic, read_topic
from tests.fuzz import samples
from tests.fuzz.base import flip
from tests.support.clients import wait_until
from tests.support.ports import free_port
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.broker.kafka.apis import all_apis

CONNECTIONS = 3_000
WAVE = 150
SPARE_FDS = 4
"""A WAL segment or a bucket connection may have been opened meanwhile; thousands of connections would show."""


def metrics(admin_port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r"^(tidelog_\w+(?:\{[^}]*\})?) (\S+)$", text, re.M)
    return {name: float(value) for name, value in found}


def dropped(figures: dict[str, float], reason: str) -> float:
    return figures[f'tidelog_connections_dropped_total{{reason="{reason}"}}']


def open_files(process: TidelogProcess) -> int:
    """Files and connections; the bucket's directories stay open, within a bound of their own."""
    directory = f"/proc/{process.broker_pid()}/fd"
    return sum(not os.path.isdir(f"{directory}/{number}") for number in os.listdir(directory))


def fetch_request() -> bytes:
    body = struct.pack(">iiiibih1siiqi", -1, 0, 1, 50 << 20, 0, 1, 1, b"t", 1, 0, 0, 50 << 20)
    frame = struct.pack(">hhih", 1, 4, 1, -1) + body
    return struct.pack(">i", len(frame)) + frame


def attacks(rng: random.Random) -> Iterator[bytes]:
    """What hostile clients send, without end."""
    versions = [(api.api_key, api.max_version) for api in all_apis()]
    yield fetch_request() * 20
    while True:
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100)
        yield b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
        yield rng.randbytes(rng.randint(0, 2000))
        yield struct.pack(">i", 100 << 20) + b"x"
        yield struct.pack(">i", 5000) + rng.randbytes(100)
        yield b""
        yield fetch_request() * 5
        frame = samples.request_frame(*rng.choice(versions), rng)
        frame = frame[:8] + flip(frame[8:], rng)
        yield struct.pack(">i", len(frame)) + frame


def attack(port: int, sent: Iterator[bytes], rng: random.Random) -> None:
    """One wave: connect, send, and leave in one way or another, some without ever reading."""
    wave = []
    for _ in range(WAVE):
        with contextlib.suppress(OSError):  # refused: that is an answer, too
            peer = socket.create_connection(("127.0.0.1", port), timeout=10)
            wave.append(peer)
            peer.sendall(next(sent))
    for peer in wave:
        if rng.random() < 0.5:  # RST
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.close()


class GoodProducer:
    """A real client that writes one record after the other and waits for each."""

    def __init__(self, bootstrap: str) -> None:
        self._producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, **QUIET})
        self._ending = threading.Event()
        self.acknowledged = 0
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _delivered(self, error: object, _: object) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.acknowledged += 1

    def _run(self) -> None:
        while not self._ending.is_set():
            self._producer.produce("good", str(self.acknowledged).encode(), on_delivery=self._delivered)
            if self._producer.flush(60):
                self.errors.append("a record was not acknowledged in a minute")
                return

    def close(self) -> None:
        self._ending.set()
        self._thread.join(90)
        assert not self._thread.is_alive() and not self.errors, self.errors
        del self._producer  # closes its connections


@pytest.mark.slow
def test_thousands_of_hostile_connections_leave_nothing_and_stop_nobody(tmp_path: Path) -> None:
    admin_port = free_port()
    flags = ["--set", f"admin.port={admin_port}", "--set", "kafka.receive_timeout_ms=2000"]
    with running(tmp_path / "data", flags) as process:
        create_topic(process.bootstrap, "good")
        create_topic(process.bootstrap, "t")
        filler = Producer({"bootstrap.servers": process.bootstrap, **QUIET})
        for _ in range(40):
            filler.produce("t", b"x" * 500_000)
            assert filler.flush(60) == 0
        del filler
        first = GoodProducer(process.bootstrap)
        wait_until(lambda: first.acknowledged > 20, "a good client works")
        first.close()
        quiet = settled(process, admin_port)

        good = GoodProducer(process.bootstrap)
        wait_until(lambda: good.acknowledged > 0, "it is connected")
        rng = random.Random(1)
        sent = attacks(rng)
        rpc_port = int((tmp_path / "data/controller/address").read_text().rsplit(":", 1)[1])
        ports = [process.port] * 8 + [rpc_port, admin_port]
        before = good.acknowledged
        for number in range(CONNECTIONS // WAVE):
            attack(ports[number % len(ports)], sent, rng)
        last = good.acknowledged
        wait_until(lambda: good.acknowledged > last + 20, "the good client goes on")
        assert last > before, "the good client stood still during the attack"
        good.close()
        acknowledged = good.acknowledged

        def same(name: str, spare: float = 0) -> Callable[[], bool]:
            return lambda: metrics(admin_port)[name] <= quiet[name] + spare

        wait_until(same("tidelog_connections"), "connections are forgotten", 60)
        wait_until(same("tidelog_requests_in_flight_bytes"), "memory of requests is given back", 60)
        wait_until(same("tidelog_responses_unread_bytes"), "unread responses are dropped", 60)
        wait_until(same("tidelog_tasks", 2), "no task is left", 60)
        wait_until(lambda: open_files(process) <= quiet["fds"] + SPARE_FDS, "no open file is left", 60)
        figures = metrics(admin_port)
        assert dropped(figures, "defect") == 0, process.tail()
        for reason in ("not_kafka", "oversized", "malformed"):
            assert dropped(figures, reason) > 0, figures
        assert figures["tidelog_connections_opened_total"] > CONNECTIONS / 2
        values = [value for _, _, _, _, value in read_topic(process.bootstrap, "good")]
        assert len(values) >= acknowledged
        assert len([line for line in process.output if "connection closed" in line]) < 200, "the log was flooded"
        assert process.stop() == 0


def settled(process: TidelogProcess, admin_port: int) -> dict[str, float]:
    """Figures of the quiet process, once they stay the same."""
    seen: list[tuple[float, ...]] = []
    figures: dict[str, float] = {}

    def steady() -> bool:
        nonlocal figures
        figures = {**metrics(admin_port), "fds": float(open_files(process))}
        names = ("tidelog_connections", "tidelog_requests_in_flight_bytes", "tidelog_tasks", "fds")
        seen.append(tuple(figures[name] for name in names))
        time.sleep(0.2)
        return figures["tidelog_connections"] == 0 and len(seen) > 5 and len(set(seen[-5:])) == 1

    wait_until(steady, "the process is quiet", 60)
    return figures
