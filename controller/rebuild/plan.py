"""Which objects continue which streams: the plan of a rebuild, as a pure function of what the bucket holds.

For each stream the objects must form a *chain*: each begins where the one before it ends. The objects of the state are
such a chain up to the committed end. Objects that the state does not name (they were put after it) replace those that a
compaction has removed, and continue the chain. Of several chains the one that gets furthest is taken; among equals the
one with objects of the state, then with larger objects. A chain may begin inside of an object of another one that was
prepared before it: a compaction that was given up has left that, and the stream was trimmed up to there since.

Entry: `make_plan`, `RebuildPlan`, `missing_objects`; `find_chain` for one stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidelog.controller.machine.slices import unpack
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.records import ObjectState
from tidelog.controller.rebuild.held import StreamPiece, branches_of, lost_snapshots, shared_pieces

Range = tuple[int, int, int]
"""Stream id, start offset, end offset."""


class StreamChain(NamedTuple):
    """What is left of one stream."""

    start: int
    end: int
    """The new committed end."""
    used: tuple[StreamPiece, ...]


class FoundObject(NamedTuple):
    """An object of the bucket that the state does not name as committed, and what its index says."""

    object_id: int
    kind: int
    size: int
    ranges: tuple[Range, ...]
    """Sorted by stream; one for each stream."""


class Leftover(NamedTuple):
    """Offsets in an object that no chain takes."""

    stream_id: int
    start: int
    end: int
    object_id: int


class RebuildPlan(NamedTuple):
    """The streams that differ from the state, and what is not taken."""

    streams: dict[int, StreamChain]
    """By stream id: those that miss an object of the state, or may be continued."""
    found: dict[int, FoundObject]
    gaps: tuple[Leftover, ...]
    """Behind the end of a stream's chain: they cannot be continued."""
    unknown: tuple[Leftover, ...]
    """Of streams that the state does not know: of topics that were created after it, or deleted before it."""
    lost_snapshots: tuple[str, ...] = ()
    """Snapshots that miss an object: they were deleted after the state."""


class _Step(NamedTuple):
    reach: int
    """The furthest end of a chain from here."""
    is_known: bool
    length: int
    piece: StreamPiece


_NOTHING = _Step(-1, False, 0, StreamPiece(0, 0, -1, False))


def find_chain(
    start: int, committed_end: int, known: Iterable[StreamPiece], missing: set[int], new: list[StreamPiece]
) -> StreamChain:
    """Return the chain of a stream that the state has from `start` to `committed_end`.

    `known`: the live pieces of the state, contiguous; `missing`: ids of those objects that are not in the bucket. Only
    the cluster deletes objects, and only those without live pieces: what is missing and not replaced was trimmed, so
    the stream begins behind it. If nothing is left of the state, the trim may have gone past its end, and the stream is
    the newest chain: no offset that was given out is given out again.
    """
    named = sorted(known)
    left = [piece for piece in named if piece.object_id not in missing]
    if len(left) == len(named):
        steps = _steps(new)
        begin, chain = start, [*named, *_walk(committed_end, steps, [] if named else new)]
    else:
        steps = _steps([*left, *new])
        begin, chain = _replaced(start, committed_end, steps, [*left, *new])
    for at in sorted(steps):
        if chain and begin < at < chain[-1].end < steps[at].reach:
            cut = next((piece for piece in chain if piece.start < at < piece.end), None)
            if cut is None or cut.is_known:
                continue
            further = _walk(at, steps, [])
            if cut.object_id < next(piece.object_id for piece in further if piece.end > cut.end):
                begin, chain = at, further
    return StreamChain(begin, chain[-1].end if chain else max(begin, committed_end), tuple(chain))


def _replaced(
    start: int, committed_end: int, steps: dict[int, _Step], pieces: list[StreamPiece]
) -> tuple[int, list[StreamPiece]]:
    """Return the chain, and where it begins, of a stream that misses objects of the state."""
    chain = _walk(start, steps, pieces)
    if chain and chain[-1].end >= committed_end:
        return start, chain
    reaching = (at for at, step in steps.items() if at > start and step.reach >= committed_end)
    begin = min(min(reaching, default=committed_end), committed_end)
    if not (chain := _walk(begin, steps, [])):
        # nothing that the state names is left: newer objects may begin behind what was trimmed with it
        begin = min((-step.reach, at) for at, step in [(begin, _NOTHING), *steps.items()] if at >= begin)[1]
        chain = _walk(begin, steps, [])
    return begin, chain


