"""What must hold inside a cluster that is at rest, whatever its clients saw (rules 5–7 of DESIGN.md, section 3).

- `metadata-diverged`: members of the quorum and brokers at the same metadata version hold the same metadata.
- `contiguous-ranges`: a stream's follow one another without gap and overlap (`simulation.checkers.cluster_state`).
- `object-missing`: every committed object is in the bucket, whole.
- `object-overwritten`: no key of an object got another content, ever.
- `orphan`: once the cleaner had time, the bucket holds no object that the metadata does not name.

Entry: `look_inside`, `find_orphans`.
"""

from __future__ import annotations

from controller.image import Image
from controller.model import ObjectState
from simulation.checkers import Finding
from simulation.checkers.cluster_state import check_image
from simulation.cluster import Cluster
from storage.object_key import object_key, parse_object_key

MAX_NAMED = 5


def look_inside(cluster: Cluster) -> list[Finding]:
    """Everything that is wrong inside, as far as it can be seen at once."""
    active = cluster.active
    if active is None:
        return []
    image = active.image
    return [*_diverged(cluster, image), *check_image(image), *_missing(cluster, image), *_overwritten(cluster)]


def _diverged(cluster: Cluster, image: Image) -> list[Finding]:
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


def _missing(cluster: Cluster, image: Image) -> list[Finding]:
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


def _overwritten(cluster: Cluster) -> list[Finding]:
    keys = cluster.bucket.overwritten
    return [Finding(rule="object-overwritten", message=f"{key} was written twice, differently") for key in keys]


def find_orphans(cluster: Cluster) -> list[Finding]:
    """Objects that nothing names. Call it when the cleaner has had its time."""
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
