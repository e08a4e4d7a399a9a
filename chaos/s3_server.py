"""A separate S3 server for a run: moto, MinIO or LocalStack, started by `localstack/serve.py` of a checkout.

It ends with the run in any case: its standard input is a pipe from this process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tidelog.runtime.errors import NotFound, Unavailable

KINDS = ("moto", "minio", "localstack")
SCRIPT = Path(__file__).resolve().parents[1] / "localstack" / "serve.py"
READY = "ready endpoint="
STOP_TIMEOUT_S = 20


@dataclass(frozen=True)
class RunningS3:
    """A running server's address. The keys are the defaults of `localstack/serve.py`."""

    endpoint: str
    access_key_id: str = "tidelog"
    secret_access_key: str = "tidelog-secret"


@contextlib.contextmanager
def s3_server(kind: str, directory: Path) -> Iterator[RunningS3]:
    """Yield a started server with its data in `directory`. Raises `NotFound`, `Unavailable`."""
    if not SCRIPT.exists():
        raise NotFound(
            f"there is no {SCRIPT}: servers are started from a checkout of Tidelog",
            hint="name a running one with --s3-endpoint, --access-key and --secret-key",
        )
    directory.mkdir(parents=True, exist_ok=True)
    errors = directory / "serve.err"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), kind, "--dir", str(directory / "data")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(),
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline().strip()
        if not line.startswith(READY):
            said = errors.read_text().strip().splitlines() or [f"it ended with {process.wait(STOP_TIMEOUT_S)}"]
            raise Unavailable(f"{kind} does not start: {said[-1]}", hint=f"python {SCRIPT} {kind}")
        yield RunningS3(line.removeprefix(READY))
    finally:
        process.stdin.close()
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
