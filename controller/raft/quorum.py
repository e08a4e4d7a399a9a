"""Members of a quorum, in the configuration and in a member's directory.

The configured list applies when a directory is new. It is then stored in the file `quorum` (lines `id@host:port` and a
checksum) and in every snapshot, and is changed by entries of the log (`MembershipChange`). A configured address of a
known member replaces the recorded one: machines may move, ids do not change.

Entry: `parse_members`, `QuorumFile`, `MembershipChange`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from crc32c import crc32c

from tidelog.controller.model.addresses import is_address
from tidelog.controller.raft.files import SYSTEM_FILES, RaftFiles, replace_file
from tidelog.runtime.errors import ConfigError, DamagedFile, StorageFailed

Members = dict[int, str]
"""Address (`host:port`) by node id."""
SIZES = (1, 3, 5)
MAX_MEMBERS = 7
"""Allows replacing a member; more than 5 have no benefit otherwise."""


class MembershipChange(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the log that adds or removes one member."""

    operation: Literal["add", "rem"]
    node_id: int
    address: str
    directory: str = ""
    """With `add`: the id of its directory, if it is known. For a member that is there already, it records the id."""


class Quorum(NamedTuple):
    """Members, and the directories that the log knows them by. A member without one may have any."""

    members: Members
    directories: dict[int, str]

    def copy(self) -> Quorum:
        """That can be changed by itself."""
        return Quorum(dict(self.members), dict(self.directories))

    def apply(self, change: MembershipChange) -> None:
        """Make a change of the log."""
        if change.operation == "rem":
            self.members.pop(change.node_id, None)
            self.directories.pop(change.node_id, None)
            return
        self.members[change.node_id] = change.address
        if change.directory:
            self.directories[change.node_id] = change.directory

    def with_change(self, change: MembershipChange) -> Quorum:
        """What it is after a change."""
        changed = self.copy()
        changed.apply(change)
        return changed

    def unheard(self) -> list[int]:
        """The members without a recorded directory, if there are so many that the others are no majority; else none.

        Such a quorum might elect nobody: a member that the log does not name yet may have an empty directory, and an
        empty member does not vote for one that has entries.
        """
        without = sorted(self.members.keys() - self.directories.keys())
        return without if 2 * (len(self.members) - len(without)) <= len(self.members) else []


def parse_member(text: str) -> tuple[int, str]:
    """Parse `id@host:port` into `(id, "host:port")`. Raises `ConfigError`."""
    id_text, at, address = text.partition("@")
    if not (at and id_text.isdecimal() and is_address(address)) or int(id_text) > 0x7FFF_FFFF:
        raise ConfigError(f"a controller is written as ID@HOST:PORT, not {text!r}", hint="for example 1@10.0.0.1:9193")
    return int(id_text), address


def parse_members(texts: Sequence[str]) -> Members:
    """Parse the configured list. Raises `ConfigError` for a malformed or repeated member."""
    members: Members = {}
    for text in texts:
        node_id, address = parse_member(text)
        if node_id in members or address in members.values():
            raise ConfigError(f"controller.members names {text!r} twice")
        members[node_id] = address
    if len(members) > MAX_MEMBERS:
        raise ConfigError(f"controller.members has {len(members)} members; a quorum has 1, 3 or 5")
    return members


def format_members(members: Mapping[int, str]) -> list[str]:
    """Return the inverse of `parse_members`."""
    return [f"{node_id}@{members[node_id]}" for node_id in sorted(members)]


class QuorumFile:
    """The file with the members at the first start of this directory."""

    def __init__(self, directory: Path, files: RaftFiles = SYSTEM_FILES) -> None:
        self.path = directory / "quorum"
        self._files = files

    def read(self) -> Members | None:
        """Return the members, or None without a file. Raises `CorruptData`, `StorageFailed`."""
        try:
            raw = self._files.read(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageFailed(f"cannot read {self.path}: {error}") from error
        try:
            body, _, checksum = raw.decode().removesuffix("\n").rpartition("\n")
        except UnicodeDecodeError as error:
            raise self._damaged(f"it is not text: {error}") from error
        if checksum != _checksum(body):
            raise self._damaged("it fails its checksum")
        try:
            return parse_members(body.splitlines())
        except ConfigError as error:
            raise self._damaged(error.message) from error

    def _damaged(self, what: str) -> DamagedFile:
        return DamagedFile(str(self.path), 0, what, hint="restore it from another member's directory")

    def write(self, members: Mapping[int, str]) -> None:
        """Write the members; durable on return. Raises `StorageFailed`."""
        body = "\n".join(format_members(members))
        try:
            self._files.make_directory(self.path.parent)
            replace_file(self._files, self.path, f"{body}\n{_checksum(body)}\n".encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {self.path}: {error}") from error


def _checksum(body: str) -> str:
    return f"crc32c {crc32c(body.encode()):08x}"
