"""The loads of `tests/support` tell of records without an outcome, and of clients that do not end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support import default_group, partition_load
from tests.support.clients import wait_until
from tests.support.default_group import DefaultGroup
from tests.support.partition_load import PartitionLoad
from tests.support.ports import free_port


def test_records_that_are_never_acknowledged_nor_refused_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, and librdkafka goes on for five minutes: a checker takes what has no outcome for possible."""
    monkeypatch.setattr(partition_load, "FLUSH_S", 0.1)
    load = PartitionLoad(f"127.0.0.1:{free_port()}", "t", 2, pause_s=0.01)
    with load:
        wait_until(lambda: bool(load.history.ops), "something is sent", 10)
    assert len(load.errors) == 1 and "records have no outcome" in load.errors[0]


def test_a_member_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = threading.Event()

    class Consumer:
        def __init__(self, _settings: dict[str, Any]) -> None:
            """It hangs as soon as it polls."""

        def subscribe(self, _topics: list[str]) -> None:
            """Nothing is read."""

        def poll(self, _timeout_s: float) -> None:
            leave.wait(60)

        def close(self) -> None:
            """It has nothing open."""

    monkeypatch.setattr(default_group, "Consumer", Consumer)
    monkeypatch.setattr(default_group, "DEADLINE_S", 0.05)
    try:
        with pytest.raises(AssertionError, match="a member of the group does not end"), DefaultGroup("b:1", "t", 1, 1):
            pass
    finally:
        leave.set()
