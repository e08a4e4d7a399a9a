"""What `bench.peers` measures of each server: the same, of a server that is warm, and nothing of its warm-up."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bench import peers
from bench._cluster_load import WARM_UP_BYTES
from bench.produce_latency import raw_client

SENT = 250_000 * peers.RECORD_BYTES
"""Bytes of each run of the producer."""


class StandInPeer:
    """A server that takes everything."""

    bootstrap = "127.0.0.1:9092"

    def start(self) -> None:
        """It is there."""

    def server_pid(self) -> int:
        """Nothing is asked of it."""
        return os.getpid()

    def kill(self) -> None:
        """It stays."""


def test_a_server_is_warm_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM compiles for seconds, and a WAL fills its first files with zeros: that is starting, not producing."""
    produced: list[str] = []

    def run(target: Any, *arguments: Any, cores: set[int] | None = None) -> Any:
        if target is raw_client:
            return [1e-3]
        if target is peers.consume_with_librdkafka:
            return 1.0
        assert cores == peers.CLIENT
        produced.append(arguments[1])
        return SENT, 1.0

    for module in ("peers", "_cluster_load"):
        monkeypatch.setattr(f"bench.{module}.in_process", run)
    for name in ("create_topic", "settle", "pin", "fresh_page_cache"):
        monkeypatch.setattr(peers, name, lambda *_: None)
    monkeypatch.setattr(peers, "records_in", lambda *_: SENT // peers.RECORD_BYTES)
    monkeypatch.setattr(peers, "user_and_system", lambda _pid: (float(len(produced)), 0.0))
    found = peers.measure(StandInPeer(), 1.0, with_java=False)
    before = produced[: produced.index("six")]
    assert len(before) * SENT >= WARM_UP_BYTES
    assert produced[len(before) :] == ["six", "one"]
    assert found["CPU of a GB, user, s"] == pytest.approx(1 / (SENT / 1e9))
    assert found["consume, MB/s"] == pytest.approx(SENT / 1e6)
