"""The controller interface that storage needs, as a protocol of this package (imports only go down).

The controller's client implements `ObjectManager`; tests use a small in-memory implementation. The controller enforces
rules 3, 4, 5 and 7 of docs/rules.md on each commit; storage asserts the same before it sends one. The value types are
in `tidelog.storage.commits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidelog.storage.commits import CommitObjects, ObjectSlice


class ObjectManager(Protocol):
    """The controller operations used by storage."""

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        """Reserve `count` (1–1,024) consecutive object ids and return the first.

        Ids not committed within `ttl_ms` milliseconds expire: their objects become orphans and are deleted.
        Raises `Unavailable`.
        """
        ...

    async def commit_objects(self, commit: CommitObjects) -> None:
        """Make the objects part of the metadata. On return, the local `find_objects` includes them.

        Raises `CommitRefused`, `CommitGap`, `NotPrepared` (an id expired: put the objects under new ones), and
        `Unavailable` (outcome unknown: retry with the same commit).
        """
        ...

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        """Return at most `limit` slices with offsets of `[start_offset, end_offset)`, in order, from local memory.

        As far as they are under one stream's id: see `resolve`.
        """
        ...

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        """Return the id under which objects have the offsets of a stream from `start_offset` on, and up to where.

        These are its own id and `end_offset`, but for the first offsets of a branch, which another stream has written.
        What is resolved already comes back as it is. From local memory.
        """
        ...

    def committed_wal_offset(self, replica_set_id: int) -> int:
        """Return the WAL offset up to which committed objects cover the replica set's WAL (int64 bytes)."""
        ...

    def check_current(self) -> None:
        """Raise `Unavailable` if local memory may be so old that it names objects which are not in the bucket any more.

        That is so when no controller has been heard of for longer than it waits with deletions (rule 6).
        """
        ...

    async def catch_up(self) -> None:
        """Return when local memory contains everything that was committed before this call. Raises `Unavailable`.

        Only then does an object that is missing from the bucket prove anything.
        """
        ...

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        """Record durably that a stream's records do not follow its committed range (rule 5): it takes no more commits.

        Returns when the local `quarantined` shows it, too; it applies to every later opening of the stream. Idempotent;
        success also for a deleted stream or one of another replica set. Raises `Fenced`, `Unavailable`.
        """
        ...

    def quarantined(self, stream_id: int) -> str:
        """Return why a stream is quarantined, from local memory; empty if it is not."""
        ...
