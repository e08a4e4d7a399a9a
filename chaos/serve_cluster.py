"""Clusters of real processes: controllers and brokers as separate `tidelog serve` processes with one bucket.

Entry: `serve_cluster`.
"""

from __future__ import annotations

import contextlib
import ctypes
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

from tidelog.chaos.ports import free_port
from tidelog.runtime.children import TIDELOG


def tidelog_json(bootstrap: str, *arguments: str, ok: Sequence[int] = (0, 10)) -> Any:
    """Run a CLI command with `--format json` and return its output; None if it failed with an error."""
    command = [*TIDELOG, *arguments, "--bootstrap", bootstrap, "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in ok, done
    assert done.stdout or done.stderr, done
    return json.loads(done.stdout) if done.stdout else None


def eventually(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait for the first true value of `condition`, with a deadline. Assertion failures meanwhile are ignored."""
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


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_starter() -> None:
    """Called between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


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
        self.choose_python: Callable[[], str] = lambda: sys.executable
        """Called at each start: the interpreter in whose environment the version to run is installed."""
        self.python = sys.executable
        """That of the last start."""
        self.dies_with_starter = False
        """Kill the process when the thread that starts it ends."""
        self.output: list[str] = []
        self._ready = threading.Event()

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it."""
        self._ready.clear()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        self.python = self.choose_python()
        if self.python != sys.executable:
            environment.pop("PYTHONPATH", None)  # it leads to this version
        command = [self.python, *TIDELOG[1:], "serve", "--config", str(self._config)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            preexec_fn=_die_with_starter if self.dies_with_starter else None,
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
        """Wait until clients can connect, or it can be elected. Raises `AssertionError` with the last output."""
        assert self._ready.wait(timeout_s), "\n".join(self.output[-50:])

    @property
    def pid(self) -> int:
        """Pid of the last started process."""
        assert self.process is not None
        return self.process.pid

    def is_ready(self) -> bool:
        """Whether the process has reported readiness since its last start."""
        return self._ready.is_set()

    def is_running(self) -> bool:
        """Whether the process was started and has not ended (paused counts as running)."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send `kill -9` and wait for the end; no effect if it has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def stop(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM and wait; return the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)


class ServeCluster:
    """Controllers with ids from 1 and brokers with ids from 101, each a separate process, with one bucket.

    `combined`: the controllers are also the brokers.
    """

    def __init__(self, directory: Path, controllers: int = 3, brokers: int = 2, *, combined: bool = False) -> None:
        self.directory = directory
        self._secret = directory / "secret"
        self._secret.write_text("the secret of this test's cluster\n")
        self._secret.chmod(0o600)
        (directory / "bucket").mkdir()
        self.members = {node_id: f"127.0.0.1:{free_port()}" for node_id in range(1, controllers + 1)}
        broker_ids = self.members if combined else range(101, 101 + brokers)
        self.kafka_ports = {node_id: free_port() for node_id in broker_ids}
        self.nodes: dict[int, ServeNode] = {}

    @property
    def bootstrap(self) -> str:
        """Every broker's address."""
        return ",".join(f"127.0.0.1:{port}" for port in self.kafka_ports.values())

    def settings(self, node_id: int) -> dict[str, dict[str, Any]]:
        """The node's configuration, by section."""
        roles = {"controller": list(self.members), "broker": list(self.kafka_ports)}
        return {
            "node": {
                "id": node_id,
                "roles": [role for role, ids in roles.items() if node_id in ids],
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
        """Start all nodes, and wait until each is ready."""
        for node_id in dict.fromkeys((*self.members, *self.kafka_ports)):
            self.add(node_id).start()
        for node in self.nodes.values():
            node.wait_ready()

    def controllers(self) -> dict[str, Any]:
        """Return the output of `tidelog controller status`."""
        found: dict[str, Any] = tidelog_json(self.bootstrap, "controller", "status")
        return found

    def active(self) -> int:
        """The id of the active controller, if there is one."""

        def find() -> int:
            return next((row["id"] for row in self.controllers()["members"] if row["state"] == "active"), 0)

        return int(eventually(find, 30))

    def close(self) -> None:
        """`kill -9` all running nodes, including paused ones."""
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    node.signal(signal.SIGCONT)
            node.kill()


@contextlib.contextmanager
def serve_cluster(directory: Path, controllers: int = 3, brokers: int = 2) -> Iterator[ServeCluster]:
    """Yield a started cluster, which is killed at the end."""
    cluster = ServeCluster(directory, controllers, brokers)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
