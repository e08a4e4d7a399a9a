"""S3 servers for tests: started once a session through `localstack/serve.py`, shared by the workers of pytest-xdist.

A server lives as long as any worker holds a shared lock on its `users` file. The kernel gives locks back however a
worker ends, so nothing is left running after a crash, and no worker has to be the last one out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from tidelog.chaos.ports import free_port
from tidelog.storage.settings import S3Settings

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("moto", "localstack", "minio")
INSTALLED_KINDS = (
    "localstack",
    "minio",
    "kcat",
    "previous_release",
    "spark_kafka",
    "kafka",
    "kafka_apps",
    "flink",
    "nessie",
    "promtool",
    "deploy_lint",
    "node_clients",
    "older_java_clients",
    "older_python_clients",
)
"""What `localstack/install.py` provides; moto comes with the dev extra."""

ACCESS_KEY_ID = "tidelog"
SECRET_ACCESS_KEY = "tidelog-secret"
START_TIMEOUT_S = 200
"""More than `localstack/serve.py` takes to say what is wrong."""
STOP_TIMEOUT_S = 15


class Missing(Exception):
    """This machine cannot provide a server or tool; the message says which and why."""


@dataclass(frozen=True)
class S3Server:
    """A running server; what a client needs to use it."""

    kind: str
    endpoint: str
    access_key_id: str = ACCESS_KEY_ID
    secret_access_key: str = SECRET_ACCESS_KEY

    def settings(self, bucket: str = "", **overrides: Any) -> S3Settings:
        """Settings for a bucket on this server: a new one unless named."""
        values: dict[str, Any] = {
            "endpoint": self.endpoint,
            "bucket": bucket or new_bucket(),
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }
        return S3Settings(**{**values, **overrides})

    def environment(self) -> dict[str, str]:
        """The credentials, for the environment of a process such as `tidelog up`."""
        return {"AWS_ACCESS_KEY_ID": self.access_key_id, "AWS_SECRET_ACCESS_KEY": self.secret_access_key}


def new_bucket() -> str:
    """A bucket name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:16]}"


def section(server: S3Server) -> dict[str, Any]:
    """The `[s3]` section of a configuration for a new bucket on it."""
    return {
        "endpoint": server.endpoint,
        "bucket": new_bucket(),
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
    }


def install(kind: str) -> str:
    """Install `kind` if need be (this may take minutes, once); returns the path of its executable."""
    result = subprocess.run(
        [sys.executable, ROOT / "localstack" / "install.py", kind], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"{kind}: install.py ended with {result.returncode}"]
        raise Missing(lines[-1].removeprefix("missing: "))
    return result.stdout.split(maxsplit=1)[1].strip()


@contextlib.contextmanager
def _locked(path: Path, operation: int) -> Iterator[IO[str]]:
    with path.open("a") as file:
        fcntl.flock(file, operation)
        yield file


class ServerPool:
    """The servers of one test session; `directory` is common to all its workers."""

    def __init__(self, directory: Path, *, shared: bool) -> None:
        self._directory = directory
        self._shared = shared
        self._servers: dict[str, S3Server | Missing] = {}
        self._in_use = contextlib.ExitStack()
        self._started: list[int] = []

    def get(self, kind: str) -> S3Server:
        """The server of this kind, started if no worker has yet. Raises `Missing`."""
        if kind not in self._servers:
            try:
                self._servers[kind] = S3Server(kind, self._use(kind))
            except Missing as error:
                self._servers[kind] = error
        found = self._servers[kind]
        if isinstance(found, Missing):
            raise found
        return found

    def _use(self, kind: str) -> str:
        if kind in INSTALLED_KINDS:
            install(kind)
        directory = self._directory / f"s3-{kind}"
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "start.lock", fcntl.LOCK_EX):
            self._in_use.enter_context(_locked(directory / "users", fcntl.LOCK_SH))
            address = directory / "endpoint"
            if not address.exists() or not _listens(address.read_text()):
                address.write_text(self._start(kind, directory))
            return address.read_text()

    def _start(self, kind: str, directory: Path) -> str:
        reader, writer = os.pipe()
        errors = directory / "serve.err"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY}
        script = [sys.executable, str(ROOT / "localstack" / "serve.py"), kind, "--dir", str(directory / "data")]
        script += ["--port", str(free_port())]
        try:
            # Not subprocess: the server may outlive this worker, and nobody here waits for it then.
            pid = os.posix_spawn(
                sys.executable,
                [*script, "--while-locked", str(directory / "users")],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, writer, 1),
                    (os.POSIX_SPAWN_OPEN, 2, str(errors), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
                ],
                setsid=True,
            )
            self._started.append(pid)
            os.close(writer)
            writer = -1
            said = _read_line(reader)
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        _, found, endpoint = said.decode().strip().partition("ready endpoint=")
        if not found:
            reason = errors.read_text().strip() or f"no answer within {START_TIMEOUT_S} s"
            raise Missing(f"{kind}: {reason.splitlines()[-1]}")
        return endpoint

    def close(self) -> None:
        """Stop using the servers. Those that nobody else uses end by themselves; alone, wait until they have."""
        self._in_use.close()
        deadline = time.monotonic() + (0 if self._shared else STOP_TIMEOUT_S)
        for pid in self._started:
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.02)


def _read_line(reader: int) -> bytes:
    """The first line, or what came of it before the end or `START_TIMEOUT_S`."""
    said = b""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not said.endswith(b"\n") and select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(reader, 4096)
        if not part:
            break
        said += part
    return said


def _listens(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=2).close()
    except OSError:
        return False
    return True
