"""The archive that `tidelog debug bundle` writes: bounded, without secrets, and with a list of what it lacks.

    manifest.json     what is in it, what was cut, what is missing and why
    doctor.txt/json   the findings
    …                 what was added

Everything goes through a `Masker` before it is cut, so no half of a secret is left at an end.

Entry: `Bundle`.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any, Final, NamedTuple

from tidelog.doctor.masking import Masker
from tidelog.runtime.errors import AlreadyExists, StorageFailed
from tidelog.runtime.version import VERSION

MAX_ENTRY_BYTES: Final = 4 << 20
MAX_BUNDLE_BYTES: Final = 64 << 20
"""Of all entries together, before they are compressed."""
FORMAT: Final = 1


class _Entry(NamedTuple):
    name: str
    content: bytes
    left_out_bytes: int


def _name(name: str) -> str:
    """Return the name of an entry as text: a file's name may be any bytes."""
    return name.encode("utf-8", "backslashreplace").decode()


class Bundle:
    """An archive in the making."""

    def __init__(self, masker: Masker) -> None:
        self._masker = masker
        self._entries: list[_Entry] = []
        self._size = 0
        self.missing: dict[str, str] = {}
        """What could not be had, and why."""

    def add_text(self, name: str, text: str, *, keeps_end: bool = False) -> None:
        """Add a text; of one that is too long the begin is kept, or the end."""
        name = _name(name)
        content = self._masker.mask(text).encode("utf-8", "replace")
        room = min(MAX_ENTRY_BYTES, MAX_BUNDLE_BYTES - self._size)
        if room <= 0:
            self.missing[name] = f"the bundle has its {MAX_BUNDLE_BYTES >> 20} MiB"
            return
        kept = content[-room:] if keeps_end else content[:room]
        self._entries.append(_Entry(name, kept, len(content) - len(kept)))
        self._size += len(kept)

    def add_json(self, name: str, document: Any) -> None:
        """Add a document, indented."""
        self.add_text(name, json.dumps(document, indent=1, ensure_ascii=False, default=str) + "\n")

    def lack(self, name: str, why: str) -> None:
        """Note that something could not be had."""
        self.missing[_name(name)] = self._masker.mask(why)

    def manifest(self, made_ms: int) -> dict[str, Any]:
        """Describe the entries."""
        return {
            "format": FORMAT,
            "tidelog": VERSION,
            "made_ms": made_ms,
            "entries": [
                {"name": each.name, "bytes": len(each.content), "left_out_bytes": each.left_out_bytes}
                for each in self._entries
            ],
            "missing": self.missing,
        }

    def write(self, path: Path, made_ms: int) -> int:
        """Write the archive, for its owner only, and return its size. An existing file is kept.

        Raises `AlreadyExists`, `StorageFailed`.
        """
        folder = path.name.removesuffix(".gz").removesuffix(".tgz").removesuffix(".tar")
        manifest = json.dumps(self.manifest(made_ms), indent=1, ensure_ascii=False).encode()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise AlreadyExists(f"{path} exists", hint="name another file with -o") from error
        except OSError as error:
            raise StorageFailed(f"cannot write {path}: {error.strerror}", hint="name another file with -o") from error
        try:
            with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
                for name, content in [("manifest.json", manifest), *(each[:2] for each in self._entries)]:
                    member = tarfile.TarInfo(f"{folder}/{name}")
                    member.size, member.mode, member.mtime = len(content), 0o600, made_ms // 1000
                    archive.addfile(member, io.BytesIO(content))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise StorageFailed(f"cannot write {path}: {error.strerror}", hint="make room, or name another") from error
        return path.stat().st_size
