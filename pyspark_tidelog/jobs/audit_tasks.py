"""What a task of an audit does: reads every byte of some objects, and compares them with what the metadata say of them.

Entry: `check_objects`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyspark_tidelog.fetch import open_bucket
from pyspark_tidelog.jobs.audit_batches import look_inside
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.commits import StreamRange
from tidelog.storage.objects.report import Problem, compare_with_metadata, examine_object

AT_ONCE = 4
"""Objects that a task reads at the same time: it waits for the bucket most of the time."""


class AuditedObject(NamedTuple):
    """An object, and what the metadata say of it."""

    id: int
    """-1: records set aside, which no metadata name."""
    key: str
    kind: str
    size: int
    """Bytes."""
    ranges: tuple[tuple[int, int, int], ...]
    """Data streams with their first offset and the one after the last: what the object must have."""


@dataclass(frozen=True)
class CheckedObject:
    """What was found."""

    id: int
    key: str
    is_gone: bool
    """There is no such object in the bucket: the metadata of now tell what that means."""
    size: int = 0
    blocks: int = 0
    records: int = 0
    problems: tuple[Problem, ...] = ()


def check_objects(
    objects: Sequence[AuditedObject], bucket: Mapping[str, str], *, batches: bool
) -> Iterator[CheckedObject]:
    """Check some objects of the bucket with these settings. Raises `Unavailable`, `ConfigError`."""
    return iter(asyncio.run(_check_all(objects, bucket, batches=batches)))


async def _check_all(
    objects: Sequence[AuditedObject], bucket: Mapping[str, str], *, batches: bool
) -> list[CheckedObject]:
    store = open_bucket(bucket)
    room = asyncio.Semaphore(AT_ONCE)

    async def check(one: AuditedObject) -> CheckedObject:
        async with room:
            return await check_object(store, one, batches=batches)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(check(one)) for one in objects]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None  # they are of one kind: the bucket does not answer
    finally:
        await store.close()
    return [task.result() for task in tasks]


async def check_object(store: ObjectStore, one: AuditedObject, *, batches: bool) -> CheckedObject:
    """Read every byte of an object, and compare it with its metadata. Raises `Unavailable`."""
    try:
        problems, contents = await examine_object(store, one.key, look_inside if batches else None)
        size = contents.size_bytes if contents is not None else (await store.head(one.key)).size
    except ObjectNotFound:
        return CheckedObject(one.id, one.key, is_gone=True)
    if one.id >= 0 and size < one.size:
        problems = [Problem(part="object", message=_truncated(one, size)), *problems]
    elif one.id >= 0 and contents is not None:
        ranges = [StreamRange(*each) for each in one.ranges]
        problems = problems + compare_with_metadata(contents, one.size, one.kind, ranges)
    blocks, records = (contents.blocks, contents.records) if contents is not None else (0, 0)
    return CheckedObject(one.id, one.key, False, size, blocks, records, tuple(problems))


def _truncated(one: AuditedObject, size: int) -> str:
    return f"object {one.key} ends at byte {size}; its metadata says {one.size}: it is truncated"
