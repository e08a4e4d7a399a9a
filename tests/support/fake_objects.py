"""An `ObjectManager` in memory that enforces the commit rules as the controller does, and can be told to fail.

It refuses what breaks rules 3, 4 and 5: a stale master epoch, a WAL range that does not start at the committed end, a
stream range that does not start at the stream's committed end, ids that were never prepared, have expired or were
used. The same commit twice is success.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.errors import Unavailable
from tidelog.storage.commits import CommitGap, CommitObjects, CommitRefused, NewObject, NotPrepared, ObjectSlice


@dataclass
class FakeObjects:
    """The controller's part, for one replica set or several."""

    clock: Clock = field(default_factory=SystemClock)
    master_epoch: int = 1
    committed: dict[int, int] = field(default_factory=dict)
    """Committed WAL offset by replica set."""
    ends: dict[int, int] = field(default_factory=dict)
    """Committed end by stream; an unknown stream starts at 0."""
    slices: dict[int, list[ObjectSlice]] = field(default_factory=dict)
    commits: list[CommitObjects] = field(default_factory=list)
    prepared: dict[int, float] = field(default_factory=dict)
    """Expiry (monotonic seconds) by id."""
    deleted: set[int] = field(default_factory=set)
    """Streams that do not exist any more: refused, as if owned by somebody else."""
    fail_prepare: int = 0
    """How many of the next prepares raise `Unavailable`."""
    fail_before_commit: int = 0
    """How many of the next commits raise `Unavailable` without having happened."""
    fail_after_commit: int = 0
    """How many of the next commits happen and raise `Unavailable`."""
    fail_quarantine: int = 0
    """How many of the next quarantines raise `Unavailable`."""
    quarantines: dict[int, str] = field(default_factory=dict)
    """Why, by stream."""
    stale: bool = False
    """Whether the metadata is too old to read by."""
    fail_catch_up: bool = False
    """Whether no controller answers."""
    on_catch_up: Callable[[], None] | None = None
    catch_ups: int = 0
    on_commit: Callable[[CommitObjects], None] | None = None
    next_id: int = 1

    async def prepare_objects(self, count: int, ttl_ms: int) -> int:
        await asyncio.sleep(0)
        assert 1 <= count <= 1024
        if self.fail_prepare:
            self.fail_prepare -= 1
            raise Unavailable("prepare failed on purpose")
        first, self.next_id = self.next_id, self.next_id + count
        for object_id in range(first, first + count):
            self.prepared[object_id] = self.clock.monotonic() + ttl_ms / 1000
        return first

    async def commit_objects(self, commit: CommitObjects) -> None:
        await asyncio.sleep(0)
        if self.fail_before_commit:
            self.fail_before_commit -= 1
            raise Unavailable("commit failed on purpose, before it happened")
        if self.on_commit is not None:
            self.on_commit(commit)
        self._apply(commit)
        if self.fail_after_commit:
            self.fail_after_commit -= 1
            raise Unavailable("commit failed on purpose, after it happened")
        await asyncio.sleep(0)

    def _apply(self, commit: CommitObjects) -> None:
        if commit.master_epoch != self.master_epoch:
            raise CommitRefused(f"master epoch {commit.master_epoch} is stale, it is {self.master_epoch}")
        if commit in self.commits:
            return
        committed = self.committed.get(commit.replica_set_id, 0)
        if commit.wal_start != committed or commit.wal_end < commit.wal_start:
            raise CommitGap(f"WAL {commit.wal_start}..{commit.wal_end}, committed is {committed}")
        ends = dict(self.ends)
        for new in commit.objects:
            self._check(new, ends)
        for new in commit.objects:
            del self.prepared[new.object_id]
            for piece in new.ranges:
                one = ObjectSlice(new.object_id, new.kind, new.size, piece.start_offset, piece.end_offset)
                self.slices.setdefault(piece.stream_id, []).append(one)
        self.ends = ends
        self.committed[commit.replica_set_id] = commit.wal_end
        self.commits.append(commit)

    def _check(self, new: NewObject, ends: dict[int, int]) -> None:
        if self.prepared.get(new.object_id, 0.0) <= self.clock.monotonic():
            raise NotPrepared(f"object {new.object_id} is not prepared")
        assert list(new.ranges) == sorted(new.ranges, key=lambda one: one.stream_id)
        for piece in new.ranges:
            if piece.stream_id in self.deleted:
                raise CommitRefused(f"stream {piece.stream_id} is not open by this replica set")
            if piece.start_offset != ends.get(piece.stream_id, 0):
                message = f"stream {piece.stream_id} starts at {piece.start_offset}, not {ends.get(piece.stream_id, 0)}"
                raise CommitGap(message, stream_id=piece.stream_id)
            assert piece.end_offset > piece.start_offset
            ends[piece.stream_id] = piece.end_offset

    def check_current(self) -> None:
        if self.stale:
            raise Unavailable("the metadata is too old on purpose")

    async def catch_up(self) -> None:
        await asyncio.sleep(0)
        self.catch_ups += 1
        if self.fail_catch_up:
            raise Unavailable("no controller answers on purpose")
        if self.on_catch_up is not None:
            self.on_catch_up()

    def resolve(self, stream_id: int, start_offset: int, end_offset: int) -> tuple[int, int]:
        return stream_id, end_offset

    def find_objects(self, stream_id: int, start_offset: int, end_offset: int, limit: int) -> Sequence[ObjectSlice]:
        found = [
            one
            for one in self.slices.get(stream_id, [])
            if one.end_offset > start_offset and one.start_offset < end_offset
        ]
        return found[:limit]

    def committed_wal_offset(self, replica_set_id: int) -> int:
        return self.committed.get(replica_set_id, 0)

    async def quarantine_stream(self, replica_set_id: int, master_epoch: int, stream_id: int, reason: str) -> None:
        await asyncio.sleep(0)
        if self.fail_quarantine:
            self.fail_quarantine -= 1
            raise Unavailable("quarantine failed on purpose")
        if master_epoch != self.master_epoch:
            raise CommitRefused(f"master epoch {master_epoch} is stale, it is {self.master_epoch}")
        self.quarantines.setdefault(stream_id, reason)

    def quarantined(self, stream_id: int) -> str:
        return self.quarantines.get(stream_id, "")
