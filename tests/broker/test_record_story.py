"""What is told of a record's way is true: each time lies within its bounds, and what is not known has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.test_wal_history import LEAD_MS, HandClock
from tests.support.examples import examples
from tidelog.broker.admin.record_story import CleaningFacts, HoldingObject, LogMarks, RecordFacts, summary, tell
from tidelog.storage.history import WalHistory

STREAM, FIRST_STREAM = 41, 40
RECORD_BYTES = 100


def facts(history: WalHistory, clock: HandClock, offset: int, **changes: Any) -> RecordFacts:
    found = RecordFacts(
        offset=offset,
        marks=LogMarks(0, 100, 100, 100),
        base_offset=offset,
        is_present=True,
        is_removed=False,
        stream_id=STREAM,
        first_stream=FIRST_STREAM,
        history=history,
        opened_ms=LEAD_MS,
        inherited_end=0,
        uploaded_end=0,
        cached_from=0,
        wal_start=0,
        now_ms=clock.time_ms(),
    )
    return replace(found, **changes)


def stages(found: RecordFacts) -> dict[str, dict[str, Any]]:
    return {one["stage"]: one for one in tell(found)}


class Life:
    """A WAL with two streams: what happened to the one that is looked at, and when."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.history = WalHistory(self.clock)
        self.history.begin(durable=0, confirmed=0, uploaded=0)
        self.wal_end = self.durable = self.confirmed = self.uploaded = self.committed = 0
        self.records: list[tuple[int, int, int]] = []
        """`(base offset, WAL end, wall clock)` of the appends."""
        self.passed: dict[str, dict[int, int]] = {"synced": {}, "confirmed": {}, "uploaded": {}}
        self._sampled_in = {STREAM: 0, 99: 0}
        self.next_offset = 0

    def append(self, stream_id: int, count: int) -> None:
        self.wal_end += RECORD_BYTES
        base = self.next_offset if stream_id == STREAM else self.wal_end
        if self.history.left and self._sampled_in[stream_id] != self.history.tick:
            self._sampled_in[stream_id] = self.history.tick
            self.history.appended(stream_id, base, self.wal_end)
        if stream_id == STREAM:
            self.records.append((base, self.wal_end, self.clock.time_ms()))
            self.next_offset += count

    def sync(self) -> None:
        self.durable = self._note("synced", self.durable, self.wal_end)
        self.history.note_durable(self.durable)

    def confirm(self) -> None:
        self.confirmed = self._note("confirmed", self.confirmed, self.durable)
        self.history.note_confirmed(self.confirmed)

    def upload(self) -> None:
        self.uploaded = self._note("uploaded", self.uploaded, self.confirmed)
        self.history.note_uploaded(self.uploaded)

    def _note(self, what: str, old: int, new: int) -> int:
        for base, wal_end, _ in self.records:
            if old < wal_end <= new:
                self.passed[what][base] = self.clock.time_ms()
        return new

    def offset_at(self, position: int) -> int:
        """The offset after the last record up to a WAL offset."""
        return next((base for base, wal_end, _ in self.records if wal_end > position), self.next_offset)

    def facts(self, base: int, offset: int) -> RecordFacts:
        high = self.offset_at(self.confirmed)
        marks = LogMarks(0, high, high, self.next_offset)
        end = self.offset_at(self.uploaded)
        return facts(self.history, self.clock, offset, base_offset=base, marks=marks, uploaded_end=end)


steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "other", "sync", "confirm", "upload"]),
        st.integers(1, 3),
        st.sampled_from([0.0, 0.0003, 0.004, 0.03, 0.7, 9.0]),
    ),
    max_size=60,
)


@settings(max_examples=examples(300))
@given(steps)
def test_each_time_that_is_told_is_within_its_bounds(done: list[tuple[str, int, float]]) -> None:
    life = Life()
    for what, count, pause_s in done:
        life.clock.now_s += pause_s
        if what == "append":
            life.append(STREAM, count)
        elif what == "other":
            life.append(99, 1)
        else:
            getattr(life, what)()
    for number, (base, _, appended_ms) in enumerate(life.records):
        end = life.records[number + 1][0] if number + 1 < len(life.records) else life.next_offset
        for offset in (base, end - 1):
            told = stages(life.facts(base, offset))
            happened = {"received": appended_ms, "WAL written": appended_ms}
            happened |= {what: times[base] for what, times in life.passed.items() if base in times}
            for name in ("received", "synced", "confirmed", "uploaded"):
                stage = told[name]
                if name in happened and stage["state"] == "done":
                    after, by = stage["after_ms"], stage["by_ms"]
                    assert after is None or after - 1 <= happened[name], (name, stage)
                    assert by is None or happened[name] <= by + 1, (name, stage)
                    assert stage["at_ms"] is None or abs(stage["at_ms"] - happened[name]) <= 1
                elif name not in happened:
                    assert stage["state"] in ("pending", "unknown") and stage["by_ms"] is None
            for name in ("confirmed", "uploaded"):
                assert (told[name]["state"] == "done") == (name in happened), (name, told)


def lived() -> Life:
    """Offset 0 is sampled, synced 5 ms later, confirmed 20 ms later, and uploaded after 3 s."""
    life = Life()
    life.clock.now_s = 10.0
    life.append(STREAM, 1)
    for pause_s, step in ((0.005, life.sync), (0.020, life.confirm), (3.0, life.upload)):
        life.clock.now_s += pause_s
        step()
    return life


