"""What is known of one record's way through a partition: the stages, each with a time or the bounds of one. Sans-IO.

Times come from the leader's own history (`tidelog.storage.history`), which begins with its term and forgets; where that
does not reach, from what bounds them: when the log was opened here with the record in it, when the object that holds it
was committed. A stage whose time nobody knows is told without one. The record's own timestamp is its producer's word.

Entry: `tell`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidelog.storage.history import Passing, Placed, PositionHistory, WalHistory

DONE, PENDING, UNKNOWN, GONE = "done", "pending", "unknown", "gone"
"""States of a stage: it happened; it has not; nobody knows whether; what it was about does not exist any more."""


class Window(NamedTuple):
    """A time, or the bounds of one, in wall-clock ms; None: not known."""

    after_ms: int | None = None
    by_ms: int | None = None
    source: str = ""

    def narrowed(self, other: Window) -> Window:
        """This one, with the closer bounds of both; unchanged where these exclude each other, as clocks of two machines
        may."""
        after = max((each for each in (self.after_ms, other.after_ms) if each is not None), default=None)
        by = min((each for each in (self.by_ms, other.by_ms) if each is not None), default=None)
        if after is not None and by is not None and after > by:
            return self
        is_mine = (after, by) == (self.after_ms, self.by_ms)
        return Window(after, by, self.source if is_mine or not other.source else other.source)


class LogMarks(NamedTuple):
    """The offsets that bound a partition log."""

    log_start: int
    last_stable: int
    high_watermark: int
    log_end: int


@dataclass(frozen=True, slots=True)
class HoldingObject:
    """The object that holds the record now."""

    object_id: int
    key: str
    kind: str
    size: int
    since_ms: int
    """When it was committed, by the controller's clock."""
    block: dict[str, int] | None
    """Position, length and offsets of its block; None: not known, see `problem`."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CleaningFacts:
    """The topic's log compaction."""

    is_on: bool
    first_dirty: int
    """Everything before it was compacted by a whole round."""
    cleaned_ms: int
    """When that round ended; 0: none yet."""


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """What the leader knows of an offset."""

    offset: int
    marks: LogMarks
    base_offset: int
    """Of the batch that contains it; the offset itself if no batch does."""
    is_present: bool
    """A batch in the log has a record at the offset."""
    is_removed: bool
    """It is in the log's range, and log compaction has removed it, or its batch."""
    stream_id: int
    first_stream: int
    history: WalHistory
    opened_ms: int
    inherited_end: int
    """The log end when this broker opened it."""
    uploaded_end: int
    """The committed end of the data stream."""
    cached_from: int
    """The first offset in the log cache."""
    wal_start: int
    now_ms: int
    timestamp_ms: int = -1
    is_append_time: bool = False
    transaction: str = ""
    """`open`, `committed` or `aborted`; empty: in none, or not known."""
    object: HoldingObject | None = None
    cleaning: CleaningFacts = field(default_factory=lambda: CleaningFacts(False, 0, 0))


Stage = dict[str, Any]


def tell(facts: RecordFacts) -> list[Stage]:
    """Return the stages of the record's way, in order."""
    if facts.offset >= facts.marks.log_end:
        return [_stage("received", PENDING, detail=f"not written yet: the log ends at {facts.marks.log_end}")]
    return [*_first_stages(facts), *_later_stages(facts)]


def summary(facts: RecordFacts) -> str:
    """Say in a sentence what became of the offset."""
    marks, offset = facts.marks, facts.offset
    if offset >= marks.log_end:
        return f"not written yet: the log ends at {marks.log_end}"
    if offset < marks.log_start:
        return f"deleted: the log starts at {marks.log_start}"
    if facts.is_removed:
        return "removed by log compaction"
    if offset >= marks.high_watermark:
        return f"appended, not confirmed: the high watermark is {marks.high_watermark}"
    if facts.transaction == "aborted":
        return "in an aborted transaction: read_committed consumers skip it"
    if offset >= marks.last_stable:
        return f"visible to read_uncommitted consumers only: the last stable offset is {marks.last_stable}"
    return "visible"


def _stage(name: str, state: str, window: Window | None = None, detail: str = "") -> Stage:
    window = window or Window()
    is_exact = window.after_ms is not None and window.after_ms == window.by_ms
    return {
        "stage": name,
        "state": state,
        "at_ms": window.by_ms if is_exact else None,
        "after_ms": window.after_ms,
        "by_ms": window.by_ms,
        "source": window.source or None,
        "detail": detail or None,
    }


# --- times ---------------------------------------------------------------------------------------------------------


