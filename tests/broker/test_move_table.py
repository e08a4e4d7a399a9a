"""The phases of a move: whatever fails, a partition that was withdrawn is led here again only by the controller's
word."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.examples import examples
from tidelog.broker.partitions.move_table import MAX_UPLOADS, SMALL_REST_BYTES, Move, MovePhase, MoveTable
from tidelog.controller.model.errors import NoReassignmentInProgress, NotHandedOver
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionRecord
from tidelog.runtime.errors import CorruptData, Fenced, NotFound, TidelogError, Unavailable

TOPIC = bytes(16)
MUCH = SMALL_REST_BYTES + 1
NOW, NOW_MS = 100.0, 1_000_000


def record(index: int = 0, target: int = 2) -> PartitionRecord:
    values: dict[str, Any] = {"topic_id": TOPIC, "index": index, "replica_set": 1, "target": target}
    defaults = {
        each.name: 0 for each in msgspec.structs.fields(PartitionRecord) if each.required and each.name not in values
    }
    return PartitionRecord(**{**defaults, **values})


def table(moves_at_once: int = 1) -> MoveTable:
    return MoveTable(moves_at_once, 5.0, random.Random(1))


def begun(moves: MoveTable, index: int = 0) -> Move:
    move = moves.follow("t", record(index))
    assert moves.wait_s(move, NOW, target_lives=True) == 0
    return moves.begin(move.key)


def brought_to(moves: MoveTable, phase: MovePhase) -> Move:
    """A move whose attempt is in this phase."""
    move = begun(moves)
    if phase is MovePhase.UPLOADING:
        return move
    moves.uploaded(move, 0)
    moves.uploaded(move, 0)
    moves.may_close(move, record(), 0, NOW, NOW_MS, target_lives=True)
    if phase is MovePhase.CLOSING:
        return move
    moves.closed(move, 7, NOW + 1)
    if phase is MovePhase.DRAINING:
        return move
    moves.drained(move, NOW + 2)
    if phase is MovePhase.HANDING_OVER:
        return move
    moves.failed(move, Unavailable("no answer"), NOW + 3, NOW_MS)
    return move


def test_a_move_that_meets_no_fault_goes_through_its_phases() -> None:
    moves = table()
    move = brought_to(moves, MovePhase.HANDING_OVER)
    moves.handed_over(move, NOW + 4, NOW_MS + 4000)
    moves.left()
    assert (move.phase, move.stall_ms, move.drained_bytes) == (MovePhase.DONE, 4000.0, 7)
    assert move.steps_ms == {"close": 1000.0, "drain": 1000.0, "hand_over": 2000.0}
    assert list(moves.finished) == [move]
    assert moves.counts == {"done": 1, "cancelled": 0, "failed_attempts": 0}
    assert moves.running == 0


def test_another_target_does_not_wait_for_what_failed_at_the_one_before() -> None:
    moves = table()
    for _ in range(8):
        move = begun(moves)
        moves.failed(move, Unavailable("no answer"), NOW, NOW_MS)
        moves.left()
        move.retry_at = 0.0
    moves.failed(begun(moves), Unavailable("no answer"), NOW, NOW_MS)
    moves.left()
    assert (moves.wait_s(move, NOW, target_lives=True) or 0) > 1
    assert "no answer" in moves.problems()[0]
    assert moves.follow("t", record(target=3)) is move
    assert (moves.wait_s(move, NOW, target_lives=True), moves.problems()) == (0, [])


def test_that_a_target_does_not_live_is_no_problem_once_it_does() -> None:
    moves = table()
    move = moves.follow("t", record())
    assert moves.wait_s(move, NOW, target_lives=False) is None
    assert "broker 2, is not alive" in moves.problems()[0]
    assert (moves.wait_s(move, NOW, target_lives=True), moves.problems()) == (0, [])


def test_it_uploads_twice_at_least_and_goes_on_while_much_is_left_but_not_for_ever() -> None:
    moves = table()
    little, much = begun(moves, 0), begun(moves, 1)
    moves.uploaded(little, 0)
    once = little.is_ready
    moves.uploaded(little, 0)
    assert (once, little.is_ready) == (False, True)
    for _ in range(MAX_UPLOADS):
        assert not much.is_ready
        moves.uploaded(much, MUCH)
    assert much.is_ready


def test_what_came_while_it_waited_for_a_slot_is_uploaded_once_more() -> None:
    moves = table()
    move = begun(moves)
    for _ in range(2):
        moves.uploaded(move, 0)
    moves.may_close(move, record(), MUCH, NOW, NOW_MS, target_lives=True)
    assert (move.phase, move.is_ready) == (MovePhase.UPLOADING, False)
    for _ in range(MAX_UPLOADS):
        moves.uploaded(move, MUCH)
    moves.may_close(move, record(), MUCH, NOW, NOW_MS, target_lives=True)
    assert move.phase is MovePhase.CLOSING


@pytest.mark.parametrize(
    ("target", "lives", "phase"),
    [(NO_REPLICA_SET, True, MovePhase.CANCELLED), (2, False, MovePhase.WAITING), (2, True, MovePhase.CLOSING)],
)
def test_before_it_closes_it_looks_whether_it_still_moves(target: int, lives: bool, phase: MovePhase) -> None:
    moves = table()
    move = begun(moves)
    for _ in range(2):
        moves.uploaded(move, 0)
    moves.may_close(move, record(target=target), 0, NOW, NOW_MS, target_lives=lives)
    assert move.phase is phase


@pytest.mark.parametrize("phase", [MovePhase.CLOSING, MovePhase.DRAINING, MovePhase.HANDING_OVER])
def test_a_failure_after_the_log_was_withdrawn_asks_for_the_partition_back(phase: MovePhase) -> None:
    moves = table()
    move = brought_to(moves, phase)
    moves.failed(move, Unavailable("no answer"), NOW, NOW_MS)
    assert (move.phase, move.delay_s) == (MovePhase.RECLAIMING, 0.0)
    moves.failed(move, Unavailable("again"), NOW, NOW_MS)
    assert move.phase is MovePhase.RECLAIMING
    assert move.delay_s > 0
    moves.reclaimed(move, None, NOW, NOW_MS)
    assert (move.phase, move.error) == (MovePhase.WAITING, "no answer")
    assert move.retry_at > NOW


def test_a_partition_that_is_not_given_back_was_handed_over() -> None:
    moves = table()
    move = brought_to(moves, MovePhase.RECLAIMING)
    moves.reclaimed(move, Fenced("broker 2 owns it"), NOW, NOW_MS)
    assert move.phase is MovePhase.DONE


def test_a_hand_over_that_comes_before_its_commit_waits_for_that_once() -> None:
    moves = table()
    move = brought_to(moves, MovePhase.HANDING_OVER)
    moves.failed(move, NotHandedOver("the end is not committed"), NOW, NOW_MS)
    assert (move.phase, move.is_committed) == (MovePhase.DRAINING, True)
    moves.drained(move, NOW)
    moves.failed(move, NotHandedOver("the end is not committed"), NOW, NOW_MS)
    assert move.phase is MovePhase.RECLAIMING


@pytest.mark.parametrize("phase", [MovePhase.CLOSING, MovePhase.DRAINING, MovePhase.HANDING_OVER, MovePhase.RECLAIMING])
def test_who_was_fenced_asks_for_nothing_back(phase: MovePhase) -> None:
    moves = table()
    move = brought_to(moves, phase)
    moves.failed(move, Fenced("another process"), NOW, NOW_MS)
    assert move.phase is MovePhase.WAITING


def test_a_cancelled_move_is_asked_back_and_ends() -> None:
    moves = table()
    move = brought_to(moves, MovePhase.HANDING_OVER)
    moves.failed(move, NoReassignmentInProgress("cancelled"), NOW, NOW_MS)
    asked = move.phase
    moves.reclaimed(move, None, NOW, NOW_MS)
    assert (asked, move.phase) == (MovePhase.RECLAIMING, MovePhase.CANCELLED)
    assert moves.report()[0]["error"] is None


def test_moves_without_a_target_are_forgotten_unless_they_are_in_work() -> None:
    moves = table()
    move, idle = begun(moves, 0), moves.follow("t", record(1))
    moves.keep([], NOW_MS)
    assert (move.phase, idle.phase) == (MovePhase.UPLOADING, MovePhase.CANCELLED)


def test_no_attempt_begins_without_a_living_target_a_slot_and_its_time() -> None:
    moves = table(moves_at_once=1)
    move = moves.follow("t", record(5))
    assert moves.wait_s(move, NOW, target_lives=False) is None
    assert moves.problems() == ["t-5 does not move to broker 2: its target, broker 2, is not alive"]
    for index in range(2):
        begun(moves, index)
    assert moves.wait_s(move, NOW, target_lives=True) is None
    moves.left()
    move.retry_at = NOW + 3
    assert moves.wait_s(move, NOW, target_lives=True) == 3.0


ERRORS = [Unavailable("u"), NotHandedOver("n"), Fenced("f"), NotFound("g"), CorruptData("c")]


class OneOwner(RuleBasedStateMachine):
    """A partition under attempts to move it, and a controller whose answers get lost and whose commands come late.

    The source may open the log again only when no hand-over can take effect any more (rule 4).
    """

    @initialize()
    def begin_world(self) -> None:
        self.table = table()
        self.move = self.table.follow("t", record())
        self.now = 0.0
        self.epoch = 1
        """The leader epoch at the controller."""
        self.opened_under = 1
        """The epoch that the source leads with."""
        self.owner = 1
        self.late: list[int] = []
        """Hand-overs on their way: their epochs."""
        self.withdrawn = False
        self.fenced = False

    def apply(self, epoch: int) -> bool:
        """What the controller does with a hand-over."""
        if self.owner != 1 or epoch != self.epoch:
            return False
        self.owner = 2
        return True

    def after(self) -> None:
        """What the manager does: opens the partition here again, if it is ours."""
        if self.move.is_running:
            return
        self.table.left()
        if self.withdrawn and self.owner == 1 and not self.fenced:
            self.opened_under = self.epoch
        self.withdrawn = False

    def is_in(self, *phases: MovePhase) -> bool:
        return not self.fenced and self.move.phase in phases

    @rule(seconds=st.floats(0, 10))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.is_in(MovePhase.WAITING) and self.owner == 1)
    @rule()
    def begin(self) -> None:
        """An attempt uploads, and gets its slot."""
        self.now = max(self.now, self.move.retry_at)
        assert self.table.wait_s(self.move, self.now, target_lives=True) == 0
        self.table.begin(self.move.key)
        for _ in range(2):
            self.table.uploaded(self.move, 0)
        self.table.may_close(self.move, record(), 0, self.now, NOW_MS, target_lives=True)
        self.withdrawn = True

    @precondition(lambda self: self.is_in(MovePhase.CLOSING, MovePhase.DRAINING))
    @rule()
    def close_or_drain(self) -> None:
        if self.move.phase is MovePhase.CLOSING:
            self.table.closed(self.move, 1, self.now)
        else:
            self.table.drained(self.move, self.now)

    @precondition(lambda self: self.is_in(MovePhase.HANDING_OVER))
    @rule(arrives=st.booleans(), answered=st.booleans())
    def hand_over(self, arrives: bool, answered: bool) -> None:
        if not arrives:
            self.late.append(self.opened_under)
        taken = arrives and self.apply(self.opened_under)
        if taken and answered:
            self.table.handed_over(self.move, self.now, NOW_MS)
        else:
            self.table.failed(self.move, Unavailable("unknown"), self.now, NOW_MS)
        self.after()

    @precondition(lambda self: self.is_in(*MovePhase) and self.late)
    @rule()
    def a_late_hand_over_arrives(self) -> None:
        self.apply(self.late.pop())

    @precondition(lambda self: self.is_in(MovePhase.RECLAIMING))
    @rule(arrives=st.booleans(), answered=st.booleans())
    def reclaim(self, arrives: bool, answered: bool) -> None:
        refused: TidelogError | None = None
        if arrives and self.owner == 1:
            self.epoch += 1
        elif arrives:
            refused = Fenced("it is not yours")
        if arrives and answered:
            self.table.reclaimed(self.move, refused, self.now, NOW_MS)
        else:
            self.table.failed(self.move, Unavailable("unknown"), self.now, NOW_MS)
        self.after()

    @precondition(lambda self: self.is_in(MovePhase.CLOSING, MovePhase.DRAINING))
    @rule(error=st.sampled_from(ERRORS))
    def a_step_fails(self, error: TidelogError) -> None:
        self.table.failed(self.move, error, self.now, NOW_MS)
        self.fenced = isinstance(error, Fenced)
        self.after()

    @invariant()
    def one_owner(self) -> None:
        if not hasattr(self, "table"):
            return
        serves = not self.withdrawn and not self.fenced and self.move.phase is not MovePhase.DONE
        if serves:
            assert self.owner == 1
            assert not any(epoch == self.opened_under for epoch in self.late), "a hand-over may still take effect"
        if self.owner == 2:
            assert self.withdrawn or self.move.phase is MovePhase.DONE
        if self.move.phase is MovePhase.DONE:
            assert self.owner == 2


TestOneOwner = OneOwner.TestCase
TestOneOwner.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
