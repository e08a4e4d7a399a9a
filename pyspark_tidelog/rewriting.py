"""What an executor does of a compaction: reads a task's inputs, writes its outputs under prepared ids, checks them.

It knows the bucket, and neither brokers nor secrets. Every block read is checked against its CRC32C (rule 10), rule 7
is checked before an output is told, and every output is read again and compared byte by byte with what it should be.

Two attempts at a task (a retry, or speculative execution) have the same ids and make the same bytes: all that goes into
an output is in `RewriteTask`. Outputs are created and never overwritten, so an attempt that finds an object under its
id compares it like its own, and one that was left behind changes nothing that may have been committed meanwhile.

What is wrong with a task is told, and not raised: the tasks beside it go on.

Entry: `count_outputs`, `rewrite`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pyspark_tidelog.fetch import open_bucket
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound, ObjectStore
from tidelog.storage.commits import CompactionRefused, StreamRange
from tidelog.storage.compaction.check import check_conserved
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import CompactionTask, OutputPlan, TaskKind, lay_out
from tidelog.storage.compaction.reader import BadInput, InputReader
from tidelog.storage.compaction.rewriting import OutputIdentity, blamed, build_output
from tidelog.storage.objects.format import ObjectIndex
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import get_range

COMPARE_BYTES = 8 << 20
"""Bytes of an output that are read again at a time."""


@dataclass(frozen=True)
class RewriteTask:
    """A task as its executor gets it: all that its outputs are made of."""

    cluster_id: str
    kind: TaskKind
    inputs: tuple[ObjectFacts, ...]
    starts: tuple[tuple[int, int], ...]
    """Stream id and start offset of each stream that exists."""
    target_bytes: int
    stream_bytes: int
    block_bytes: int
    created_ms: int
    """Milliseconds since the epoch, in the outputs' footers."""
    first_id: int = -1
    """Of the outputs; -1: none are prepared yet."""
    ids: int = 0
    """Prepared ids from `first_id` on."""

    @property
    def size(self) -> int:
        """Return the bytes of the inputs."""
        return sum(one.size for one in self.inputs)


@dataclass(frozen=True)
class TaskProblem:
    """Why a task was not done."""

    kind: Literal["gone", "damaged", "refused", "failed"]
    """`gone`: an input is not in the bucket; if the metadata still names it, it is lost. `failed`: the bucket refused
    something, or did not answer."""
    message: str
    object_id: int = -1
    """The input, where there is one."""


@dataclass(frozen=True)
class WrittenOutput:
    """An object that was written and read again."""

    object_id: int
    kind: int
    size: int
    ranges: tuple[tuple[int, int, int], ...]
    """Stream id, start and end offset, by the object's index."""


@dataclass(frozen=True)
class RewriteReport:
    """What became of a task on its executor."""

    problem: TaskProblem | None = None
    count: int = 0
    """Outputs that the task has, or had."""
    outputs: tuple[WrittenOutput, ...] = ()
    read_bytes: int = 0
    """Of inputs."""
    written_bytes: int = 0


class _Gone(TidelogError):
    """An input is not in the bucket."""

    def __init__(self, object_id: int, message: str) -> None:
        super().__init__(message)
        self.object_id = object_id


def count_outputs(bucket: Mapping[str, str], task: RewriteTask) -> RewriteReport:
    """Read the inputs' indexes, and return how many objects the task will write: so many ids it needs."""
    return asyncio.run(_told(bucket, task, _count))


def rewrite(bucket: Mapping[str, str], task: RewriteTask) -> RewriteReport:
    """Write the outputs of a task under its ids. The same again gives the same report, and changes nothing."""
    return asyncio.run(_told(bucket, task, _rewrite))


async def _told(
    bucket: Mapping[str, str],
    task: RewriteTask,
    work: Callable[[ObjectStore, _Inputs], Awaitable[RewriteReport]],
) -> RewriteReport:
    store = open_bucket(bucket)
    try:
        return await work(store, _Inputs(store, task))
    except BadInput as error:
        return RewriteReport(TaskProblem("damaged", error.message, error.object_id))
    except _Gone as error:
        return RewriteReport(TaskProblem("gone", error.message, error.object_id))
    except CompactionRefused as error:
        return RewriteReport(TaskProblem("refused", error.message))
    except CorruptData as error:
        return RewriteReport(TaskProblem("damaged", error.message))
    except ObjectNotFound as error:
        return RewriteReport(TaskProblem("refused", f"an output is gone: its id has expired: {error.message}"))
    except TidelogError as error:
        return RewriteReport(TaskProblem("failed", error.message))
    finally:
        await store.close()


