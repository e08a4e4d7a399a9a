"""Decides which objects are compacted together, and into which outputs. Sans-IO: facts in, tasks and layouts out.

Four kinds of tasks, each of bounded size:
- *gather*: stream-set objects, neighbours by id, become one larger stream-set object; a stream with much data in them,
  or whose parts in them are not contiguous, gets stream objects of its own;
- *merge*: stream objects of one stream, neighbours by offset, become one;
- *sort*: full stream-set objects become as many, each with a part of the streams; a stream with much data in them gets
  stream objects of its own (`tidelog.storage.compaction.sorting`);
- *shed*: a stream-set object most of whose streams are trimmed or deleted is rewritten without them.

In a merge or gather, objects of at least half the target size are left alone, and the largest input of a task is at
most half of the total: each time a byte is rewritten, its object has at least doubled, so that it is rewritten at most
log2(target / smallest) times. A sort leaves at most 80 % of the ranges of its inputs.

Planning terminates: a merge leaves fewer objects, a gather fewer stream-set objects or less data in them (data in a
stream object never returns), a shed or a sort fewer ranges.

Rule 7 is kept by construction: a layout takes every block of every input that holds an offset at or above its stream's
start; `tidelog.storage.compaction.check` checks again before the commit.

Entry: `plan`, `lay_out`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Literal, NamedTuple

from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.sorting import MAX_RANGES, groups, may_be_sorted
from tidelog.storage.objects.format import IndexEntry, ObjectIndex, corrupt
from tidelog.storage.settings import CompactionSettings

MAX_TASKS = 256
"""Tasks of one plan; the next plan finds the rest."""
MAX_SORTS = 8
"""Tasks of one plan that sort: each moves some `MAX_INPUTS` times the target size."""
CUT_SLACK = 0.15
"""How far a cut between two outputs of a sort may be from its even place, as a part of an output."""
MAX_OUTPUTS = 256
"""Limit on the stream objects that one task creates from stream-set objects."""


TaskKind = Literal["gather", "merge", "shed", "sort"]


@dataclass(frozen=True, slots=True)
class CompactionTask:
    """Objects that are replaced together."""

    kind: TaskKind
    inputs: tuple[ObjectFacts, ...]
    reason: str
    apart: frozenset[int] = frozenset()
    """Gather: streams that get objects of their own, however little they have."""

    @property
    def size(self) -> int:
        """Return the bytes of the inputs."""
        return sum(one.size for one in self.inputs)

    @property
    def estimated_bytes(self) -> int:
        """Estimate the bytes to write: trimmed or deleted ranges are left out, and all ranges of an object count as
        equally large. The exact number is known only from the objects' indexes."""
        return sum(one.size * one.live // max(1, len(one.ranges)) for one in self.inputs)

    @property
    def streams(self) -> set[int]:
        """Return all streams in the inputs."""
        return {piece.stream_id for one in self.inputs for piece in one.ranges}


# -- selecting inputs


def _largest_fits(window: Sequence[ObjectFacts]) -> bool:
    """Return whether every rewritten byte ends up in an object of at least twice the size."""
    return 2 * max(one.size for one in window) <= sum(one.size for one in window)


def _window(run: Sequence[ObjectFacts], first: int, settings: CompactionSettings) -> int:
    """Return the end of the longest `run[first:end]` that fits one task."""
    size, ranges, end = run[first].size, len(run[first].ranges), first + 1
    while end < len(run) and end - first < settings.max_objects:
        size += run[end].size
        ranges += len(run[end].ranges)
        if size > settings.target_bytes or ranges > MAX_RANGES:
            break
        end += 1
    while end - first > 1 and not _largest_fits(run[first:end]):
        end = max(range(first, end), key=lambda at: run[at].size)
    return max(end, first + 1)


def _why(window: Sequence[ObjectFacts], now_ms: int, settings: CompactionSettings) -> str:
    """Return why a window is worth a task; empty if it is not (yet)."""
    if len(window) < 2:
        return ""
    if len(window) >= settings.min_objects:
        return f"{len(window)} small objects"
    if now_ms - max(one.since_ms for one in window) >= settings.age_ms:
        return f"{len(window)} small objects older than {settings.age_ms // 1000} s"
    if sum(one.size for one in window) * 2 >= settings.target_bytes:
        return "together they reach the target size"
    return ""


def _tasks_of(
    kind: TaskKind, run: Sequence[ObjectFacts], now_ms: int, settings: CompactionSettings
) -> Iterable[CompactionTask]:
    """Return the tasks for a run of neighbouring small objects, the oldest first."""
    first = 0
    while first < len(run):
        end = _window(run, first, settings)
        reason = _why(run[first:end], now_ms, settings)
        if reason:
            yield CompactionTask(kind, tuple(run[first:end]), reason)
            first = end
        else:
            first += 1


def _runs(
    objects: Sequence[ObjectFacts], may: Callable[[ObjectFacts], bool], meet: Callable[[ObjectFacts, ObjectFacts], bool]
) -> list[list[ObjectFacts]]:
    """Split a sequence where an object may not be compacted or does not adjoin the previous one."""
    runs: list[list[ObjectFacts]] = []
    before: ObjectFacts | None = None
    for one in objects:
        if not may(one):
            before = None
            continue
        if before is None or not meet(before, one):
            runs.append([])
        runs[-1].append(one)
        before = one
    return runs


def plan(
    objects: Iterable[ObjectFacts], now_ms: int, settings: CompactionSettings, excluded: Iterable[int] = ()
) -> list[CompactionTask]:
    """Return at most `MAX_TASKS` tasks, no object in two of them, those that save most objects first.

    `objects` are the committed ones that this planner is responsible for; `excluded` ids are left alone, as are
    objects without a live range (the controller destroys them).
    """
    left_alone = frozenset(excluded)
    sets: list[ObjectFacts] = []
    streams: dict[int, list[ObjectFacts]] = {}
    for one in objects:
        if one.live == 0:
            continue
        if one.kind == ObjectKind.STREAM_SET:
            sets.append(one)
        else:
            streams.setdefault(one.ranges[0].stream_id, []).append(one)

    def may(one: ObjectFacts) -> bool:
        small = 2 * one.size < settings.target_bytes and len(one.ranges) <= MAX_RANGES
        return small and one.object_id not in left_alone

    def meets(one: ObjectFacts, following: ObjectFacts) -> bool:
        return one.ranges[0].end_offset == following.ranges[0].start_offset

    tasks: list[CompactionTask] = []
    for run in _runs(sorted(sets), may, lambda _one, _following: True):
        tasks += _tasks_of("gather", run, now_ms, settings)
    for mine in streams.values():
        mine.sort(key=lambda one: one.ranges[0].start_offset)
        for run in _runs(mine, may, meets):
            tasks += _tasks_of("merge", run, now_ms, settings)
    taken = {one.object_id for task in tasks for one in task.inputs} | left_alone
    for one in sets:
        dead = len(one.ranges) - one.live
        if one.object_id not in taken and 2 * dead >= len(one.ranges) and now_ms - one.since_ms >= settings.age_ms:
            tasks.append(CompactionTask("shed", (one,), f"{dead} of {len(one.ranges)} streams are trimmed or deleted"))
            taken.add(one.object_id)
    full = [one for one in sets if one.object_id not in taken and may_be_sorted(one, settings)]
    sorts = [
        CompactionTask("sort", group, f"{len(group)} full objects, {sum(len(one.ranges) for one in group)} ranges")
        for group in islice(groups(full, settings), MAX_SORTS)
    ]
    tasks.sort(key=lambda task: (-len(task.inputs), task.inputs[0].object_id))
    return tasks[: MAX_TASKS - len(sorts)] + sorts


# -- laying out outputs


class BlockSource(NamedTuple):
    """A block of an input."""

    object_id: int
    entry: IndexEntry


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """One object to write: for each stream, in order of ids, the blocks whose records go into it."""

    kind: ObjectKind
    parts: tuple[tuple[int, tuple[BlockSource, ...]], ...]

    @property
    def size(self) -> int:
        """Return the bytes of the blocks; about as many are written."""
        return sum(source.entry.length for _, sources in self.parts for source in sources)


class _Run(NamedTuple):
    """Contiguous blocks of one stream."""

    stream_id: int
    sources: tuple[BlockSource, ...]
    size: int


def _blocks(
    inputs: Sequence[ObjectFacts], indexes: Mapping[int, ObjectIndex], starts: Mapping[int, int]
) -> dict[int, list[BlockSource]]:
    """Return the blocks of each live stream that hold an untrimmed offset, in offset order."""
    found: dict[int, list[BlockSource]] = {}
    for one in inputs:
        index = indexes[one.object_id]
        for piece in one.ranges:
            start_offset = starts.get(piece.stream_id)
            if start_offset is None or piece.end_offset <= start_offset:
                continue
            wanted = _entries(index, piece)
            sources = [BlockSource(one.object_id, entry) for entry in wanted if entry.end_offset > start_offset]
            found.setdefault(piece.stream_id, []).extend(sources)
    for sources in found.values():
        sources.sort(key=lambda source: source.entry.start_offset)
    return found


def _entries(index: ObjectIndex, piece: StreamRange) -> list[IndexEntry]:
    """Return the entries of a range; they must cover it exactly. Raises `CorruptData`."""
    entries: list[IndexEntry] = []
    for entry in index.entries_from(index.find(piece.stream_id, piece.start_offset)):
        if entry.stream_id != piece.stream_id or entry.start_offset >= piece.end_offset:
            break
        entries.append(entry)
    held = (entries[0].start_offset, entries[-1].end_offset) if entries else None
    if held != (piece.start_offset, piece.end_offset):
        what = f"offsets of stream {piece.stream_id}"
        wanted = (piece.start_offset, piece.end_offset)
        raise corrupt(index.key, index.footer.index_position, what, wanted, held)
    return entries


def _contiguous(stream_id: int, sources: Sequence[BlockSource]) -> list[_Run]:
    cuts = [at for at, (one, two) in enumerate(pairwise(sources), 1) if one.entry.end_offset != two.entry.start_offset]
    runs = []
    for first, end in pairwise([0, *cuts, len(sources)]):
        part = tuple(sources[first:end])
        runs.append(_Run(stream_id, part, sum(source.entry.length for source in part)))
    return runs


def _alone(streams: Mapping[int, list[_Run]], stream_bytes: int, apart: frozenset[int]) -> set[int]:
    """Return the streams that get objects of their own: `apart`, then those in several pieces, then the largest."""

    def urgency(stream_id: int) -> tuple[bool, int, int]:
        runs = streams[stream_id]
        return stream_id not in apart, -len(runs), -sum(run.size for run in runs)

    chosen: set[int] = set()
    outputs = 0
    for stream_id in sorted(streams, key=urgency):
        runs = streams[stream_id]
        if len(runs) == 1 and runs[0].size < stream_bytes and stream_id not in apart:
            continue
        if outputs + len(runs) > MAX_OUTPUTS:
            break
        outputs += len(runs)
        chosen.add(stream_id)
    return chosen


def _cut(sources: Sequence[BlockSource], target_bytes: int) -> Iterator[tuple[BlockSource, ...]]:
    """Yield contiguous blocks in parts of at most `target_bytes`, at least one block each."""
    part: list[BlockSource] = []
    size = 0
    for source in sources:
        if part and size + source.entry.length > target_bytes:
            yield tuple(part)
            part, size = [], 0
        part.append(source)
        size += source.entry.length
    yield tuple(part)


def _shares(layer: Sequence[_Run], target_bytes: int) -> Iterator[OutputPlan]:
    """Divide runs, in order of stream ids, into stream-set objects of about equal size near the target.

    A cut may be off its even place by `CUT_SLACK` of a share, and is made there at the roundest stream id: so sorts of
    about the same streams cut them at the same ids, and their outputs can be sorted together next time.
    """
    ends = list(accumulate(run.size for run in layer))
    count = max(1, round(ends[-1] / target_bytes))
    share = ends[-1] / count
    first = 0
    for number in range(1, count):
        low = bisect_left(ends, (number - CUT_SLACK) * share, first + 1)
        high = bisect_left(ends, (number + CUT_SLACK) * share, low)
        cut = max(
            range(low, high), key=lambda at: _roundness(layer[at - 1].stream_id, layer[at].stream_id), default=low
        )
        if cut >= len(layer):
            break
        yield _set_of(layer[first:cut])
        first = cut
    yield _set_of(layer[first:])


def _set_of(runs: Sequence[_Run]) -> OutputPlan:
    return OutputPlan(ObjectKind.STREAM_SET, tuple((run.stream_id, run.sources) for run in runs))


def _roundness(before: int, after: int) -> int:
    """Return how round the roundest id is that separates two streams: the power of two that divides it."""
    return (before ^ after).bit_length()


def _sorted(streams: Mapping[int, list[_Run]], stream_bytes: int, target_bytes: int) -> list[OutputPlan]:
    """Lay out a sort: large runs get stream objects, the largest first; the others share objects by stream id."""
    large = sorted((run for runs in streams.values() for run in runs if run.size >= stream_bytes), key=_by_size)
    outputs: list[OutputPlan] = []
    alone: set[tuple[int, int]] = set()
    for run in large:
        parts = list(_cut(run.sources, target_bytes))
        if len(outputs) + len(parts) > MAX_OUTPUTS:
            break
        outputs += [OutputPlan(ObjectKind.STREAM, ((run.stream_id, part),)) for part in parts]
        alone.add((run.stream_id, run.sources[0].entry.start_offset))
    layers: list[list[_Run]] = []
    for runs in streams.values():
        shared = [run for run in runs if (run.stream_id, run.sources[0].entry.start_offset) not in alone]
        for number, run in enumerate(shared):
            if number == len(layers):
                layers.append([])
            layers[number].append(run)
    return outputs + [output for layer in layers for output in _shares(layer, target_bytes)]


def _by_size(run: _Run) -> int:
    return -run.size


def lay_out(
    task: CompactionTask,
    indexes: Mapping[int, ObjectIndex],
    starts: Mapping[int, int],
    stream_bytes: int,
    target_bytes: int,
) -> list[OutputPlan]:
    """Return the outputs of a task; empty when everything in it is trimmed or deleted.

    `indexes` has the index of every input by object id, `starts` the start offset of each stream that exists. Raises
    `CorruptData` when an index lacks a range that the metadata has.
    """
    streams = {
        stream_id: _contiguous(stream_id, sources)
        for stream_id, sources in sorted(_blocks(task.inputs, indexes, starts).items())
        if sources
    }
    if task.kind == "sort":
        return _sorted(streams, stream_bytes, target_bytes)
    alone = set(streams) if task.kind == "merge" else _alone(streams, stream_bytes, task.apart)
    outputs: list[OutputPlan] = []
    layers: list[list[_Run]] = []
    for stream_id, runs in streams.items():
        for number, run in enumerate(runs):
            if stream_id in alone:
                outputs.append(OutputPlan(ObjectKind.STREAM, ((stream_id, run.sources),)))
            else:
                if number == len(layers):
                    layers.append([])
                layers[number].append(run)
    outputs += [
        OutputPlan(ObjectKind.STREAM_SET, tuple((run.stream_id, run.sources) for run in layer)) for layer in layers
    ]
    return outputs
