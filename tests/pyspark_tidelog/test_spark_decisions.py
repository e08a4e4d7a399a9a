"""Commit and abort of exactly-once writes over a model of log and transactions: killed at each step, twice, overtaken
at each step, with tasks and records that come late."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from pyspark_tidelog.committing import Prepared, abort_batch, commit_batch, settle_attempt
from pyspark_tidelog.decisions import Attempt, Decisions, Fate, Pair, Query, decision_record, void_record
from tidelog.runtime.errors import CorruptData, Fenced, Unavailable

QUERY = Query("spark", "0f2d")
ROWS = {batch: [f"{batch}-{row}" for row in range(4)] for batch in range(6)}
SPLITS: tuple[Sequence[slice], ...] = (
    (slice(0, 2), slice(2, 4)),
    (slice(0, 4),),
    (slice(0, 1), slice(1, 3), slice(3, 4)),
)
"""How the rows of a micro-batch are divided into tasks, by run."""
Hook = Callable[[], None]


class Killed(Exception):
    """The process ends here."""


class Model:
    """A log and transactions. `hooks` are called at steps; each call that has an effect is two: before and after it."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.start = 0
        self.open_rows: dict[Attempt, list[str]] = {}
        self.pairs: dict[Attempt, Pair] = {}
        self.visible: list[str] = []
        self.committed: set[Attempt] = set()
        self.hooks: dict[int, Hook] = {}
        self.steps = 0
        self._epoch = 0

    def step(self) -> None:
        self.steps += 1
        hook = self.hooks.pop(self.steps, None)
        if hook is not None:
            hook()

    @contextlib.contextmanager
    def effect(self) -> Iterator[None]:
        self.step()
        yield
        self.step()

    # --- the log ---

    def append(self, record: bytes) -> Decisions:
        with self.effect():
            self.records.append(record)
        return self.read()

    def read(self) -> Decisions:
        self.step()
        return Decisions(list(enumerate(self.records))[self.start :])

    def trim(self, before: int) -> None:
        with self.effect():
            self.start = max(self.start, before)

    # --- the transactions ---

    def prepare(self, attempt: Attempt, rows: Sequence[str]) -> Prepared:
        with self.effect():
            self._epoch += 1
            self.open_rows[attempt] = list(rows)
            self.pairs[attempt] = Pair(7, self._epoch)
        return Prepared(attempt, self.pairs[attempt])

    def commit(self, attempt: Attempt, pair: Pair, *, is_again: bool) -> None:
        with self.effect():
            if attempt in self.open_rows:
                assert self.pairs[attempt] == pair
                self.visible += self.open_rows.pop(attempt)
                self.committed.add(attempt)
        assert attempt in self.committed, f"{attempt} was decided, and is lost"

    def abort(self, attempt: Attempt) -> None:
        with self.effect():
            self.open_rows.pop(attempt, None)

    def open(self, query: Query) -> list[Attempt]:
        self.step()
        return [each for each in self.open_rows if each.query == query]


def tasks(model: Model, batch: int, writer: str, split: Sequence[slice]) -> list[Prepared]:
    """The tasks of a run of a micro-batch."""
    found = []
    for number, part in enumerate(split):
        attempt = Attempt(QUERY, batch, writer, number)
        prepared = model.prepare(attempt, ROWS[batch][part])
        if settle_attempt(attempt, model, model):
            found.append(prepared)
    return found


def run(model: Model, batch: int, writer: str, at: int = 0) -> bool:
    """A run of a micro-batch, with the division `at` of its rows."""
    prepared = tasks(model, batch, writer, SPLITS[at % len(SPLITS)])
    return commit_batch(QUERY, batch, writer, prepared, model, model)


def killed_at(model: Model, step: int, action: Callable[[], object]) -> bool:
    """Do it until a step from now; return whether it came to its end before."""

    def die() -> None:
        raise Killed

    model.hooks[model.steps + step] = die
    try:
        action()
    except Killed:
        return False
    model.hooks.clear()
    return True


def steps_of_a_run() -> range:
    model = Model()
    run(model, 0, "a")
    run(model, 1, "b")
    before = model.steps
    run(model, 2, "c")
    return range(1, model.steps - before + 1)