class _Inputs:
    """The inputs of a task, and how its outputs are laid out."""

    def __init__(self, store: ObjectStore, task: RewriteTask) -> None:
        self.task = task
        self.starts = dict(task.starts)
        self.read_bytes = 0
        self.reader = InputReader(
            store=store, cluster_id=task.cluster_id, on_read=self._count, missing=_missing, offload=_at_once
        )

    async def _count(self, size: int) -> None:
        self.read_bytes += size

    async def plan(self) -> list[OutputPlan]:
        """Read the indexes. Raises `BadInput`, `_Gone`, `CompactionRefused`, `Unavailable`."""
        task = self.task
        indexes: dict[int, ObjectIndex] = {one.object_id: await self.reader.index(one) for one in task.inputs}
        inputs = CompactionTask(task.kind, task.inputs, "planned by a broker")
        try:
            outputs = lay_out(inputs, indexes, self.starts, task.stream_bytes, task.target_bytes)
        except CorruptData as error:
            raise BadInput(blamed(indexes, error), error.message) from error
        if not outputs:
            raise CompactionRefused("everything in the inputs is trimmed or deleted: there is nothing to write")
        return outputs


async def _missing(object_id: int, error: ObjectNotFound) -> TidelogError:
    return _Gone(object_id, error.message)


async def _at_once(work: Callable[[], Any]) -> Any:
    """Nothing else waits for this process's event loop."""
    return work()


async def _count(_store: ObjectStore, inputs: _Inputs) -> RewriteReport:
    outputs = await inputs.plan()
    return RewriteReport(count=len(outputs), read_bytes=inputs.read_bytes)


async def _rewrite(store: ObjectStore, inputs: _Inputs) -> RewriteReport:
    task = inputs.task
    plans = await inputs.plan()
    if len(plans) > task.ids:
        raise CompactionRefused(f"the task has {len(plans)} outputs, and {task.ids} ids were prepared for them")
    written: list[WrittenOutput] = []
    for number, plan in enumerate(plans):
        blocks = await inputs.reader.blocks(plan)
        identity = OutputIdentity(task.first_id + number, task.cluster_id, task.created_ms, task.block_bytes)
        built = build_output(plan, blocks, inputs.starts, identity)
        del blocks
        await _create(store, object_key(task.cluster_id, built.object_id), b"".join(built.body))
        ranges = tuple((each.stream_id, each.start_offset, each.end_offset) for each in built.ranges)
        written.append(WrittenOutput(built.object_id, int(built.kind), built.size, ranges))
    check_conserved(
        (piece for one in task.inputs for piece in one.ranges),
        (StreamRange(*piece) for one in written for piece in one.ranges),
        inputs.starts.get,
    )
    size = sum(one.size for one in written)
    return RewriteReport(None, len(written), tuple(written), inputs.read_bytes, size)


async def _create(store: ObjectStore, key: str, body: bytes) -> None:
    """Put an object unless it is there, and compare what is there with `body`. Raises `CorruptData`, `Unavailable`."""
    with contextlib.suppress(ObjectExists):  # by an attempt before or beside this one, or this one, its answer lost
        await store.put(key, [body], if_absent=True)
    info = await store.head(key)
    if info.size != len(body):
        raise CorruptData(f"object {key} has {info.size} bytes, and {len(body)} were to be written")
    view = memoryview(body)
    for start in range(0, len(body), COMPARE_BYTES):
        end = min(start + COMPARE_BYTES, len(body))
        if memoryview(await get_range(store, key, start, end)) != view[start:end]:
            raise CorruptData(f"object {key} differs between bytes {start} and {end} from what was to be written")


def needs_count(task: RewriteTask) -> bool:
    """Return whether only the indexes tell how many outputs there are: neighbours of one stream become one."""
    return task.kind != "merge"
