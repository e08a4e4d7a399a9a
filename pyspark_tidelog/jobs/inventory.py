"""What the metadata say of a cluster's objects: which there are, what they hold, whether ranges follow one another.

Taken under a lease, so what it names stays in the bucket for as long as the lease lasts. A question may be answered in
pieces from different versions of the metadata, between which compaction replaces objects: where the pieces do not fit
together, that place is asked for anew, and only what one answer tells is believed.

Entry: `take_inventory`, `range_problems`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pyspark_tidelog.cluster import Cluster, Lookups
from pyspark_tidelog.jobs.audit_tasks import AuditedObject
from pyspark_tidelog.jobs.frame import ClusterAccess
from pyspark_tidelog.plan import DATA, STREAM_PARTS, PlannedRange, stream_in
from tidelog.runtime.errors import NotFound, Unavailable
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.report import KINDS

ATTEMPTS = 5
"""How often topics are asked for again when one of them was deleted meanwhile."""


class Owner(NamedTuple):
    """Whose a stream is."""

    topic: str
    partition: int
    part: str


class RangeProblem(NamedTuple):
    """A place where the committed ranges of a partition do not follow one another."""

    topic: str
    partition: int
    stream: int
    start: int
    end: int
    message: str


@dataclass(frozen=True)
class Inventory:
    """What the metadata say."""

    cluster_id: str
    objects: tuple[AuditedObject, ...]
    """All that are committed, by id."""
    known: frozenset[int]
    """Ids of all that the metadata know, in any state."""
    owners: dict[int, Owner]
    """By the id of a stream."""
    partitions: int
    problems: tuple[RangeProblem, ...]


def take_inventory(access: ClusterAccess, version: int) -> Inventory:
    """Ask for everything, in metadata of this version or a newer one. Raises `Unavailable`, `ConfigError`."""
    for _ in range(ATTEMPTS):
        cluster = access.connect()
        lookups = cluster.lookups()
        try:
            ranges = _all_ranges(cluster, lookups, version)
            problems = [told for one in ranges for told in _confirmed(lookups, one, version)]
        except NotFound:
            continue  # a topic was deleted after its name was told
        return _inventory(lookups, ranges, problems, version)
    raise Unavailable("topics are deleted faster than they can be listed", hint="try again")


def _all_ranges(cluster: Cluster, lookups: Lookups, version: int) -> list[PlannedRange]:
    places = [(*place, 0, -1) for place in cluster.partitions(cluster.all_topics)]
    return lookups.slices(places, version).ranges if places else []


def _inventory(
    lookups: Lookups, ranges: Iterable[PlannedRange], problems: Iterable[RangeProblem], version: int
) -> Inventory:
    cluster_id = lookups.cluster_id()
    held: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    about: dict[int, tuple[str, int]] = {}
    owners: dict[int, Owner] = {}
    sources: dict[int, Owner] = {}
    count = 0
    for one in ranges:
        count += 1
        for number, part in enumerate(STREAM_PARTS):
            owners[one.stream - DATA + number] = Owner(one.topic, one.partition, part)
            for shared in one.shared:
                sources[shared.stream - DATA + number] = Owner(one.topic, one.partition, part)
        for piece in one.slices:
            held[piece.object_id].append((stream_in(piece, one.stream, one.shared), piece.start, piece.end))
            about[piece.object_id] = (KINDS.get(piece.kind, str(piece.kind)), piece.size)
    owners = sources | owners  # of a stream whose topic was deleted: a branch that has its records
    known = lookups.objects(version)
    about.update({one.id: (one.kind, one.size) for one in known if one.state == "committed"})
    objects = [
        AuditedObject(id_, object_key(cluster_id, id_), kind, size, tuple(held[id_]))
        for id_, (kind, size) in sorted(about.items())
    ]
    ids = frozenset([one.id for one in known] + list(about))
    return Inventory(cluster_id, tuple(objects), ids, owners, count, tuple(problems))


def _confirmed(lookups: Lookups, one: PlannedRange, version: int) -> list[RangeProblem]:
    """Return the problems of a range that an answer of its own shows, too. Raises `NotFound`."""
    found = []
    for told in range_problems(one):
        around = (one.topic, one.partition, max(one.start, told.start - 1), told.end + 1)
        (again,) = lookups.slices([around], version).ranges
        found += [each for each in range_problems(again) if each.start < told.end and told.start < each.end]
    return found


def range_problems(one: PlannedRange) -> list[RangeProblem]:
    """Return where the slices of a range overlap, or leave out offsets that are committed."""
    found: list[RangeProblem] = []

    def add(start: int, end: int, what: str) -> None:
        message = f"{one.topic}-{one.partition}: offsets {start} to {end - 1} are in {what}, by the metadata"
        found.append(RangeProblem(one.topic, one.partition, one.stream, start, end, message))

    at = one.start
    for number, piece in enumerate(one.slices):
        if piece.start > at:
            add(at, piece.start, "no object")
        elif piece.start < at and number:
            add(piece.start, min(at, piece.end), "two objects")
        at = max(at, piece.end)
    end = min(one.end, one.committed_end)
    if at < end:
        add(at, end, "no object")
    return found
