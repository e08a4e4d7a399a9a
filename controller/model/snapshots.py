"""Named snapshots and branches of topics, and their commands (docs/design/0031), from level 5 on.

A snapshot names, for each stream of its topics, the offsets that it holds. A branch is a topic whose streams begin with
offsets that are in objects of other streams. Both say where these are: in *extents*, ranges of the streams under whose
ids the objects have them. An object with an offset of an extent is not destroyed, nor replaced by another one.

What holds for all commands is in `tidelog.controller.model.commands`, which lists these, too.

Entry: `SnapshotRecord`, `BranchRecord`, `extent_at`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tidelog.controller.model.command import Command
from tidelog.runtime.errors import AlreadyExists, NotFound, TidelogError
from tidelog.storage.commits import StreamRange

MAX_SNAPSHOTS = 256
MAX_NAME_CHARS = 249
"""As of a topic's name."""
MAX_PARTITIONS_PER_SNAPSHOT = 4_096
"""A snapshot is one command and one row: about 400 bytes for each partition."""
MAX_HELD_PARTITIONS = 20_000
"""Partitions of all snapshots and branches together: some ten megabytes in the memory of each process."""
MAX_EXTENTS = 8
"""Extents of one stream, one more for each branch of a branch. A lookup goes through them."""

Extents = tuple[StreamRange, ...]
"""Where the first offsets of a stream are, in order and without gaps; empty ranges are left out."""
PartitionExtents = tuple[Extents, Extents, Extents, Extents]
"""Of the meta, data, time and txn stream."""
Ends = tuple[int, int, int, int]
"""An offset of the meta, data, time and txn stream."""


class SnapshotExists(AlreadyExists):
    """There is a snapshot of this name."""


class UnknownSnapshot(NotFound):
    """There is no snapshot of this name, or it does not have this topic."""


class CutRefused(TidelogError):
    """The offsets to hold are not all committed, or gone meanwhile. Ask the leaders for a cut again."""

    retriable = True
    exit_code = 5


class TopicCut(msgspec.Struct, frozen=True, array_like=True):
    """Up to where a snapshot holds a topic."""

    topic_id: bytes
    ends: tuple[Ends, ...]
    """For each partition, by index: the ends that its leader named."""


class HeldPartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition as a snapshot holds it."""

    first_stream: int
    leader_epoch: int
    """The largest at that version."""
    starts: Ends
    ends: Ends
    extents: PartitionExtents


class HeldTopic(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A topic as a snapshot holds it."""

    id: bytes
    name: str
    configs: dict[str, str]
    replicas: int
    """The replication factor that it was created with; 0: none."""
    partitions: tuple[HeldPartition, ...]
    """By index."""


class SnapshotRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `snapshots`, key: name."""

    name: str
    version: int
    """The metadata version (log index) at which it was taken."""
    created_ms: int
    """By the proposer's wall clock."""
    topics: tuple[HeldTopic, ...]

    @property
    def partition_count(self) -> int:
        """Return the number of partitions that it holds."""
        return sum(len(topic.partitions) for topic in self.topics)

    def extents(self) -> Iterator[tuple[int, StreamRange]]:
        """Iterate over what it holds, each with the first stream of the partition that it is held for."""
        for topic in self.topics:
            for partition in topic.partitions:
                for extents in partition.extents:
                    for extent in extents:
                        yield partition.first_stream, extent


class BranchRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Table `branches`, key: the first stream of a partition of a branch."""

    first_stream: int
    source: str
    """`TOPIC@SNAPSHOT`, for operators: neither need exist any more."""
    ends: Ends
    """Where its own offsets begin."""
    extents: PartitionExtents


class CreateSnapshot(Command, frozen=True, array_like=True, tag=110):
    """Hold topics up to a cut. Value: the version at which it was taken.

    The ends of each partition are confirmed and committed. Refused with `CutRefused` if one is not, or if a partition
    is missing.
    """

    name: str
    topics: tuple[TopicCut, ...]


class DeleteSnapshot(Command, frozen=True, array_like=True, tag=111):
    """Hold a snapshot's topics no longer. Branches of it stay whole."""

    name: str


class CreateBranch(Command, frozen=True, array_like=True, tag=112):
    """Create a topic that begins with what a snapshot holds of another one. Value: the `TopicRecord`.

    It has the configs that the topic had, but for `changes`, and as many partitions.
    """

    snapshot: str
    source: str
    """The topic's name when the snapshot was taken."""
    topic_id: bytes
    """Random, 16 bytes."""
    name: str
    changes: dict[str, str | None]
    """None removes a config."""
    loads: tuple[tuple[int, int], ...] | None = None
    """As in `CreateTopic`."""


SnapshotCommand = CreateSnapshot | DeleteSnapshot | CreateBranch


def extent_at(extents: Extents, offset: int) -> StreamRange | None:
    """Return the extent that holds an offset; None: the stream's own objects do."""
    return next((each for each in extents if offset < each.end_offset), None)
