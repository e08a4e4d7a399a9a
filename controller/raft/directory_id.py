"""Whose directory this is: an id that is drawn when a member's directory is made, and never changes (as in KIP-853).

The quorum's log records the id of each member's directory. A member that comes back with another one (its directory
was lost, or replaced) has forgotten what it voted for and acknowledged: it may follow, but its votes and
acknowledgements do not count, and it gives none, until it is added to the quorum anew.

Format of the file `directory`: three lines of text, `tidelog directory 1`, 32 hexadecimal digits and `trusted` or
`new`, and `crc32c` with 8 hexadecimal digits over the lines before it. *Trusted* is a directory that may vote though
the log does not name it yet: one that took part before there were ids, or in the first election of its cluster.

Entry: `DirectoryFile`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from tidelog.controller.raft.files import SYSTEM_FILES, RaftFiles, replace_file
from tidelog.runtime.errors import DamagedFile, StorageFailed

FILE: Final = "directory"
_FIRST_LINE: Final = "tidelog directory 1"
_HINT: Final = "empty the controller's directory, start it, and add it to the quorum anew"


class DirectoryId(NamedTuple):
    """What the file holds."""

    id: str
    """32 hexadecimal digits."""
    is_trusted: bool


def draw(random: Callable[[], float], *, is_trusted: bool) -> DirectoryId:
    """A new id."""
    return DirectoryId("".join(f"{int(random() * (1 << 32)):08x}" for _ in range(4)), is_trusted)


class DirectoryFile:
    """See the module."""

    def __init__(self, directory: Path, files: RaftFiles = SYSTEM_FILES) -> None:
        self.path = directory / FILE
        self._files = files

    def read(self) -> DirectoryId | None:
        """None if there is no file. Raises `CorruptData`, `StorageFailed`."""
        try:
            lines = self._files.read(self.path).decode().split("\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageFailed(f"cannot read {self.path}: {error}") from error
        except UnicodeDecodeError as error:
            raise DamagedFile(str(self.path), 0, f"it is no text: {error}", hint=_HINT) from error
        if len(lines) != 4 or lines[2:] != [_checksum(lines[:2]), ""]:
            raise DamagedFile(str(self.path), 0, "it fails its checksum", hint=_HINT)
        if lines[0] != _FIRST_LINE:
            raise DamagedFile(str(self.path), 0, f"{lines[0]!r} is not known", hint=_HINT)
        id_text, _, state = lines[1].partition(" ")
        return DirectoryId(id_text, state == "trusted")

    def write(self, value: DirectoryId) -> None:
        """Durable when it returns. Raises `StorageFailed`."""
        lines = [_FIRST_LINE, f"{value.id} {'trusted' if value.is_trusted else 'new'}"]
        try:
            replace_file(self._files, self.path, "\n".join((*lines, _checksum(lines), "")).encode())
        except OSError as error:
            raise StorageFailed(f"cannot write {self.path}: {error}") from error


def _checksum(lines: list[str]) -> str:
    return "crc32c {:08x}".format(crc32c("\n".join(lines).encode()))
