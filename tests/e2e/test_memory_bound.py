"""A producer that is faster than the bucket: memory stays within its bound, nothing is lost, and it goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.e2e.backends import QUIET, create_topic, faulty_proxy, read_topic, s3_flags
from tests.support.clients import wait_until
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import running
from tidelog.chaos.faulty_s3 import Fault
from tidelog.cli.client import ClusterConnection

MIB = 1 << 20
BOUND = 8 * MIB
SLACK = 32 * MIB
"""What else grows while 8 MiB of small records arrive: requests in flight, objects being built, the allocator."""
FLAGS = [
    *("--set", f"cache.log_bytes={BOUND}"),
    *("--set", "wal.flush=async"),
    *("--set", f"upload.size_bytes={2 * MIB}"),
    *("--set", "upload.max_in_flight=2"),
    *("--set", "s3.retry_budget_ms=2000"),
    *("--set", "s3.request_timeout_ms=1000"),
]


class Flood:
    """Sends one-record batches as fast as the broker takes them, in a thread, until told to stop."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "batch.num.messages": 1,
                "queue.buffering.max.messages": 2000,
                **QUIET,
            }
        )
        self._topic = topic
        self.sent: list[bytes] = []
        self.acknowledged = 0
        self.errors: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _done(self, error: Any, _message: Any) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.acknowledged += 1

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            value = f"{number} ".encode().ljust(100, b"-")
            try:
                self._producer.produce(self._topic, value, on_delivery=self._done)
            except BufferError:
                self._producer.poll(0.05)
                continue
            self.sent.append(value)
            number += 1
            self._producer.poll(0)

    def stop(self) -> None:
        """Send no more, and wait for every outcome."""
        self._stopping.set()
        self._thread.join(30)
        assert self._producer.flush(90) == 0, "records without an outcome"


@pytest.mark.long
def test_a_producer_faster_than_the_bucket_waits_at_the_bound_and_loses_nothing(
    tmp_path: Path, moto_server: S3Server
) -> None:
    with faulty_proxy(moto_server) as proxy, running(tmp_path / "data", [*s3_flags(proxy.server), *FLAGS]) as process:
        create_topic(process.bootstrap, "t")
        cluster = ClusterConnection(process.bootstrap)

        def memory() -> dict[str, int]:
            found: dict[str, int] = cluster.get("/status")["memory"]
            assert found["log_cache_bytes"] <= found["log_cache_bound_bytes"] == BOUND
            return found

        before = memory()["resident_bytes"]
        proxy.fault = lambda seen: Fault(status=503) if seen.method == "PUT" else None
        flood = Flood(process.bootstrap, "t")
        wait_until(lambda: memory()["log_cache_bytes"] > BOUND - 4096, "the log cache is full")
        taken = flood.acknowledged
        wait_until(lambda: len(flood.sent) >= taken + 2000, "the producer's queue is full behind it")
        full = memory()
        assert full["resident_bytes"] - before < BOUND + SLACK, full
        assert not flood.errors
        proxy.fault = lambda seen: None
        wait_until(lambda: flood.acknowledged > taken + 5000, "the producer goes on")
        memory()
        flood.stop()
        assert not flood.errors
        assert flood.acknowledged == len(flood.sent)
        assert [row[4] for row in read_topic(process.bootstrap, "t")] == flood.sent
        assert process.stop() == 0, process.tail()
