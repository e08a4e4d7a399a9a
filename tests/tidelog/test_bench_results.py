"""A benchmark that finds its data wrong, or its measure not over, says so and ends with an error."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import admin

from bench import controller_commits, cost_per_gb, log_compaction, replay_vs_producers, transaction_moves
from bench._clients import create_topic


class Producer:
    """One of librdkafka whose records are never acknowledged."""

    def __init__(self, _settings: dict[str, Any]) -> None:
        self.sent = 0

    def __len__(self) -> int:
        return self.sent

    def list_topics(self, _topic: str, _timeout_s: float) -> None:
        """There is nothing to wait for."""

    def produce(self, _topic: str, _value: bytes, **_more: Any) -> None:
        self.sent += 1

    def produce_batch(self, _topic: str, batch: list[dict[str, Any]], **_more: Any) -> int:
        self.sent += len(batch)
        return len(batch)

    def poll(self, _timeout_s: float) -> None:
        """No reports come."""

    def flush(self, _timeout_s: float) -> int:
        return self.sent


class Acknowledging(Producer):
    """One that takes all for acknowledged, as it does with those that failed."""

    def __len__(self) -> int:
        return 0


def put(_value: Any) -> None:
    """Nobody wants the result."""


def test_a_wrong_value_after_a_compaction_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="2 keys have not their last values"):
        log_compaction.report_records(before=10, left=5, wrong=2)
    assert "goal no wrong key: NO" in capsys.readouterr().out
    log_compaction.report_records(before=10, left=5, wrong=0)
    assert "goal no wrong key: yes" in capsys.readouterr().out


def test_records_that_are_not_acknowledged_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confluent_kafka.Producer", Producer)
    with pytest.raises(AssertionError, match="were not acknowledged"):
        replay_vs_producers.produce_at("nobody:1", 0.01, 10.0, put)


def test_records_that_are_not_in_the_log_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confluent_kafka.Producer", Acknowledging)
    monkeypatch.setattr(replay_vs_producers, "records_in", lambda *_: 7)
    with pytest.raises(AssertionError, match="0 records are in the log"):
        replay_vs_producers.produce_on("nobody:1", 0.01, put)


@pytest.mark.parametrize("pending", [0.0, 1.0], ids=["compacting", "uploading"])
def test_work_that_does_not_end_has_no_price(monkeypatch: pytest.MonkeyPatch, pending: float) -> None:
    class Figures:
        def __init__(self) -> None:
            self.asked = 0

        def requests(self) -> Counter[tuple[str, str]]:
            self.asked += not pending
            return Counter({("compaction", "get"): self.asked})

        def read(self) -> dict[tuple[str, str, str], float]:
            return {("tidelog_storage_log_cache_pending_bytes", "", ""): pending}

    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(cost_per_gb, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(TimeoutError, match="have not ended within 60 s"):
        cost_per_gb.wait_until_done(Figures())  # type: ignore[arg-type]


def test_the_disk_s_limit_beside_a_journal_grows_into_new_space_each_time(tmp_path: Path) -> None:
    """As the journal does: to overwrite a file in place is less work for the file system."""
    seconds = 0.05
    for earlier in (b"", bytes(1 << 20)):
        (tmp_path / "raw").write_bytes(earlier)
        syncs = controller_commits.raw_syncs(tmp_path, seconds) * seconds
        assert (tmp_path / "raw").stat().st_size == round(syncs) * 200 > 0


def test_a_step_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_moves, "PATIENCE_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    def step() -> None:
        entered.set()
        leave.wait(60)

    stream = transaction_moves.Stream(step)
    stream.start()
    try:
        assert entered.wait(60)
        with pytest.raises(RuntimeError, match="a step of the stream has not ended"):
            stream.end()
    finally:
        leave.set()
        stream.join(60)


def test_a_topic_without_all_of_its_partitions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Admin:
        def __init__(self, _settings: dict[str, Any]) -> None:
            self.created = SimpleNamespace(result=lambda _timeout_s: None)

        def create_topics(self, _topics: list[Any]) -> dict[str, Any]:
            return {"topic": self.created}

        def list_topics(self, topic: str, _timeout_s: float) -> Any:
            return SimpleNamespace(topics={topic: SimpleNamespace(partitions={0: None})})

    seconds = iter(range(0, 1_000, 20))
    monkeypatch.setattr(admin, "AdminClient", Admin)
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _seconds: None)
    monkeypatch.setattr("bench._clients.time", clock)
    with pytest.raises(TimeoutError, match="1 of 3 partitions of topic"):
        create_topic("nobody:1", "topic", 3)