def test_a_sampled_record_has_its_times() -> None:
    told = stages(lived().facts(0, 0))
    times = {name: told[name]["at_ms"] - LEAD_MS for name in ("received", "synced", "confirmed", "visible", "uploaded")}
    assert times == {"received": 10_000, "synced": 10_005, "confirmed": 10_025, "visible": 10_025, "uploaded": 13_025}
    assert told["WAL written"]["detail"] == "ends at WAL offset 100"
    assert told["stable"]["state"] == "done" and told["stable"]["by_ms"] is None


def test_a_record_of_an_earlier_term_has_bounds_from_elsewhere_and_no_more() -> None:
    clock = HandClock()
    history = WalHistory(clock)
    history.begin(durable=None, confirmed=5_000, uploaded=4_000)
    clock.now_s = 50.0
    held = HoldingObject(7, "k", "stream set", 900, LEAD_MS + 7_000, {"position": 0, "length_bytes": 80}, "")
    found = facts(history, clock, 3, inherited_end=100, opened_ms=LEAD_MS + 9_000, uploaded_end=50, object=held)
    told = stages(found)
    assert (told["received"]["after_ms"], told["received"]["by_ms"]) == (None, LEAD_MS + 7_000)
    assert told["uploaded"]["by_ms"] == LEAD_MS + 7_000 and told["uploaded"]["at_ms"] is None
    assert told["WAL written"]["detail"] == "its place in the WAL is not known any more"
    assert told["compacted"]["state"] == "unknown"
    later = stages(replace(found, offset=70, base_offset=70, object=None))
    assert later["received"]["by_ms"] == LEAD_MS + 9_000, "when the log was opened with it"
    assert later["uploaded"]["state"] == "pending"
    unknown = stages(replace(found, inherited_end=0, object=None))
    assert unknown["received"]["by_ms"] is None is unknown["received"]["after_ms"]


def test_bounds_of_two_clocks_that_exclude_each_other_are_not_combined() -> None:
    life = lived()
    early = HoldingObject(7, "k", "stream set", 900, LEAD_MS, None, "its index cannot be read")
    told = stages(replace(life.facts(0, 0), object=early))
    assert told["uploaded"]["at_ms"] == 13_025 + LEAD_MS
    assert "its index cannot be read" in told["object"]["detail"]


def test_an_object_that_was_uploaded_is_told_from_one_that_a_compaction_made() -> None:
    life = lived()
    life.history.note_objects(100, 20, 2)
    held = HoldingObject(21, "k", "stream set", 900, life.clock.time_ms(), None)
    assert stages(replace(life.facts(0, 0), object=held))["compacted"]["state"] == "pending"
    held = replace(held, object_id=30, since_ms=life.clock.time_ms() + 500)
    told = stages(replace(life.facts(0, 0), object=held))["compacted"]
    assert (told["state"], told["at_ms"]) == ("done", held.since_ms)
    assert "object 20 or the ones after it" in told["detail"]


def test_what_is_outside_the_log_or_was_taken_out_of_it() -> None:
    life = lived()
    after = replace(life.facts(0, 0), offset=1, base_offset=1, is_present=False)
    assert summary(after) == "not written yet: the log ends at 1"
    assert [one["state"] for one in tell(after)] == ["pending"]
    life.history.start_moved(FIRST_STREAM, 1)
    deleted = replace(life.facts(0, 0), marks=LogMarks(1, 1, 1, 1), is_present=False)
    assert summary(deleted) == "deleted: the log starts at 1"
    told = stages(deleted)
    assert told["deleted"]["at_ms"] == life.clock.time_ms() and told["received"]["at_ms"] == 10_000 + LEAD_MS
    assert told["cached"]["state"] == "gone"
    forgotten = stages(replace(deleted, first_stream=1))["deleted"]
    assert forgotten["at_ms"] is None and "not known any more" in forgotten["detail"]
    cleaned = CleaningFacts(True, 1, LEAD_MS + 60_000)
    removed = replace(life.facts(0, 0), is_removed=True, is_present=False, cleaning=cleaned)
    assert summary(removed) == "removed by log compaction"
    assert stages(removed)["log compaction"]["by_ms"] == LEAD_MS + 60_000
    kept = stages(replace(removed, is_removed=False, is_present=True))["log compaction"]
    assert kept["detail"].startswith("kept")
    dirty = replace(life.facts(0, 0), cleaning=CleaningFacts(True, 0, 0))
    assert stages(dirty)["log compaction"]["state"] == "pending"


def test_transactions_bound_who_sees_a_record() -> None:
    life = lived()
    opened = replace(life.facts(0, 0), marks=LogMarks(0, 0, 1, 1), transaction="open")
    assert summary(opened).startswith("visible to read_uncommitted consumers only")
    assert stages(opened)["stable"]["state"] == "pending"
    aborted = replace(life.facts(0, 0), transaction="aborted")
    assert "aborted" in summary(aborted) and stages(aborted)["stable"]["state"] == "gone"
    committed = stages(replace(life.facts(0, 0), transaction="committed"))["stable"]
    assert committed["state"] == "done" and "committed" in committed["detail"]


def test_an_unconfirmed_record_says_what_it_waits_for() -> None:
    life = Life()
    life.append(STREAM, 1)
    told = stages(life.facts(0, 0))
    assert [told[name]["state"] for name in ("received", "synced", "confirmed", "visible", "uploaded")] == [
        "done",
        *["pending"] * 4,
    ]
    life.sync()
    assert stages(life.facts(0, 0))["synced"]["state"] == "done"
    assert summary(life.facts(0, 0)).startswith("appended, not confirmed")
