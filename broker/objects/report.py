"""Reports on objects in the bucket: list from the image, show the index, verify every byte.

Reads bypass the caches. The content of an object is reported by `tidelog.storage.objects.report`; this module adds the
metadata and the owners of the streams.

Entry: `list_objects`, `describe_object`, `verify_object`, `describe_damage`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidelog.controller.model.records import ObjectRecord, ObjectState
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.commits import StreamRange
from tidelog.storage.objects import report as object_tool
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import load_index
from tidelog.storage.objects.report import KINDS, Problem
from tidelog.storage.reads.damage import Damage, DamageLog

if TYPE_CHECKING:
    from tidelog.controller.image.image import Image

STREAM_PARTS = ("meta", "data", "time", "txn")


def list_objects(image: Image, *, after: int, limit: int) -> list[dict[str, Any]]:
    """List at most `limit` objects with an id greater than `after`, by id."""
    ids = heapq.nsmallest(limit, (object_id for object_id in image.objects if object_id > after))
    return [summary(image, image.objects[object_id]) for object_id in ids]


def summary(image: Image, record: ObjectRecord) -> dict[str, Any]:
    """Return the metadata of one object."""
    return {
        "id": record.id,
        "key": object_key(image.cluster_id, record.id),
        "state": ObjectState(record.state).name.lower(),
        "kind": KINDS.get(record.kind),
        "size_bytes": record.size,
        "streams": len({one.stream_id for one in record.ranges}),
        "since_ms": record.since_ms,
        "expires_ms": record.expires_ms or None,
    }


def stream_owners(image: Image) -> dict[int, dict[str, Any]]:
    """The topic, partition and part of each stream, by stream id."""
    owners: dict[int, dict[str, Any]] = {}
    for topic in image.topics.values():
        for partition in image.partitions(topic.id):
            for number, part in enumerate(STREAM_PARTS):
                owner = {"topic": topic.name, "partition": partition.index, "part": part}
                owners[partition.first_stream + number] = owner
    return owners


async def describe_object(image: Image, store: ObjectStore, record: ObjectRecord) -> dict[str, Any]:
    """Return an object's footer and index, with the owner of each block. Raises the errors of `load_index`."""
    key = object_key(image.cluster_id, record.id)
    index = await load_index(store, key, record.size, object_id=record.id, cluster_id=image.cluster_id)
    owners = stream_owners(image)
    blocks = [
        {
            "stream_id": entry.stream_id,
            **owners.get(entry.stream_id, {"topic": None, "partition": None, "part": None}),
            "start_offset": entry.start_offset,
            "end_offset": entry.end_offset,
            "position": entry.position,
            "length_bytes": entry.length,
            "records": entry.record_count,
            "crc32c": f"{entry.crc:08x}",
        }
        for entry in index
    ]
    footer = index.footer
    return {
        **summary(image, record),
        "records": footer.record_count,
        "created_ms": footer.created_ms,
        "index_position": footer.index_position,
        "blocks": blocks,
    }


async def verify_object(image: Image, store: ObjectStore, record: ObjectRecord) -> list[Problem]:
    """Read every byte of a committed object, check it, and compare it with its metadata; return the problems.

    An object that was destroyed meanwhile is not a problem. Raises `Unavailable` when the bucket does not respond.
    """
    key = object_key(image.cluster_id, record.id)
    try:
        problems, contents = await object_tool.examine_object(store, key)
        if not problems and contents is not None:
            kind = KINDS.get(record.kind)
            problems = object_tool.compare_with_metadata(contents, record.size, kind, record.ranges)
    except ObjectNotFound:
        problems = [Problem(part="object", message=f"object {key} is not in the bucket")]
    now = image.objects.get(record.id)
    return problems if now is not None and now.state == ObjectState.COMMITTED else []


async def verify_set_aside(store: ObjectStore, key: str) -> list[Problem]:
    """As `verify_object`, for records of a quarantined stream, which no metadata names."""
    try:
        return await object_tool.verify_object(store, key)
    except ObjectNotFound:
        return []  # an operator has deleted it


def describe_set_aside(key: str, problem: Problem, owners: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a problem of such an object as JSON."""
    lost = [StreamRange(problem.stream_id, problem.start_offset, problem.end_offset)] if problem.stream_id >= 0 else []
    return {"object": None, **_problem_document(key, problem, lost, owners)}


def describe_problem(
    key: str, record: ObjectRecord, problem: Problem, owners: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a problem as JSON, with the affected streams and offsets."""
    if problem.stream_id >= 0:
        lost = [StreamRange(problem.stream_id, problem.start_offset, problem.end_offset)]
    else:
        lost = list(record.ranges)
    return {"object": record.id, **_problem_document(key, problem, lost, owners)}


def _problem_document(
    key: str, problem: Problem, lost: list[StreamRange], owners: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    streams = [
        {
            "stream_id": one.stream_id,
            **owners.get(one.stream_id, {"topic": None, "partition": None, "part": None}),
            "start_offset": one.start_offset,
            "end_offset": one.end_offset,
        }
        for one in lost
    ]
    return {
        "key": key,
        "part": problem.part,
        "position": problem.position if problem.position >= 0 else None,
        "length_bytes": problem.length if problem.length >= 0 else None,
        "problem": problem.message,
        "streams": streams,
    }


def damage_of(image: Image, record: ObjectRecord, problem: Problem) -> Damage:
    """Convert a problem to an entry of the damage log."""
    key, where, position = object_key(image.cluster_id, record.id), (-1, -1, -1), -1
    if problem.part == "block":
        where, position = (problem.stream_id, problem.start_offset, problem.end_offset), problem.position
    return Damage(record.id, key, position, *where, problem.message)


def describe_damage(image: Image, damage: DamageLog, limit: int) -> list[str]:
    """Describe the damage in the bucket, one sentence per place. Objects that no metadata names are dropped."""
    if not damage:
        return []
    owners = stream_owners(image)
    sentences = []
    for one in damage.all():
        record = image.objects.get(one.object_id)
        if record is None or record.state != ObjectState.COMMITTED:
            damage.forget_object(one.object_id)
            continue
        sentences.append(_sentence(one, record, owners))
    if len(sentences) > limit:
        sentences[limit:] = [f"{len(sentences) - limit} more damaged places in the bucket"]
    return sentences


def _sentence(one: Damage, record: ObjectRecord, owners: Mapping[int, Mapping[str, Any]]) -> str:
    problem = Problem(
        part="block" if one.stream_id >= 0 else "index",
        message=one.message,
        stream_id=one.stream_id,
        start_offset=one.start_offset,
        end_offset=one.end_offset,
    )
    lost = describe_problem(one.key, record, problem, owners)["streams"]
    shown = ", ".join(_whose(each) for each in lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
    return f"{one.message}; not readable: {shown} (see `tidelog object verify {one.object_id}`)"


def _whose(lost: Mapping[str, Any]) -> str:
    offsets = f"{lost['start_offset']} to {lost['end_offset'] - 1}"
    if lost["topic"] is None:
        return f"stream {lost['stream_id']}, {offsets}"
    part = "" if lost["part"] == "data" else f" ({lost['part']} stream)"
    return f"{lost['topic']}-{lost['partition']}{part} offsets {offsets}"
