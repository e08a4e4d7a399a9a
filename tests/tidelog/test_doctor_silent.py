"""`tidelog doctor` asks all brokers at the same time whether they answer: those that hang take no time one by one."""

from __future__ import annotations

import threading
from typing import Any

from tests.support.ports import free_port
from tidelog.doctor.cluster import look_at_cluster
from tidelog.runtime.errors import Unavailable

BROKERS = (1, 2, 3)
TOGETHER_S = 5.0


class SilentBrokers:
    """Each answers that it does not, when all have been asked."""

    def __init__(self) -> None:
        self._asked = threading.Barrier(len(BROKERS))

    def get(self, url: str, path: str, broker: int | None = None) -> Any:
        if path == "/healthz":
            self._asked.wait(TOGETHER_S)
        raise Unavailable(f"broker {broker} is silent")

    def post(self, url: str, path: str) -> Any:
        raise Unavailable(f"{url}{path}")


def test_silent_brokers_are_asked_at_the_same_time() -> None:
    address = f"127.0.0.1:{free_port()}"
    row = {"roles": ["broker"], "state": "alive", "address": address, "admin_url": ""}
    document = {"nodes": [{**row, "id": broker} for broker in BROKERS]}
    view, nodes = look_at_cluster(address, lambda: document, SilentBrokers())
    assert view.silent == {broker: f"broker {broker} is silent" for broker in BROKERS}
    assert nodes == []
