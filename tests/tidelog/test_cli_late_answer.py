"""A request of the Kafka client that never ends is an error of its own, and no traceback."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tidelog.cli import client
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.errors import Unavailable


def test_a_request_that_never_ends_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_S", 0.0)
    monkeypatch.setattr(client, "ANSWER_TIMEOUT_S", 0.01)
    never: Future[Any] = Future()
    with pytest.raises(Unavailable, match=r"cannot delete topic 't': no answer within 0\.01 s"):
        ClusterConnection("127.0.0.1:1").wait(never, "cannot delete topic 't'")
