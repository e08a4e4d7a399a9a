"""Clusters of real processes: `tidelog up --brokers N`. Those of `tidelog serve` are
`tidelog.chaos.serve_cluster`'s."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.ports import BLOCK, port_block
from tests.support.tidelog_process import READY_PREFIX, TidelogProcess
from tidelog.chaos.serve_cluster import ServeCluster, ServeNode, eventually, serve_cluster, tidelog_json

__all__ = ["ServeCluster", "ServeNode", "UpCluster", "eventually", "serve_cluster", "tidelog_json", "up_cluster"]


_ports_of: dict[Path, range] = {}
"""By the data directory of a cluster: the ports that its brokers and controllers have, also when it starts again."""


class UpCluster(TidelogProcess):
    """One `tidelog up --brokers N`, with ports of its own, or those that it chooses itself."""

    def __init__(
        self, data_dir: Path, brokers: int = 3, flags: Sequence[str] = (), *, chooses_ports: bool = False
    ) -> None:
        first = 0
        arguments = ["--brokers", str(brokers), *flags]
        if not chooses_ports:
            if data_dir not in _ports_of:
                _ports_of[data_dir] = port_block()
            first = _ports_of[data_dir].start
            arguments += ["--set", f"controller.port={first + BLOCK // 2}"]
        super().__init__(data_dir, arguments, port=first)
        self._bootstrap = ""

    @property
    def bootstrap(self) -> str:
        return self._bootstrap

    def start(self, timeout_s: float = 180.0) -> UpCluster:
        self.launch()
        self._bootstrap = self.wait_for_line(READY_PREFIX, timeout_s).removeprefix(READY_PREFIX)
        return self

    def node_pids(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def kill(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            for pid in self.node_pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait(30)


@contextlib.contextmanager
def up_cluster(
    data_dir: Path, brokers: int = 3, flags: Sequence[str] = (), *, chooses_ports: bool = False
) -> Iterator[UpCluster]:
    cluster = UpCluster(data_dir, brokers, flags, chooses_ports=chooses_ports)
    try:
        yield cluster.start()
    finally:
        cluster.kill()
