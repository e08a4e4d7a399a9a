"""The data directory: its identity, and the lock that limits it to one process.

`identity.json` records the cluster and the broker that the directory belongs to. It is written in two durable steps: a
`check_code` is generated and stored before the broker registers; the cluster id is added after the controller has
accepted the registration (docs/protocols.md). The next start completes the sequence after a crash between them. Without
a configured id, the broker id is -1 until an id is assigned. `lock` is held until the process ends.

    DIR/identity.json   {"format": 1, "broker_id" or -1, "check_code", "cluster_id" or "", "crc32c"}
    DIR/lock            flock(2), holds the pid
    DIR/up.lock         the same for `tidelog up`, which starts the processes of one or several data directories
    DIR/wal/  DIR/bucket/  DIR/controller/

Entry: `DataDirectory.open`; `lock_file`; `read_identity` for read-only access.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import crc32c

from tidelog.runtime.errors import DamagedFile, TidelogError

FORMAT = 1
IDENTITY_FILE = "identity.json"
UP_LOCK_FILE = "up.lock"
WAL_FOLDER = "wal"
CONTROLLER_FOLDER = "controller"
_LOCK_LOOKS = 10
_LOCK_PAUSE_S = 0.02
"""A process writes its pid right after it has locked the file. From another pid namespace it is not visible at all."""
LONE_NODE_ID = 1
"""The default id of a process that is its own single controller."""


class WrongDataDirectory(TidelogError):
    """The data directory is in use, or belongs to another cluster or broker."""

    exit_code = 9


def json_checksum(body: dict[str, Any]) -> int:
    """CRC32C of a JSON object, independent of the formatting of its text."""
    return int(crc32c.crc32c(json.dumps(body, sort_keys=True).encode()))


def read_identity(file: Path) -> dict[str, Any] | None:
    """Read and check an identity file; None if it does not exist. Raises `CorruptData`, `OSError`."""
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
            hint="restore it from a copy; without it this is a new broker's, unless node.id says which one",
        ) from error
    assert isinstance(body, dict)
    return body


def _machine() -> str:
    """The id of the machine, if the system has one."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def lock_file(path: Path, name: str) -> int:
    """Create the directory `path` if necessary, lock its file `name` and return the descriptor, which holds the lock.

    Raises `WrongDataDirectory`, which names the process that holds it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise WrongDataDirectory(
            f"cannot use data directory {path}: {error.strerror}", hint="check --data-dir and its permissions"
        ) from error
    for _ in range(_LOCK_LOOKS):
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip()
            if holder and Path("/proc", holder).exists():
                break
            time.sleep(_LOCK_PAUSE_S)  # it has locked the file and not written its pid yet
        else:
            os.ftruncate(lock_fd, 0)
            os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
            return lock_fd
    os.close(lock_fd)
    raise WrongDataDirectory(
        f"data directory {path} is in use by process {holder or 'unknown'}",
        hint="stop that process, or choose another --data-dir",
    )


class DataDirectory:
    """An opened, locked data directory."""

    def __init__(self, path: Path, lock_fd: int, broker_id: int, check_code: str, cluster_id: str) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.broker_id = broker_id
        """-1 until an id is assigned."""
        self.check_code = check_code
        self.cluster_id = cluster_id
        """Empty until the broker has registered once."""

    @classmethod
    def open(cls, path: Path, broker_id: int, new_check_code: str) -> DataDirectory:
        """Create or open `path`, lock it and read its identity.

        A `broker_id` of -1 accepts any id in the directory. `new_check_code` is stored if the directory has no identity
        yet. Raises `WrongDataDirectory`, `CorruptData`.
        """
        lock_fd = lock_file(path, "lock")
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
        if identity["broker_id"] < 0:  # a crash interrupted a first start between two steps
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
        """Store an id in a directory without one, durably."""
        assert self.broker_id < 0 <= broker_id, (self.broker_id, broker_id)
        self.broker_id = broker_id
        self._write()

    @property
    def fingerprint(self) -> str:
        """Identify this directory, but not its copies: no file contains the value."""
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
        """Bind the directory to a cluster, or check that it is bound to this cluster. Raises `WrongDataDirectory`."""
        if self.cluster_id == cluster_id:
            return
        if self.cluster_id:
            raise WrongDataDirectory(
                f"data directory {self.path} belongs to cluster {self.cluster_id}, the controller to {cluster_id}",
                hint="choose the data directory of this cluster, or an empty one",
            )
        self.cluster_id = cluster_id
        self._write()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock_fd)
