"""Clusters of real processes: `tidelog up --brokers N`, and controllers and brokers as `tidelog serve` processes of
their own that a test kills, pauses and starts again one by one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.tidelog_process import READY_PREFIX, TidelogProcess, free_port


def tidelog_json(bootstrap: str, *arguments: str, ok: Sequence[int] = (0, 10)) -> Any:
    """What a command of the CLI prints with `--format json`; None if it refused and said so on standard error."""
    command = [sys.executable, "-m", "tidelog", *arguments, "--bootstrap", bootstrap, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in ok, done
    assert done.stdout or done.stderr, done
    return json.loads(done.stdout) if done.stdout else None


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`, with a deadline. What it asserts may fail meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = condition()
            if found:
                return found
        except AssertionError:
            if time.monotonic() > deadline:
                raise
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.1)


class UpCluster(TidelogProcess):
    """One `tidelog up --brokers N`."""

    def __init__(self, data_dir: Path, brokers: int = 3, flags: Sequence[str] = ()) -> None:
        super().__init__(data_dir, ["--brokers", str(brokers), *flags], port=0)
        self._bootstrap = ""

    @property
    def bootstrap(self) -> str:
        return self._bootstrap

    def start(self, timeout_s: float = 90.0) -> UpCluster:
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
def up_cluster(data_dir: Path, brokers: int = 3, flags: Sequence[str] = ()) -> Iterator[UpCluster]:
    cluster = UpCluster(data_dir, brokers, flags)
    try:
        yield cluster.start()
    finally:
        cluster.kill()


class ServeNode:
    """One `tidelog serve` process."""

    def __init__(self, directory: Path, node_id: int, settings: dict[str, dict[str, Any]]) -> None:
        self.node_id = node_id
        self.directory = directory / f"node-{node_id}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._config = directory / f"node-{node_id}.toml"
        lines = []
        for section, values in settings.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        self._config.write_text("\n".join(lines) + "\n")
        self.process: subprocess.Popen[str] | None = None
        self.output: list[str] = []
        self._ready = threading.Event()

    def start(self) -> None:
        self._ready.clear()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        command = [sys.executable, "-m", "tidelog", "serve", "--config", str(self._config)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.output.append(line.rstrip())
                if line.startswith("ready "):
                    self._ready.set()

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        assert self._ready.wait(timeout_s), "\n".join(self.output[-50:])

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def stop(self, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)


class ServeCluster:
    """Controllers with ids from 1 and brokers with ids from 101, each a process of its own, over one bucket."""

    def __init__(self, directory: Path, controllers: int = 3, brokers: int = 2) -> None:
        self.directory = directory
        self._secret = directory / "secret"
        self._secret.write_text("the secret of this test's cluster\n")
        self._secret.chmod(0o600)
        (directory / "bucket").mkdir()
        self.members = {node_id: f"127.0.0.1:{free_port()}" for node_id in range(1, controllers + 1)}
        self.kafka_ports = {node_id: free_port() for node_id in range(101, 101 + brokers)}
        self.nodes: dict[int, ServeNode] = {}

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.kafka_ports.values())

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        """The node's configuration, by section."""
        return {
            "node": {
                "id": node_id,
                "roles": ["broker"] if node_id in self.kafka_ports else ["controller"],
                "data_dir": str(self.directory / f"node-{node_id}"),
            },
            "controller": {
                "members": [f"{each}@{address}" for each, address in self.members.items()],
                "secret_file": str(self._secret),
            },
            "kafka": {"port": self.kafka_ports.get(node_id, 0)},
        }

    def add(self, node_id: int) -> ServeNode:
        """Write the node's configuration; it is not started."""
        node = ServeNode(self.directory, node_id, self.settings(node_id))
        link = node.directory / "bucket"
        if not link.exists():
            link.symlink_to(self.directory / "bucket", target_is_directory=True)
        self.nodes[node_id] = node
        return node

    def start(self) -> None:
        for node_id in (*self.members, *self.kafka_ports):
            self.add(node_id).start()
        for node in self.nodes.values():
            node.wait_ready()

    def controllers(self) -> dict[str, Any]:
        found: dict[str, Any] = tidelog_json(self.bootstrap, "controller", "status")
        return found

    def active(self) -> int:
        """The id of the active controller, when there is one."""

        def find() -> int:
            return next((row["id"] for row in self.controllers()["members"] if row["state"] == "active"), 0)

        return int(eventually(find, 30))

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    node.signal(signal.SIGCONT)
            node.kill()


@contextlib.contextmanager
def serve_cluster(directory: Path, controllers: int = 3, brokers: int = 2) -> Iterator[ServeCluster]:
    cluster = ServeCluster(directory, controllers, brokers)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
