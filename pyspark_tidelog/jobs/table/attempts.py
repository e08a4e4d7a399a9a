"""The files of attempts to make a commit, and what becomes of them when a run was killed.

An attempt has a name, from the number of the commit that it would make and its run; a marker, which is written before
anything else; and a directory for its data files. Its marker goes when its files are known to be in the table, or gone.

What a later run deletes is proven to be unused. A commit of number n is made on the state of number n - 1 only
(`pyspark_tidelog.jobs.table.state`), so as soon as the table is at n, whatever was written for n or less is either in
the table already, as some snapshot's manifests tell, or can never be. No clock decides. The files of a run that still
works on the next number stay.

A rewrite (`pyspark_tidelog.jobs.table.compaction`) has no number; its marker names the files that it replaces. It can
only be committed while all of them are in the table, so it is proven dead when no snapshot has one of them any more.

Entry: `Attempts`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

from pyarrow.fs import FileSelector, FileType
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import ManifestContent
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from pyspark_tidelog.jobs.table.store import refresh

_NAME = re.compile(r"^(?P<number>\d{12,19})-[0-9a-f]+$")
_REWRITE = "rewrite-"


class Attempts:
    """The attempts in one table's location."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._markers = f"{table.metadata.location.rstrip('/')}/tidelog/attempts"

    def directory(self, name: str) -> str:
        """Return the directory of an attempt's data files."""
        return attempt_directory(self._table.metadata, name)

    def begin(self, name: str, replaces: Iterable[str] = ()) -> str:
        """Write the marker of an attempt; return its directory. `replaces` are paths of data files, of a rewrite."""
        with self._table.io.new_output(f"{self._markers}/{name}").create(overwrite=True) as stream:
            stream.write(json.dumps({"replaces": sorted(replaces)}).encode())
        return self.directory(name)

    def names(self) -> list[str]:
        """Return the attempts that have a marker."""
        return sorted(name for name in _list(self._table.io, self._markers) if "/" not in name)

    def end(self, name: str, kept: Iterable[str]) -> int:
        """Delete the files of an attempt but those `kept`, which are paths, and its marker. Return how many."""
        directory = self.directory(name)
        keep = set(kept)
        found = [f"{directory}/{each}" for each in _list(self._table.io, directory)]
        for path in found:
            if path not in keep:
                self._delete(path)
        self._delete(f"{self._markers}/{name}")
        return sum(path not in keep for path in found)

    def abandon(self, name: str) -> int:
        """Delete the files of an attempt that can not be committed any more. Return how many.

        Also without its marker: another run may have cleaned up while tasks of this one still wrote. What a snapshot
        has stays, because a commit may have happened without an answer.
        """
        refresh(self._table)
        return self.end(name, referenced_files(self._table))

    def clean(self, number: int) -> int:
        """Delete what earlier runs left, with the table at commit `number`. Return how many files."""
        dead = [name for name in self.names() if _is_reached(name, number)]
        rewrites = [name for name in self.names() if name.startswith(_REWRITE)]
        if not dead and not rewrites:
            return 0
        refresh(self._table)
        referenced = referenced_files(self._table)
        gone = [name for name in rewrites if self._replaces(name) - referenced]
        return sum(self.end(name, referenced) for name in (*dead, *gone))

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # another run has cleaned up meanwhile
            self._table.io.delete(path)

    def _replaces(self, name: str) -> set[str]:
        with self._table.io.new_input(f"{self._markers}/{name}").open() as stream:
            told: dict[str, Any] = json.loads(stream.read())
        return set(told["replaces"])


def rewrite_name(run: str) -> str:
    """Return the name of a rewrite's attempt."""
    return _REWRITE + run


def attempt_directory(metadata: TableMetadata, name: str) -> str:
    """Return the directory of an attempt's data files."""
    base = metadata.properties.get("write.data.path", f"{metadata.location.rstrip('/')}/data")
    return f"{base.rstrip('/')}/tidelog/{name}"


def _is_reached(name: str, number: int) -> bool:
    match = _NAME.match(name)
    return match is not None and int(match["number"]) <= number


def referenced_files(table: Table) -> set[str]:
    """Return the paths of all data files that a snapshot of the table's metadata has."""
    found: set[str] = set()
    seen: set[str] = set()
    for snapshot in table.metadata.snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path in seen or manifest.content != ManifestContent.DATA:
                continue
            seen.add(manifest.manifest_path)
            entries = manifest.fetch_manifest_entry(table.io, discard_deleted=True)
            found.update(entry.data_file.file_path for entry in entries)
    return found


def _list(io: FileIO, directory: str) -> list[str]:
    """Return the files below a directory, relative to it."""
    assert isinstance(io, PyArrowFileIO)
    scheme, netloc, path = PyArrowFileIO.parse_location(directory, io.properties)
    entries = io.fs_by_scheme(scheme, netloc).get_file_info(FileSelector(path, allow_not_found=True, recursive=True))
    return sorted(each.path.removeprefix(path).lstrip("/") for each in entries if each.type == FileType.File)