STEPS = steps_of_a_run()


def begun() -> Model:
    """Two micro-batches have been written."""
    model = Model()
    assert run(model, 0, "first") and run(model, 1, "second", 1)
    return model


def check(model: Model, batches: int) -> None:
    wanted = sorted(row for batch in range(batches) for row in ROWS[batch])
    assert sorted(model.visible) == wanted
    assert model.open_rows == {}


def test_a_run_has_as_many_steps_as_the_tests_below_need() -> None:
    assert len(STEPS) > 12


@pytest.mark.parametrize("step", STEPS)
def test_a_batch_is_written_once_when_its_driver_is_killed_at_a_step(step: int) -> None:
    model = begun()
    assert not killed_at(model, step, lambda: run(model, 2, "x"))
    run(model, 2, "y", 1)
    check(model, 3)
    assert run(model, 3, "z")
    check(model, 4)


@pytest.mark.parametrize("step", STEPS)
def test_a_batch_is_written_once_when_its_drivers_are_killed_twice(step: int) -> None:
    for other in STEPS:
        model = begun()
        assert not killed_at(model, step, partial(run, model, 2, "x"))
        killed_at(model, other, partial(run, model, 2, "y", 2))
        run(model, 2, "z", 1)
        check(model, 3)


def test_a_batch_that_was_committed_and_runs_again_has_no_effect() -> None:
    model = begun()
    assert run(model, 2, "x")
    assert not run(model, 2, "y", 2) and not run(model, 2, "z")
    check(model, 3)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_rows_are_written_once_when_another_driver_goes_on_at_a_step(step: int, batches: int) -> None:
    model = begun()

    def overtake() -> None:
        for batch in range(2, 2 + batches):
            run(model, batch, f"other-{batch}", 1)

    model.hooks[model.steps + step] = overtake
    with contextlib.suppress(Fenced):
        run(model, 2, "zombie")
    assert not model.hooks
    check(model, 2 + batches)
    run(model, 4 if batches == 2 else 3, "next")
    assert model.open_rows == {}


@pytest.mark.parametrize("step", STEPS)
def test_a_task_that_comes_late_leaves_no_open_transaction(step: int) -> None:
    model = begun()
    late = Attempt(QUERY, 2, "zombie", 0)
    prepared = []
    model.hooks[model.steps + step] = lambda: prepared.append(model.prepare(late, ROWS[2]))
    run(model, 2, "x")
    assert len(prepared) == 1
    assert not settle_attempt(late, model, model)
    check(model, 3)


@pytest.mark.parametrize("step", STEPS)
def test_what_was_aborted_is_never_committed_though_its_record_comes_late(step: int) -> None:
    """The driver's own record is in flight when it gives up; it arrives at a step of the next run, or at none."""
    model = begun()
    prepared = tasks(model, 2, "x", SPLITS[0])
    record = decision_record(2, "x", {each.attempt.number: each.pair for each in prepared})
    assert abort_batch(2, "x", prepared, model, model)
    assert model.open_rows == {}
    model.hooks[model.steps + step] = lambda: model.records.append(record)
    assert run(model, 2, "y", 1)
    model.records.append(record)
    check(model, 3)
    assert not run(model, 2, "z")
    check(model, 3)


def test_a_batch_that_was_decided_is_not_aborted() -> None:
    model = begun()
    prepared = tasks(model, 2, "x", SPLITS[0])
    assert not killed_at(model, 3, lambda: commit_batch(QUERY, 2, "x", prepared, model, model))
    assert len(model.open_rows) == 2
    assert not abort_batch(2, "x", prepared, model, model)
    assert len(model.open_rows) == 2
    run(model, 2, "y")
    check(model, 3)


@pytest.mark.parametrize("step", range(1, 7))
def test_an_abort_that_is_killed_is_made_good_by_the_next_commit(step: int) -> None:
    model = begun()
    prepared = tasks(model, 2, "x", SPLITS[0])
    assert not killed_at(model, step, lambda: abort_batch(2, "x", prepared, model, model))
    assert run(model, 2, "y")
    check(model, 3)