def _steps(pieces: list[StreamPiece]) -> dict[int, _Step]:
    """Return the best first piece of a chain from each offset at which a piece starts."""
    best: dict[int, _Step] = {}
    for piece in sorted(pieces, key=lambda one: (-one.start, one.end, one.object_id)):
        after = best.get(piece.end)
        step = _Step(after.reach if after is not None else piece.end, piece.is_known, piece.end - piece.start, piece)
        if piece.start not in best or step > best[piece.start]:
            best[piece.start] = step
    return best


def _walk(begin: int, steps: dict[int, _Step], pieces: list[StreamPiece]) -> list[StreamPiece]:
    """Return the best chain from `begin`, which may lie inside its first piece: the log was trimmed up to there."""
    entry = steps.get(begin)
    for piece in pieces:
        if piece.start < begin < piece.end:
            after = steps.get(piece.end)
            step = _Step(after.reach if after else piece.end, piece.is_known, piece.end - piece.start, piece)
            if entry is None or step > entry:
                entry = step
    chain: list[StreamPiece] = []
    while entry is not None:
        chain.append(entry.piece)
        entry = steps.get(entry.piece.end)
    return chain


def make_plan(
    tables: Tables, listed: Mapping[int, int], found: Iterable[FoundObject], *, is_last: bool = False
) -> RebuildPlan:
    """Compare the state with the bucket.

    `listed`: sizes of all objects in the bucket, by id; `found`: those that the state does not name as committed.
    `is_last`: the cluster changed nothing after the state. Then what is missing was not trimmed: it stays in the
    metadata, so that only reads of it fail, until it is put back.
    """
    by_id = {each.object_id: each for each in found}
    new: defaultdict[int, list[StreamPiece]] = defaultdict(list)
    unknown: list[Leftover] = []
    for each in by_id.values():
        for stream_id, start, end in each.ranges:
            if tables.streams.get(stream_id) is None:
                unknown.append(Leftover(stream_id, start, end, each.object_id))
            else:
                new[stream_id].append(StreamPiece(start, end, each.object_id, False))
    missing = set() if is_last else missing_objects(tables, listed)
    streams: dict[int, StreamChain] = {}
    gaps: list[Leftover] = []
    for stream_id in sorted({*new, *_streams_of(tables, missing), *branches_of(tables, missing)}):
        stream = tables.streams.get(stream_id)
        assert stream is not None, stream_id
        own = (StreamPiece(*piece, True) for piece in unpack(tables.index.slices.get(stream_id, b"")))
        known = [*shared_pieces(tables, stream_id), *(piece for piece in own if piece.end > stream.start_offset)]
        chain = find_chain(
            stream.start_offset, max(stream.end_offset, stream.start_offset), known, missing, new[stream_id]
        )
        streams[stream_id] = chain
        gaps += [
            Leftover(stream_id, max(piece.start, chain.end), piece.end, piece.object_id)
            for piece in sorted(new[stream_id])
            if piece.end > chain.end
        ]
    return RebuildPlan(streams, by_id, tuple(gaps), tuple(unknown), lost_snapshots(tables, missing))


def missing_objects(tables: Tables, listed: Mapping[int, int]) -> set[int]:
    """Return the ids of the committed objects that are not in the bucket."""
    return {row.id for row in tables.objects.values() if row.state == ObjectState.COMMITTED and row.id not in listed}


def _streams_of(tables: Tables, object_ids: set[int]) -> set[int]:
    """Return the streams with live slices in these objects."""
    found: set[int] = set()
    for object_id in object_ids:
        row = tables.objects.get(object_id)
        assert row is not None, object_id
        for piece in row.ranges:
            stream = tables.streams.get(piece.stream_id)
            if stream is not None and piece.end_offset > stream.start_offset:
                found.add(piece.stream_id)
    return found
