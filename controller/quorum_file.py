"""Who the members of a quorum are: as the configuration names them, and as a member's directory remembers them.

The configuration's list counts when a directory is new. It is then kept in the file `quorum` (lines `id@host:port` and
a checksum), in every snapshot, and changes come by entries of the log (`MembershipChange`). An address that the
configuration gives for a known member wins over the recorded one: machines move, ids do not.

Entry: `parse_members`, `QuorumFile`, `MembershipChange`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from crc32c import crc32c

from controller.addresses import is_address
from controller.journal import sync_directory
from runtime.errors import ConfigError, DamagedFile, StorageFailed

Members = dict[int, str]
"""Address (`host:port`) by node id."""
SIZES = (1, 3, 5)
MAX_MEMBERS = 7
"""While one is being replaced; more than 5 gain nothing."""


class MembershipChange(msgspec.Struct, frozen=True, array_like=True):
    """An entry of the log that adds or removes one member."""

    operation: Literal["add", "rem"]
    node_id: int
    address: str


def parse_member(text: str) -> tuple[int, str]:
    """`id@host:port` as `(id, "host:port")`. Raises `ConfigError`."""
    id_text, at, address = text.partition("@")
    if not (at and id_text.isdecimal() and is_address(address)) or int(id_text) > 0x7FFF_FFFF:
        raise ConfigError(f"a controller is named as ID@HOST:PORT, not {text!r}", hint="for example 1@10.0.0.1:9193")
    return int(id_text), address


def parse_members(texts: Sequence[str]) -> Members:
    """The list of the configuration. Raises `ConfigError` for a malformed or repeated one."""
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
    """The inverse of `parse_members`."""
    return [f"{node_id}@{members[node_id]}" for node_id in sorted(members)]


class QuorumFile:
    """The members at this directory's first start."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "quorum"

    def read(self) -> Members | None:
        """None if there is no file. Raises `CorruptData`, `StorageFailed`."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageFailed(f"cannot read {self.path}: {error}") from error
        try:
            body, _, checksum = raw.decode().removesuffix("\n").rpartition("\n")
        except UnicodeDecodeError as error:
            raise self._damaged(f"it is no text: {error}") from error
        if checksum != _checksum(body):
            raise self._damaged("it fails its checksum")
        try:
            return parse_members(body.splitlines())
        except ConfigError as error:
            raise self._damaged(error.message) from error

    def _damaged(self, what: str) -> DamagedFile:
        return DamagedFile(str(self.path), 0, what, hint="restore it from another member's directory")

    def write(self, members: Mapping[int, str]) -> None:
        """Durable when it returns. Raises `StorageFailed`."""
        body = "\n".join(format_members(members))
        draft = self.path.with_name(self.path.name + ".tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("w", encoding="utf-8") as file:
                file.write(f"{body}\n{_checksum(body)}\n")
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise StorageFailed(f"cannot write {self.path}: {error}") from error


def _checksum(body: str) -> str:
    return f"crc32c {crc32c(body.encode()):08x}"