def test_an_attempt_whose_message_was_lost_is_aborted_and_the_other_one_committed() -> None:
    model = begun()
    lost = model.prepare(Attempt(QUERY, 2, "x", 0), ROWS[2])
    again = model.prepare(Attempt(QUERY, 2, "x", 1), ROWS[2])
    assert commit_batch(QUERY, 2, "x", [again], model, model)
    check(model, 3)
    assert lost.attempt not in model.committed


def test_a_task_of_a_run_that_was_given_up_aborts_itself() -> None:
    model = begun()
    abort_batch(2, "x", tasks(model, 2, "x", SPLITS[1]), model, model)
    late = Attempt(QUERY, 2, "x", 9)
    model.prepare(late, ROWS[2])
    assert not settle_attempt(late, model, model)
    assert model.open_rows == {}


def test_a_checkpoint_that_was_set_back_is_an_error_and_loses_nothing() -> None:
    model = begun()
    run(model, 2, "x")
    with pytest.raises(Fenced, match="micro-batch 1 cannot be committed: micro-batch 2 was, before"):
        run(model, 1, "y")
    check(model, 3)


def test_a_batch_without_rows_is_decided_too() -> None:
    model = begun()
    assert commit_batch(QUERY, 2, "x", [], model, model)
    assert not run(model, 2, "y")
    check(model, 2)


def test_the_log_of_a_query_stays_short() -> None:
    model = Model()
    for batch in range(6):
        run(model, batch, f"w{batch}", batch)
    assert model.start == len(model.records) - 1


def test_other_queries_are_left_alone() -> None:
    model = begun()
    other = Attempt(Query("spark", "0f2d.x"), 0, "w", 0)
    model.prepare(other, [])
    run(model, 2, "x")
    assert list(model.open_rows) == [other]


def test_names_are_read_as_they_were_made() -> None:
    attempt = Attempt(QUERY, 12, "a1b2", 33)
    assert attempt.transactional_id == "spark.0f2d.12.a1b2.33"
    assert Attempt.of(QUERY, attempt.transactional_id) == attempt
    for other in ("spark.0f2d", "spark.0f2d.x.a.1", "spark.0f2d.1.a.b.2", "spark.0f2d.1.a.", "spark.0f2e.12.a1b2.33"):
        assert Attempt.of(QUERY, other) is None
    assert QUERY.topic == "__spark-0f2d"


def test_a_void_that_is_still_needed_is_kept() -> None:
    log = [(3, decision_record(1, "a", {})), (4, void_record(2, "b")), (5, decision_record(1, "c", {}))]
    assert Decisions(log).keep_from == 3
    log = [(3, void_record(2, "b")), (4, decision_record(1, "a", {0: Pair(1, 2)}))]
    decisions = Decisions(log)
    assert decisions.keep_from == 3
    assert decisions.fate(Attempt(QUERY, 2, "b", 0)) is Fate.ABORT
    assert decisions.fate(Attempt(QUERY, 2, "c", 0)) is Fate.OPEN
    assert decisions.fate(Attempt(QUERY, 1, "a", 0)) is Fate.COMMIT
    assert decisions.fate(Attempt(QUERY, 1, "a", 1)) is Fate.ABORT
    assert Decisions().keep_from == 0 and Decisions().last is None


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[]", b'{"version":1}', decision_record(1, "a", {}).replace(b"1", b"2", 1)]
)
def test_a_record_that_is_no_decision_is_an_error(record: bytes) -> None:
    with pytest.raises(CorruptData, match="offset 8"):
        Decisions([(8, record)])


def test_an_unknown_outcome_of_the_append_leaves_the_transactions_to_the_next_run() -> None:
    model = begun()
    prepared = tasks(model, 2, "x", SPLITS[0])

    def fail() -> None:
        raise Unavailable("no answer")

    model.hooks[model.steps + 2] = fail  # after its effect
    with pytest.raises(Unavailable):
        commit_batch(QUERY, 2, "x", prepared, model, model)
    assert len(model.open_rows) == 2
    assert not run(model, 2, "y", 1)
    check(model, 3)
