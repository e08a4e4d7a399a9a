"""The buckets of the benchmarks: the embedded store, and a MinIO that runs during a measurement."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench._programs import scratch_directory
from tidelog.storage.bucket.open import EMBEDDED_BUCKET
from tidelog.storage.settings import S3Settings

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("embedded", "minio")
KEY_ID, KEY = "tidelog", "tidelog-secret"


class Bucket(NamedTuple):
    """The location of a store."""

    name: str
    s3: S3Settings
    data_dir: Path
    files: Path
    """Files of the bucket's server, to be dropped from the page cache."""
    server_pid: int = 0
    """Process of the server, 0 if the store is embedded."""

    def flags(self) -> list[str]:
        """Flags for `tidelog up`; the credentials are passed in the environment (`environment`)."""
        if not self.s3.endpoint:
            return []
        return ["--set", f"s3.endpoint={self.s3.endpoint}", "--set", f"s3.bucket={self.s3.bucket}"]


@contextmanager
def minio(directory: Path) -> Iterator[tuple[str, int] | None]:
    """Yield endpoint and pid of a MinIO with its files in `directory`; None if this machine cannot run one."""
    server = subprocess.Popen(
        [sys.executable, ROOT / "localstack" / "serve.py", "minio", "--dir", str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY},
    )
    try:
        assert server.stdout is not None
        _, found, endpoint = server.stdout.readline().strip().partition("ready endpoint=")
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        yield (endpoint, int(children[0])) if found else None
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.terminate()
        server.wait()


@contextmanager
def bucket(kind: str, base: str | None = None, **settings: Any) -> Iterator[Bucket]:
    """Yield a new, empty bucket. Raises `SystemExit` if this machine cannot run its server: nothing is measured."""
    with scratch_directory(base) as directory:
        if kind == "embedded":
            yield Bucket(kind, S3Settings(**settings), directory, directory / EMBEDDED_BUCKET)
            return
        with minio(directory / "minio") as server:
            if server is None:
                raise SystemExit("minio cannot be run on this machine")
            s3 = S3Settings(
                endpoint=server[0],
                bucket=f"bench-{uuid.uuid4().hex[:8]}",
                access_key_id=KEY_ID,
                secret_access_key=KEY,
                **settings,
            )
            yield Bucket(kind, s3, directory / "data", directory / "minio", server[1])


def environment() -> dict[str, str]:
    """The credentials, for the environment of a process such as `tidelog up`."""
    return {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": KEY}


def drop_page_cache(directory: Path) -> None:
    """Drop the files under `directory`, which are on disk, from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
