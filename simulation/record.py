"""The bucket is the record: what a rebuild would find in it, compared with what is committed.

`record-incomplete`: of a stream that a metadata state in the bucket knows, the rebuilt one would end before the
committed end, or start after the start; or there is no state. A stream that was trimmed beyond what can be continued is
left out: nothing tells that from an upload that was lost (docs/design/0014-rebuild-from-the-bucket.md).

The bucket is read by the code that a rebuild reads it with, from a copy: at once, while the cluster goes on.

Entry: `check_record`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.bucket_state import parse_state_key
from tidelog.controller.model.records import StreamRecord
from tidelog.controller.rebuild.adopt import Adoption, adopt
from tidelog.controller.rebuild.plan import make_plan
from tidelog.controller.rebuild.source import BucketContent, read_bucket
from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.cluster_state import held_objects
from tidelog.simulation.world.cluster import SimCluster
from tidelog.storage.bucket.memory import MemoryObjectStore

MAX_FINDINGS = 5


async def check_record(cluster: SimCluster) -> list[Finding]:
    """Return the findings of an idle cluster; none if it does not write its metadata to the bucket."""
    active = cluster.active
    if active is None or not cluster.shape.writes_state:
        return []
    image, streams = active.image, dict(active.image.streams)
    brokers, snapshots = sorted(image.brokers), frozenset(image.snapshots)
    copy = MemoryObjectStore(cluster.clock)
    for key, held in list(cluster.bucket.objects.items()):
        await copy.put(key, [held.body])
    held_keys = copy.keys()
    states = sorted((name, key) for key in held_keys if (name := parse_state_key(key)) is not None)
    problems = [] if states else ["there is no metadata state in the bucket"]
    for _, key in reversed(states):  # also the older ones, which a rebuild uses if the newer ones are damaged
        content = await read_bucket(copy, image.cluster_id)
        problems += [f"{key}: {each.key} cannot be used: {each.problem}" for each in content.damaged]
        state_snapshots = snapshots & set(content.state.tables.snapshots.rows)
        rebuilt = _rebuilt(content, brokers)
        problems += [f"{key}: {text}" for text in _problems(rebuilt, streams, state_snapshots)]
        await copy.delete([key])
    return [Finding(rule="record-incomplete", message=text) for text in problems[:MAX_FINDINGS]]


def _rebuilt(content: BucketContent, brokers: list[int]) -> ControllerState:
    plan = make_plan(content.state.tables, content.listed, content.found)
    rebuilt = adopt(content.state, plan, Adoption(brokers, 2, max(content.listed, default=0), 0))
    checked = ControllerState()
    checked.load(rebuilt.dump())
    return checked


def _problems(rebuilt: ControllerState, streams: dict[int, StreamRecord], snapshots: frozenset[str]) -> Iterator[str]:
    """Compare with the streams and the snapshots that there are."""
    for stream in rebuilt.tables.streams.values():
        now = streams.get(stream.id)
        if now is None:
            continue
        if now.start_offset <= stream.end_offset < now.end_offset:
            yield f"stream {stream.id} would end at {stream.end_offset}; {now.end_offset} is committed"
        if stream.start_offset > max(now.start_offset, 0) and now.start_offset < now.end_offset:
            yield f"stream {stream.id} would start at {stream.start_offset}, not at {now.start_offset}"
    image = Image()
    image.apply(Delta(1, [RowChange(t.name, key, row) for t in rebuilt.tables.public() for key, row in t.rows.items()]))
    yield from (one.message for one in held_objects(image))
    for name in snapshots:
        if name not in rebuilt.tables.snapshots:
            yield f"snapshot {name} would be lost"