def _appended(placed: Placed, now_ms: int) -> Window:
    low, high = placed.low, placed.high
    if low is not None and placed.exact:
        return Window(low.at_ms, low.at_ms, "sampled")
    after = low.at_ms if low is not None else None
    by = high.at_ms if high is not None else now_ms if low is not None else None
    return Window(after, by, "samples around it" if low is not None or high is not None else "")


def _passed(position: PositionHistory, placed: Placed, now_ms: int) -> Window:
    """When a position passed the record, which it has."""
    low, high = placed.low, placed.high
    first = position.passing(low.wal_end) if low is not None else None
    if placed.exact:
        return Window(first.after_ms, first.by_ms, "history") if first is not None else Window()
    last: Passing | None = position.passing(high.wal_end) if high is not None else None
    after = first.after_ms if first is not None else low.at_ms if low is not None else None
    by = last.by_ms if last is not None else now_ms if low is not None else None
    known = after is not None or by is not None
    return Window(after, by, "history, between samples" if known else "")


def _windows(facts: RecordFacts, placed: Placed) -> dict[str, Window]:
    """Bounds of the stages that have happened; each is after the ones before it."""
    history, now_ms = facts.history, facts.now_ms
    confirmed = facts.offset < facts.marks.high_watermark
    uploaded = facts.offset < facts.uploaded_end
    found = {"received": _appended(placed, now_ms)}
    if facts.offset < facts.inherited_end:
        opened = Window(None, facts.opened_ms, "in the log when opened here")
        found["received"] = found["received"].narrowed(opened)
    if uploaded:
        window = _passed(history.uploaded, placed, now_ms)
        if facts.object is not None:
            window = window.narrowed(Window(None, facts.object.since_ms, "commit of its object"))
        found["uploaded"] = window
    if confirmed:
        window = _passed(history.confirmed, placed, now_ms)
        found["confirmed"] = window.narrowed(_only_by(found.get("uploaded"), "uploaded by then"))
    if _is_durable(facts, placed):
        found["synced"] = _passed(history.durable, placed, now_ms)
        if history.durable is history.confirmed and "confirmed" in found:
            found["synced"] = found["confirmed"]
    later = found.get("confirmed") or found.get("synced")
    found["received"] = found["received"].narrowed(_only_by(later, "a later stage"))
    for name in ("synced", "confirmed", "uploaded"):
        if name in found:
            found[name] = found[name].narrowed(Window(found["received"].after_ms))
    return found


def _only_by(window: Window | None, source: str) -> Window:
    return Window() if window is None or window.by_ms is None else Window(None, window.by_ms, source)


def _is_durable(facts: RecordFacts, placed: Placed) -> bool:
    """Whether the leader's own disk is known to have the record."""
    if facts.offset < max(facts.inherited_end, facts.uploaded_end):
        return True
    end = placed.low if placed.exact else placed.high
    durable = facts.history.durable
    if end is not None:
        return end.wal_end <= durable.end
    return durable is facts.history.confirmed and facts.offset < facts.marks.high_watermark


# --- stages --------------------------------------------------------------------------------------------------------


def _first_stages(facts: RecordFacts) -> Iterator[Stage]:
    """From the producer to the consumers' view."""
    placed = facts.history.place(facts.stream_id, facts.base_offset)
    windows, marks = _windows(facts, placed), facts.marks
    if facts.timestamp_ms >= 0:
        is_ours = facts.is_append_time
        source = "broker (LogAppendTime)" if is_ours else "producer (CreateTime)"
        yield _stage("timestamp", DONE, Window(facts.timestamp_ms, facts.timestamp_ms, source))
    yield _stage("received", DONE, windows["received"])
    yield _stage("WAL written", DONE, windows["received"], _wal_detail(facts, placed))
    if "synced" in windows:
        yield _stage("synced", DONE, windows["synced"], "durable in this broker's WAL")
    else:
        is_past = facts.offset < marks.high_watermark
        detail = "the quorum has it; whether this broker's disk does is not known" if is_past else "waits for the disk"
        yield _stage("synced", UNKNOWN if is_past else PENDING, None, detail)
    if "confirmed" in windows:
        yield _stage("confirmed", DONE, windows["confirmed"], "by the write quorum")
        yield _stage("visible", DONE, windows["confirmed"], f"the high watermark is {marks.high_watermark}")
    else:
        yield _stage("confirmed", PENDING, None, f"the high watermark is {marks.high_watermark}")
        yield _stage("visible", PENDING)
    yield _stable_stage(facts)


