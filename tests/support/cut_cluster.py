"""A `ServeCluster` whose every pair of processes talks over a path of its own that a test can cut.

Paths: broker → controller, controller → controller, and (with an S3 server) broker → bucket. Sessions are short, so
that a cut of seconds lasts longer than one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

from tests.support.cluster_process import ServeCluster
from tests.support.s3_servers import S3Server, new_bucket
from tests.support.tcp_proxy import Path, Proxies

SESSION_MS = 2_000


class CutCluster(ServeCluster):
    """See the module."""

    def __init__(
        self, directory: FilePath, proxies: Proxies, server: S3Server | None, wal: str, controllers: int, brokers: int
    ) -> None:
        super().__init__(directory, controllers, brokers)
        self._server = server
        self._wal = wal
        self._bucket = new_bucket()
        self.paths = {
            (source, target): self._to(proxies, address)
            for source in (*self.members, *self.kafka_ports)
            for target, address in self.members.items()
            if source != target
        }
        self.bucket_paths: dict[int, Path] = {}
        if server is not None:
            address = server.endpoint.removeprefix("http://")
            self.bucket_paths = {broker: self._to(proxies, address) for broker in self.kafka_ports}

    @staticmethod
    def _to(proxies: Proxies, address: str) -> Path:
        host, _, port = address.partition(":")
        return proxies.path(host, int(port))

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        settings = super().settings(node_id)
        seen = {
            target: self.paths[node_id, target].address if target != node_id else address
            for target, address in self.members.items()
        }
        controller = settings["controller"]
        controller["session_timeout_ms"] = SESSION_MS
        controller["heartbeat_interval_ms"] = 500
        controller["members"] = [f"{each}@{address}" for each, address in seen.items()]
        if node_id in self.kafka_ports:
            controller["endpoints"] = list(seen.values())
        settings["upload"] = {"age_ms": 500}
        settings["wal"] = {"kind": self._wal}
        if self._server is not None:
            path = self.bucket_paths.get(node_id)
            settings["s3"] = {
                "endpoint": f"http://{path.address}" if path is not None else self._server.endpoint,
                "bucket": self._bucket,
                "access_key_id": self._server.access_key_id,
                "secret_access_key": self._server.secret_access_key,
            }
        return settings

    def between(self, sources: list[int], targets: list[int]) -> list[Path]:
        """The paths from each of some to each of others."""
        return [path for (source, target), path in self.paths.items() if source in sources and target in targets]


@contextlib.contextmanager
def cut_cluster(
    directory: FilePath, *, server: S3Server | None = None, wal: str = "disk", controllers: int = 3, brokers: int = 3
) -> Iterator[CutCluster]:
    """A started cluster."""
    with Proxies() as proxies:
        cluster = CutCluster(directory, proxies, server, wal, controllers, brokers)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
