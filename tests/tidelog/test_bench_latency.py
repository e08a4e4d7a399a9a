"""What is sent or written at fixed times (`bench.produce_latency`, `bench.limit_disk`) counts from when it was due."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench._clients import Address
from bench.limit_disk import RawDisk
from bench.limit_socket import TOPIC, Answers
from bench.produce_latency import WARM_UP_S, raw_client

BATCH_BYTES = 256 << 10
PER_S = 100.0
SECONDS = 0.5
PAUSE_S = WARM_UP_S + SECONDS + 0.2


@contextmanager
def server_that_reads_late(pause_s: float) -> Iterator[Address]:
    """Accept one connection, read nothing of it for `pause_s`, and then answer each request at once."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # what it accepts has it, too
    address = listener.getsockname()[:2]
    answers = Answers(address, 1, (TOPIC,), 0)

    def serve() -> None:
        one, _ = listener.accept()
        time.sleep(pause_s)
        with one, one.makefile("rb") as requests:
            while size := requests.read(4):
                one.sendall(answers.to(requests.read(int.from_bytes(size, "big"))))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        thread.join(30)
        listener.close()


def test_a_request_that_cannot_be_sent_in_time_waits_from_when_it_was_due() -> None:
    """A server that reads nothing fills the socket: what is due meanwhile is not sent, and its wait is the server's."""
    found: list[list[float]] = []
    with server_that_reads_late(PAUSE_S) as address:
        raw_client(address, TOPIC, BATCH_BYTES, PER_S, SECONDS, found.append)
    (took,) = found
    assert len(took) == int((WARM_UP_S + SECONDS) * PER_S) - int(WARM_UP_S * PER_S)
    assert statistics.median(took) > 0.3


class StallingDisk(RawDisk):
    """Its first write takes `PAUSE_S`."""

    stalls = True

    def write(self, data: bytes) -> float:
        """See `RawDisk.write`."""
        if self.stalls:
            self.stalls = False
            time.sleep(PAUSE_S)
        return super().write(data)


def test_all_writes_that_were_due_while_the_disk_stood_still_waited_for_it(tmp_path: Path) -> None:
    """As requests do that a client sends without waiting: else the disk's stalls are the broker's in the ratio."""
    disk = StallingDisk(tmp_path, 1 << 20)
    took = disk.latencies(4096, PER_S, PAUSE_S)
    disk.close()
    assert len(took) == int(PER_S * PAUSE_S)
    assert statistics.median(took) > 0.3