def _wal_detail(facts: RecordFacts, placed: Placed) -> str:
    """Where in the WAL it lies."""
    if placed.exact and placed.low is not None:
        end = placed.low.wal_end
        return f"ends at WAL offset {end}" + (", trimmed since" if end <= facts.wal_start else "")
    if placed.low is not None and placed.high is not None:
        return f"between WAL offsets {placed.low.wal_end} and {placed.high.wal_end}"
    if placed.low is not None:
        return f"after WAL offset {placed.low.wal_end}"
    if placed.high is not None:
        return f"before WAL offset {placed.high.wal_end}"
    return "its place in the WAL is not known any more"


def _stable_stage(facts: RecordFacts) -> Stage:
    """Visible to read_committed consumers."""
    marks = facts.marks
    if facts.transaction == "aborted":
        return _stage("stable", GONE, None, "its transaction was aborted: read_committed consumers skip it")
    if facts.offset < marks.last_stable:
        how = "committed; " if facts.transaction == "committed" else ""
        return _stage("stable", DONE, None, f"{how}the last stable offset is {marks.last_stable} (no time is kept)")
    if facts.offset >= marks.high_watermark:
        return _stage("stable", PENDING, None, "not confirmed yet")
    why = "its" if facts.transaction == "open" else "an earlier"
    return _stage("stable", PENDING, None, f"the last stable offset is {marks.last_stable}: {why} transaction is open")


def _later_stages(facts: RecordFacts) -> Iterator[Stage]:
    """From the log cache to the end."""
    placed = facts.history.place(facts.stream_id, facts.base_offset)
    window = _windows(facts, placed).get("uploaded")
    is_deleted = facts.offset < facts.marks.log_start
    is_cached = facts.offset >= facts.cached_from and not (is_deleted or facts.is_removed)
    yield _stage(
        "cached", DONE if is_cached else GONE, None, "in the log cache" if is_cached else "not in the log cache"
    )
    if window is None:
        yield _stage("uploaded", PENDING, None, "only the WAL has it")
    else:
        yield _stage("uploaded", DONE, window, "in the bucket, and committed")
    if facts.object is not None:
        yield _object_stage(facts.object)
        yield from _compaction_stage(facts, placed)
    if facts.cleaning.is_on or facts.is_removed:
        yield _cleaning_stage(facts)
    if is_deleted:
        yield _deletion_stage(facts)


def _object_stage(found: HoldingObject) -> Stage:
    detail = f"object {found.object_id}, {found.kind}, {found.size} bytes"
    if found.block is not None:
        detail += f", block at byte {found.block['position']}"
    elif found.problem:
        detail += f"; {found.problem}"
    return _stage("object", DONE, Window(found.since_ms, found.since_ms, "controller"), detail)


def _compaction_stage(facts: RecordFacts, placed: Placed) -> Iterator[Stage]:
    """Whether the object is the one that was uploaded. The metadata do not say; the uploads of this term do."""
    assert facts.object is not None
    upload = facts.history.upload_of(placed)
    if upload is None:
        detail = "not known any more: uploaded so, or the result of a compaction"
        yield _stage("compacted", UNKNOWN, None, detail)
    elif upload.first_object <= facts.object.object_id < upload.first_object + upload.objects:
        yield _stage("compacted", PENDING, None, "still in the object that it was uploaded in")
    else:
        window = Window(facts.object.since_ms, facts.object.since_ms, "controller")
        which = f"object {upload.first_object}" + (" or the ones after it" if upload.objects > 1 else "")
        yield _stage(
            "compacted", DONE, window, f"was uploaded in {which}; compacted into object {facts.object.object_id}"
        )


def _cleaning_stage(facts: RecordFacts) -> Stage:
    """Log compaction."""
    cleaning = facts.cleaning
    by = Window(None, cleaning.cleaned_ms, "end of the last round") if cleaning.cleaned_ms else Window()
    if facts.is_removed:
        return _stage("log compaction", DONE, by, "removed: a later record has its key, or it was a tombstone")
    if facts.offset < cleaning.first_dirty:
        return _stage("log compaction", DONE, by, "kept: no later record had its key then")
    return _stage("log compaction", PENDING, None, f"rounds have reached offset {cleaning.first_dirty}")


def _deletion_stage(facts: RecordFacts) -> Stage:
    """Retention, or DeleteRecords."""
    move = facts.history.deletion_of(facts.first_stream, facts.offset)
    detail = f"by retention or DeleteRecords, up to {facts.marks.log_start}"
    if move is not None:
        return _stage("deleted", DONE, Window(move.at_ms, move.at_ms, "move of the log start"), detail)
    return _stage("deleted", DONE, None, f"{detail}; when is not known any more")
