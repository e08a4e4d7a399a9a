"""Administration goes on when the broker with the smallest id is gone: each broker names itself as the controller.

A client that was told of a controller sends its requests there until the connection breaks: soon after the death of
that process. If that host is silent, only the client's own time-out ends the wait (`socket.timeout.ms`, 60 s), for
nothing that the other brokers do reaches it. So only a new client asks in that case.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.e2e.backends import QUIET
from tests.support.cluster_process import tidelog_json, up_cluster

SESSION_S = 60
"""Until the session of a broker that has lost its power ends, it is listed as alive."""


@pytest.mark.gate_cases("killed")
@pytest.mark.parametrize(
    ("how", "asking"),
    [(signal.SIGKILL, ["fresh", "cached"]), (signal.SIGSTOP, ["fresh"])],
    ids=["killed", "silent"],
)
def test_topics_are_created_right_after_the_broker_with_the_smallest_id_is_gone(
    tmp_path: Path, how: signal.Signals, asking: list[str]
) -> None:
    flags = ["--set", f"controller.session_timeout_ms={1000 * SESSION_S}"]
    with up_cluster(tmp_path / "data", 3, flags) as cluster:
        nodes = {node["id"]: node["pid"] for node in tidelog_json(cluster.bootstrap, "status")["nodes"]}
        addresses = cluster.bootstrap.split(",")
        cached = AdminClient({"bootstrap.servers": addresses[0], **QUIET})
        assert len(cached.list_topics(timeout=30).brokers) == 3, "it knows the cluster, and names the first broker"
        os.kill(cluster.pid, signal.SIGSTOP)  # nobody starts the broker again
        try:
            os.kill(nodes[min(nodes)], how)
            gone = time.monotonic()
            fresh = AdminClient({"bootstrap.servers": ",".join(addresses[1:]), **QUIET})
            admins = {"fresh": fresh, "cached": cached}
            for name in asking:
                admin = admins[name]
                admin.create_topics([NewTopic(name, num_partitions=3)], request_timeout=20)[name].result(30)
            assert time.monotonic() - gone < SESSION_S - 10, "nobody waited for the end of the session"
        finally:
            for pid in (nodes[min(nodes)], cluster.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
