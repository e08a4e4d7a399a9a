"""The bucket is the record: what a rebuild would find in it, compared with what is committed.

`record-incomplete`: of a stream that a metadata state in the bucket knows, the rebuilt one would end before the
committed end, or start after the start; or there is no state. A stream that was trimmed beyond what can be continued is
left out: nothing tells that from an upload that was lost (docs/design/0014-rebuild-from-the-bucket.md).

Entry: `check_record`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.bucket_state import decode_state, parse_state_key
from tidelog.controller.rebuild.adopt import Adoption, adopt
from tidelog.controller.rebuild.plan import FoundObject, make_plan
from tidelog.controller.rebuild.source import found_object, may_be_new
from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.cluster_state import held_objects
from tidelog.simulation.world.cluster import SimCluster
from tidelog.storage.objects.format import FOOTER, Footer, ObjectIndex
from tidelog.storage.objects.key import object_key, parse_object_key

MAX_FINDINGS = 5


def check_record(cluster: SimCluster, image: Image) -> list[Finding]:
    """Return the findings of an idle cluster; none if it does not write its metadata to the bucket."""
    if not cluster.shape.writes_state:
        return []
    problems = [text for _, text in zip(range(MAX_FINDINGS), _problems(cluster, image), strict=False)]
    return [Finding(rule="record-incomplete", message=text) for text in problems]


def _problems(cluster: SimCluster, image: Image) -> Iterator[str]:
    keys = [key for key in cluster.bucket.objects if parse_state_key(key) is not None]
    if not keys:
        yield "there is no metadata state in the bucket"
    for key in sorted(keys):
        yield from _problems_of(cluster, image, key)


def _problems_of(cluster: SimCluster, image: Image, key: str) -> Iterator[str]:
    """Also of the older states, which a rebuild uses if the newer ones are damaged."""
    state = ControllerState()
    state.load(decode_state(cluster.bucket.objects[key].body, key=key).state)
    state_snapshots = set(state.tables.snapshots.rows)
    listed = {
        named[1]: held.info.size
        for each, held in cluster.bucket.objects.items()
        if (named := parse_object_key(each)) is not None
    }
    found = [_read(cluster, image.cluster_id, each) for each in listed if may_be_new(state.tables, each)]
    plan = make_plan(state.tables, listed, found)
    rebuilt = adopt(state, plan, Adoption(sorted(image.brokers), 2, max(listed, default=0), 0))
    checked = ControllerState()
    checked.load(rebuilt.dump())
    for stream in checked.tables.streams.values():
        now = image.streams.get(stream.id)
        if now is None:
            continue
        if now.start_offset <= stream.end_offset < now.end_offset:
            yield f"{key}: stream {stream.id} would end at {stream.end_offset}; {now.end_offset} is committed"
        if stream.start_offset > max(now.start_offset, 0) and now.start_offset < now.end_offset:
            yield f"{key}: stream {stream.id} would start at {stream.start_offset}, not at {now.start_offset}"
    rebuilt_image = Image()
    rebuilt_image.apply(
        Delta(1, [RowChange(t.name, row_key, row) for t in checked.tables.public() for row_key, row in t.rows.items()])
    )
    yield from (f"{key}: {one.message}" for one in held_objects(rebuilt_image))
    for name in image.snapshots.keys() & state_snapshots:
        if name not in checked.tables.snapshots:
            yield f"{key}: snapshot {name} would be lost"


def _read(cluster: SimCluster, cluster_id: str, object_id: int) -> FoundObject:
    key = object_key(cluster_id, object_id)
    body = cluster.bucket.objects[key].body
    footer = Footer.decode(body[-FOOTER.size :], object_size=len(body), key=key)
    raw = body[footer.index_position : footer.index_position + footer.index_length]
    return found_object(object_id, len(body), ObjectIndex.decode(raw, footer, key=key))
