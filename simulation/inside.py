"""Internal checks of an idle cluster, independent of the clients' results (docs/rules.md, rules 5–7).

- `metadata-diverged`: members of the quorum and brokers at the same metadata version have the same metadata.
- `contiguous-ranges`: the committed ranges of a stream have no gaps and overlaps
  (`tidelog.simulation.checkers.cluster_state`).
- `topic-not-deleted`: a topic whose deletion was acknowledged is not there.
- `object-missing`: every committed object is in the bucket, complete.
- `object-overwritten`: the content of an object's key never changes.
- `false-damage`: no broker takes an object for damaged, or leaves one out of compaction: none ever is (rule 17).
- `record-incomplete`: what a rebuild finds in the bucket has everything that is committed
  (`tidelog.simulation.record`).
- `orphan`: after clean-up, the bucket has no object that the metadata does not name.

Entry: `look_inside`, `find_orphans`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidelog.controller.image.image import Image
from tidelog.controller.model.records import ObjectState
from tidelog.simulation.actors.workload import Topic
from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.cluster_state import check_image
from tidelog.simulation.world.cluster import SimCluster
from tidelog.storage.objects.key import object_key, parse_object_key

MAX_NAMED = 5


def look_inside(cluster: SimCluster, topics: Iterable[Topic]) -> list[Finding]:
    """Return all findings that can be checked immediately. `topics`: all that there ever were."""
    active = cluster.active
    if active is None:
        return []
    image = active.image
    return [
        *_diverged(cluster, image),
        *check_image(image),
        *_undeleted(image, topics),
        *_missing(cluster, image),
        *_overwritten(cluster),
        *_damaged(cluster),
    ]


def _undeleted(image: Image, topics: Iterable[Topic]) -> list[Finding]:
    names = {record.name for record in image.topics.values()}
    return [
        Finding(rule="topic-not-deleted", message=f"topic {topic.name} is there, though its deletion was acknowledged")
        for topic in topics
        if topic.deleted and (topic.id in image.topics if topic.id else topic.wire in names)
    ]


def _diverged(cluster: SimCluster, image: Image) -> list[Finding]:
    found = []
    for node in cluster.nodes.values():
        images = [node.controller.image] if node.controller is not None else []
        if node.broker is not None and node.ready:
            images.append(node.broker.controller.image)
        for theirs in images:
            if theirs is image or theirs.version != image.version:
                continue
            rows = [f"{one.table} {one.key!r}" for one in image.difference(theirs)]
            if rows:
                named = ", ".join(rows[:MAX_NAMED])
                message = f"{node.host} has other metadata at version {image.version}: {len(rows)} rows, {named}"
                found.append(Finding(rule="metadata-diverged", message=message))
    return found


def _missing(cluster: SimCluster, image: Image) -> list[Finding]:
    found = []
    for record in image.objects.values():
        if record.state != ObjectState.COMMITTED:
            continue
        held = cluster.bucket.objects.get(object_key(image.cluster_id, record.id))
        if held is None or held.info.size != record.size:
            size = "is not there" if held is None else f"has {held.info.size} bytes"
            message = f"committed object {record.id} of {record.size} bytes {size}"
            found.append(Finding(rule="object-missing", message=message))
    return found


def _overwritten(cluster: SimCluster) -> list[Finding]:
    keys = cluster.bucket.overwritten
    return [Finding(rule="object-overwritten", message=f"{key} was written twice, differently") for key in keys]


def _damaged(cluster: SimCluster) -> list[Finding]:
    found = []
    for node in cluster.brokers:
        if node.broker is None or not node.ready:
            continue
        data = node.broker.parts.data
        said = [one.message for one in data.reports.damage.all()]
        said += [
            f"object {object_id} is left out of compaction: {why}" for object_id, why in data.compactor.excluded.items()
        ]
        found += [Finding(rule="false-damage", message=f"{node.host}: {each}") for each in said]
    return found


def find_orphans(cluster: SimCluster) -> list[Finding]:
    """Return the objects that no metadata names. Call it after clean-up."""
    active = cluster.active
    if active is None:
        return []
    image = active.image
    found = []
    for key in cluster.bucket.objects:
        parsed = parse_object_key(key)
        if parsed is not None and parsed[1] not in image.objects:
            found.append(Finding(rule="orphan", message=f"object {parsed[1]} is in the bucket, and nothing names it"))
    return found
