"""Rule 7, as one function that the compactor calls before it commits and the controller calls again.

For every stream that still exists:
- the outputs' ranges do not overlap each other;
- they hold no offset that the inputs do not hold;
- every offset in the inputs and not in the outputs lies below the stream's start offset: it was trimmed.

Ranges of streams that no longer exist are ignored. Start offsets only grow, so a compaction that was valid
when it was planned stays valid.

Entry: `check_conserved`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import itemgetter

from tidelog.storage.commits import CompactionRefused, StreamRange

Interval = tuple[int, int]


def _by_stream(ranges: Iterable[StreamRange]) -> dict[int, list[Interval]]:
    streams: dict[int, list[Interval]] = {}
    for one in ranges:
        streams.setdefault(one.stream_id, []).append((one.start_offset, one.end_offset))
    return streams


def merged(intervals: Iterable[Interval], what: str) -> list[Interval]:
    """Return the intervals in order, adjacent ones joined. Raises `CompactionRefused` for overlapping or empty ones."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if not 0 <= start < end:
            raise CompactionRefused(f"{what}: range {start}..{end} is empty or reversed")
        if out and start < out[-1][1]:
            raise CompactionRefused(f"{what}: ranges overlap at offset {start}")
        if out and start == out[-1][1]:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out


def _check_stream(stream_id: int, held: list[Interval], made: list[Interval], start_offset: int) -> None:
    what = f"stream {stream_id}"
    inputs = merged(held, f"{what} in the inputs")
    outputs = merged(made, f"{what} in the outputs")
    for start, end in outputs:
        at = bisect_right(inputs, start, key=itemgetter(0)) - 1
        if at < 0 or end > inputs[at][1]:
            raise CompactionRefused(f"{what}: the outputs have {start}..{end}, which the inputs do not hold")
    at = 0
    for start, end in inputs:
        position = start
        while at < len(outputs) and outputs[at][1] <= end:
            _require_trimmed(what, position, outputs[at][0], start_offset)
            position = outputs[at][1]
            at += 1
        _require_trimmed(what, position, end, start_offset)


def _require_trimmed(what: str, start: int, end: int, start_offset: int) -> None:
    """Raise `CompactionRefused` unless offsets `[start, end)`, which are in no output, are trimmed."""
    if start < end and end > start_offset:
        raise CompactionRefused(f"{what}: the outputs lack {start}..{end}, and the stream starts at {start_offset}")


def check_conserved(
    inputs: Iterable[StreamRange], outputs: Iterable[StreamRange], start_of: Callable[[int], int | None]
) -> None:
    """Raise `CompactionRefused` unless the outputs hold what the inputs hold, less what is trimmed.

    `start_of` returns the start offset of a stream, or None if the stream no longer exists.
    """
    held, made = _by_stream(inputs), _by_stream(outputs)
    for stream_id in sorted(held.keys() | made.keys()):
        start_offset = start_of(stream_id)
        if start_offset is not None:
            _check_stream(stream_id, held.get(stream_id, []), made.get(stream_id, []), start_offset)
