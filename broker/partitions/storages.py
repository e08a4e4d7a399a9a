"""`MasterStorages`: the storages of the replica sets that this broker is the master of, each in its master epoch.

A partition is stored in the storage of its replica set. It is open here while this broker is the set's master in the
metadata *and* its storage serves in that master epoch: in an older one it would be fenced, and a newer one has not
begun here yet.

Entry: `MasterStorages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tidelog.runtime.errors import NotFound
from tidelog.storage.storage import Storage


class Mastership(NamedTuple):
    """One term of a master."""

    replica_set: int
    master_epoch: int


class MasterStorages:
    """See the module. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._storages: dict[int, Storage] = {}
        self._on_changed: list[Callable[[], None]] = []
        self._on_added: list[Callable[[Storage], None]] = []
        self._on_removed: list[Callable[[Storage], None]] = []

    def on_changed(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever a storage begins or ends to serve."""
        self._on_changed.append(changed)

    def on_each(self, added: Callable[[Storage], None], removed: Callable[[Storage], None]) -> None:
        """Call `added` for each storage that begins to serve, and `removed` for each that ends."""
        self._on_added.append(added)
        self._on_removed.append(removed)

    def add(self, storage: Storage) -> None:
        """A storage, which has been started, serves from now on."""
        assert storage.master_epoch >= 0, "the storage was not started"
        assert storage.replica_set_id not in self._storages, f"replica set {storage.replica_set_id} has a storage"
        self._storages[storage.replica_set_id] = storage
        for added in self._on_added:
            added(storage)
        self._changed()

    def remove(self, replica_set: int) -> None:
        """The storage of a replica set serves no more."""
        found = self._storages.pop(replica_set, None)
        if found is not None:
            for removed in self._on_removed:
                removed(found)
            self._changed()

    def get(self, replica_set: int) -> Storage:
        """Return the storage of a replica set. Raises `NotFound` if none serves it here."""
        found = self._storages.get(replica_set)
        if found is None:
            raise NotFound(f"this broker is not the master of replica set {replica_set}")
        return found

    def in_term(self, term: Mastership) -> Storage:
        """Return the storage of a master's term. Raises `NotFound` if that term has ended, or has not begun, here.

        For work that began in this term: a storage of a later one would take it, after other masters, for its own.
        """
        found = self.get(term.replica_set)
        if found.master_epoch != term.master_epoch:
            raise NotFound(
                f"this broker leads replica set {term.replica_set} in master epoch {found.master_epoch}, not in"
                f" {term.master_epoch}"
            )
        return found

    def all(self) -> Iterable[Storage]:
        """Return the storages that serve, in no particular order."""
        return list(self._storages.values())

    def terms(self) -> dict[int, int]:
        """Return the master epochs in which storages serve, by replica set."""
        return {replica_set: storage.master_epoch for replica_set, storage in self._storages.items()}

    def not_uploaded_of(self, replica_set: int) -> int:
        """Return the bytes of a replica set that no committed object has; 0 if it is not served here."""
        found = self._storages.get(replica_set)
        return found.not_uploaded_bytes if found is not None else 0

    @property
    def not_uploaded_bytes(self) -> int:
        """Return the bytes of all these storages that no committed object has."""
        return sum(storage.not_uploaded_bytes for storage in self._storages.values())

    def _changed(self) -> None:
        for changed in self._on_changed:
            changed()
