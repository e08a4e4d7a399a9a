"""A `ServeCluster` in which each pair of processes is connected through a separate path that a harness can cut.

Paths: broker → controller, controller → controller, all others → broker (its port for other brokers; it advertises the
path's address), and, with an S3 server (`s3` is the `[s3]` section of the configuration), broker → bucket. Sessions are
short, so that a cut of seconds lasts longer than one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from tidelog.chaos.ports import free_port
from tidelog.chaos.serve_cluster import ServeCluster
from tidelog.chaos.tcp_proxy import Path, Proxies

SESSION_MS = 2_000
PEER_HOST = "127.0.0.2"
"""The same port as the broker's own, at another address of the loopback."""


class CutCluster(ServeCluster):
    """A cluster with a path between each pair of processes."""

    def __init__(
        self,
        directory: FilePath,
        proxies: Proxies,
        s3: Mapping[str, Any] | None = None,
        wal: str = "disk",
        controllers: int = 3,
        brokers: int = 3,
        *,
        combined: bool = False,
    ) -> None:
        super().__init__(directory, controllers, brokers, combined=combined)
        self._s3 = dict(s3 or {})
        self._wal = wal
        self.paths = {
            (source, target): self._to(proxies, address)
            for source in dict.fromkeys((*self.members, *self.kafka_ports))
            for target, address in self.members.items()
            if source != target
        }
        self.peer_paths = {}
        for broker in self.kafka_ports:
            port = free_port()
            self.peer_paths[broker] = proxies.path("127.0.0.1", port, at=(PEER_HOST, port))
        self.bucket_paths: dict[int, Path] = {}
        if self._s3:
            address = self._s3["endpoint"].removeprefix("http://")
            self.bucket_paths = {broker: self._to(proxies, address) for broker in self.kafka_ports}

    @staticmethod
    def _to(proxies: Proxies, address: str) -> Path:
        host, _, port = address.partition(":")
        return proxies.path(host, int(port))

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        """The node's configuration, by section."""
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
            settings["kafka"] |= {
                "host": "127.0.0.1",
                "peer_port": self.peer_paths[node_id].port,
                "peer_advertised_host": PEER_HOST,
            }
        settings["upload"] = {"age_ms": 500}
        settings["wal"] = {"kind": self._wal}
        if self._s3:
            settings["s3"] = dict(self._s3)
            if node_id in self.bucket_paths:
                settings["s3"]["endpoint"] = f"http://{self.bucket_paths[node_id].address}"
        return settings

    def between(self, sources: list[int], targets: list[int]) -> list[Path]:
        """Return the paths from each node of one set to each node of another."""
        return [path for (source, target), path in self.paths.items() if source in sources and target in targets]


@contextlib.contextmanager
def cut_cluster(
    directory: FilePath,
    *,
    s3: Mapping[str, Any] | None = None,
    wal: str = "disk",
    controllers: int = 3,
    brokers: int = 3,
) -> Iterator[CutCluster]:
    """Yield a started cluster."""
    with Proxies() as proxies:
        cluster = CutCluster(directory, proxies, s3, wal, controllers, brokers)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
