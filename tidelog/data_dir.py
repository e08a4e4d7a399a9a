"""The data directory: who it belongs to, and that only one process uses it.

`identity.json` says which cluster and broker the directory belongs to. It is written in two steps, each durable: a
`check_code` is drawn and stored before the broker registers, the cluster id is added after the controller has accepted
it (hot-tier.md C2), so a crash between them is finished by the next start. Without a configured id the broker id is
missing (-1) until one is assigned. `lock` is held for the life of the process.

    DIR/identity.json   {"format": 1, "broker_id" or -1, "check_code", "cluster_id" or "", "crc32c"}
    DIR/lock            flock(2), holds the pid
    DIR/wal/  DIR/bucket/  DIR/controller/

Entry: `DataDirectory.open`; `read_identity` to look only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import crc32c

from runtime.errors import DamagedFile, TidelogError

FORMAT = 1
IDENTITY_FILE = "identity.json"
LONE_NODE_ID = 1
"""Of a process that is its own single controller and was given no other."""


class WrongDataDirectory(TidelogError):
    """The data directory is in use, or belongs to another cluster or broker."""

    exit_code = 9


def json_checksum(body: dict[str, Any]) -> int:
    """CRC32C of a JSON object, however its text was laid out."""
    return int(crc32c.crc32c(json.dumps(body, sort_keys=True).encode()))


def read_identity(file: Path) -> dict[str, Any] | None:
    """Read and check an identity file; None if there is none. Raises `CorruptData`, `OSError`."""
    try:
        raw = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        body = json.loads(raw.decode())
        stored = body.pop("crc32c")
        if body["format"] != FORMAT or stored != json_checksum(body):
            raise ValueError("checksum or format does not match")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFile(
            str(file),
            0,
            f"the identity file is damaged: {error}",
            hint="restore it from a copy; deleting it makes this a new, empty broker directory",
        ) from error
    assert isinstance(body, dict)
    return body


def _machine() -> str:
    """The machine's own id, where there is one."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


class DataDirectory:
    """An opened, locked data directory."""

    def __init__(self, path: Path, lock_fd: int, broker_id: int, check_code: str, cluster_id: str) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.broker_id = broker_id
        """-1 until one is assigned."""
        self.check_code = check_code
        self.cluster_id = cluster_id
        """Empty until the broker has registered once."""

    @classmethod
    def open(cls, path: Path, broker_id: int, new_check_code: str) -> DataDirectory:
        """Create or open `path`, lock it and read its identity.

        A `broker_id` of -1 is whatever the directory has. `new_check_code` is stored if it has no identity yet. Raises
        `WrongDataDirectory`, `CorruptData`.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise WrongDataDirectory(
                f"cannot use data directory {path}: {error.strerror}", hint="check --data-dir and its permissions"
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
            os.close(lock_fd)
            raise WrongDataDirectory(
                f"data directory {path} is in use by process {holder or 'unknown'}",
                hint="stop that process, or choose another --data-dir",
            ) from error
        os.ftruncate(lock_fd, 0)
        os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
        directory = cls(path, lock_fd, broker_id, new_check_code, "")
        try:
            directory._load()
        except TidelogError:
            directory.close()
            raise
        return directory

    def _load(self) -> None:
        identity = read_identity(self.path / IDENTITY_FILE)
        if identity is None:
            self._write()
            return
        if self.broker_id < 0:
            self.broker_id = identity["broker_id"]
        if identity["broker_id"] < 0:  # a crash came between two steps of a first start
            identity["broker_id"] = self.broker_id
        if identity["broker_id"] != self.broker_id:
            raise WrongDataDirectory(
                f"data directory {self.path} belongs to broker {identity['broker_id']}, "
                f"this process is broker {self.broker_id}",
                hint="set node.id to match, or choose another data directory",
            )
        self.check_code = identity["check_code"]
        self.cluster_id = identity["cluster_id"]

    def assign(self, broker_id: int) -> None:
        """Give the directory the id that it lacks, durably."""
        assert self.broker_id < 0 <= broker_id, (self.broker_id, broker_id)
        self.broker_id = broker_id
        self._write()

    @property
    def fingerprint(self) -> str:
        """Tells this directory from copies of it, here and on other machines: it is nothing that a copy contains."""
        found = os.fstat(self._lock_fd)
        text = f"{_machine()}|{socket.gethostname()}|{found.st_dev}|{found.st_ino}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _write(self) -> None:
        body = {
            "format": FORMAT,
            "broker_id": self.broker_id,
            "check_code": self.check_code,
            "cluster_id": self.cluster_id,
        }
        draft = self.path / "identity.json.tmp"
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps({**body, "crc32c": json_checksum(body)}))
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self.path / IDENTITY_FILE)
        directory_fd = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory_fd)
        finally:
            os.close(directory_fd)

    def belongs_to(self, cluster_id: str) -> None:
        """Bind the directory to a cluster, or check that it is bound to this one. Raises `WrongDataDirectory`."""
        if self.cluster_id == cluster_id:
            return
        if self.cluster_id:
            raise WrongDataDirectory(
                f"data directory {self.path} belongs to cluster {self.cluster_id}, the controller is of {cluster_id}",
                hint="choose the data directory of this cluster, or an empty one",
            )
        self.cluster_id = cluster_id
        self._write()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock_fd)
