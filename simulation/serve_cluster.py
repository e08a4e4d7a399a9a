"""Clusters of real processes: controllers and brokers as `tidelog serve` processes of their own over one bucket,
which a harness kills, pauses and starts again one by one.

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

from simulation.ports import free_port


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


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_starter() -> None:
    """Between fork and exec."""
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
        self.dies_with_starter = False
        """Kill it when the thread that starts it ends, however that happens."""
        self.output: list[str] = []
        self._ready = threading.Event()

    def start(self) -> None:
        """Start the process; `wait_ready` waits for it."""
        self._ready.clear()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIDELOG_")}
        command = [sys.executable, "-m", "tidelog", "serve", "--config", str(self._config)]
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
        """Until clients can connect, or it can be elected. Raises `AssertionError` with what it said last."""
        assert self._ready.wait(timeout_s), "\n".join(self.output[-50:])

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self.process is not None
        return self.process.pid

    def is_ready(self) -> bool:
        """Whether it said so since it was started last."""
        return self._ready.is_set()

    def is_running(self) -> bool:
        """Whether it was started and has not ended (a paused one runs)."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """`kill -9`, and wait for its end; nothing if it has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and wait; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)


class ServeCluster:
    """Controllers with ids from 1 and brokers with ids from 101, each a process of its own, over one bucket.

    `combined`: the controllers are the brokers, too.
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
        """Start all, and wait until each is ready."""
        for node_id in dict.fromkeys((*self.members, *self.kafka_ports)):
            self.add(node_id).start()
        for node in self.nodes.values():
            node.wait_ready()

    def controllers(self) -> dict[str, Any]:
        """What `tidelog controller status` says."""
        found: dict[str, Any] = tidelog_json(self.bootstrap, "controller", "status")
        return found

    def active(self) -> int:
        """The id of the active controller, when there is one."""

        def find() -> int:
            return next((row["id"] for row in self.controllers()["members"] if row["state"] == "active"), 0)

        return int(eventually(find, 30))

    def close(self) -> None:
        """`kill -9` all that run, paused ones, too."""
        for node in self.nodes.values():
            if node.process is not None and node.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    node.signal(signal.SIGCONT)
            node.kill()


@contextlib.contextmanager
def serve_cluster(directory: Path, controllers: int = 3, brokers: int = 2) -> Iterator[ServeCluster]:
    """A started cluster, all of it killed at the end."""
    cluster = ServeCluster(directory, controllers, brokers)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
