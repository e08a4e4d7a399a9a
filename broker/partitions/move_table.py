"""The moves of one broker as a state machine, without I/O: docs/design/0006-partition-moves.md, at the source.

Theory of operation. A partition of this broker that has a target in the image has a `Move`. Attempts follow each other
until it is handed over or cancelled. `tidelog.broker.partitions.moves` does the I/O of the phase
and reports the outcome as an event:

    phase         I/O                            event                         next
    ───────────   ────────────────────────────   ───────────────────────────   ─────────────────────────────────────────
    WAITING       nothing                        `begin`: `wait_s` is 0        UPLOADING
                                                 `keep`: no target any more    CANCELLED
    UPLOADING     uploads; the log serves        `uploaded`                    UPLOADING, `is_ready` once little is left
                                                 `may_close`: a slot is free   CLOSING; or uploads again, once, if much
                                                                               arrived meanwhile
                                                 `failed`                      WAITING, or CANCELLED
    CLOSING       withdraws and closes the log   `closed`                      DRAINING
    DRAINING      uploads the rest               `drained`                     HANDING_OVER
    HANDING_OVER  requests the hand-over         `handed_over`                 DONE
                                                 `failed`: not committed yet   DRAINING, once: the commit comes first
    CLOSING,      (as above)                     `failed` by `Fenced`          WAITING: replaced by another process
    DRAINING,                                    `failed` otherwise            RECLAIMING
    HANDING_OVER
    RECLAIMING    requests it back, under a      `reclaimed`: refused as       DONE: the hand-over took effect
                  new leader epoch                 `Fenced`
                                                 `reclaimed` otherwise         WAITING, or CANCELLED
                                                 `failed` by `Fenced`          WAITING
                                                 `failed` otherwise            RECLAIMING, after `delay_s`
    DONE          nothing: the move has ended
    CANCELLED

Invariants:
1. From CLOSING on no attempt ends before the controller has named the partition's owner: clients were informed that the
   target leads the next epoch, so this broker leads again only under a new one, and no hand-over of the attempt can
   take effect any more (rule 4). `Fenced` is such an answer: a newer process has replaced this broker.
2. A hand-over is requested only when the rest was uploaded; the controller compares the ends (rules 3 and 5).
3. At most twice `moves_at_once` attempts run (rule 12).

Times are monotonic seconds, except for `…_ms` of operators' reports. Entry: `MoveTable`.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tidelog.controller.model.errors import NoReassignmentInProgress, NotHandedOver
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionKey, PartitionRecord
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import Fenced, NotFound, TidelogError, Unavailable

logger = logging.getLogger(__name__)

HISTORY = 1_024
"""Finished moves that are kept for reports."""
MIN_UPLOADS, MAX_UPLOADS = 2, 4
"""Uploads before the close: the first takes the accumulated data, the next the data that arrived meanwhile, etc."""
SMALL_REST_BYTES = 256 << 10
"""Size that is uploaded in about the time of one round trip."""
RETRY_BASE_S, RETRY_CAP_S = 0.5, 30.0
RECLAIM_BASE_S, RECLAIM_CAP_S = 0.1, 5.0


class MovePhase(Enum):
    """The phase of a move; the table is in the module's docstring."""

    WAITING = "waiting"
    """Waits for a living target, for a slot, or for the next attempt."""
    UPLOADING = "uploading"
    """The partition serves."""
    CLOSING = "closing"
    """From here on it does not serve, until it is handed over or the attempt is abandoned."""
    DRAINING = "draining"
    HANDING_OVER = "handing over"
    RECLAIMING = "reclaiming"
    """The attempt failed, or its outcome is unknown; the partition is reopened here under a new leader epoch, or
    there."""
    DONE = "done"
    CANCELLED = "cancelled"


_WITHDRAWN = frozenset({MovePhase.CLOSING, MovePhase.DRAINING, MovePhase.HANDING_OVER})
_RUNNING = _WITHDRAWN | {MovePhase.UPLOADING, MovePhase.RECLAIMING}


@dataclass(slots=True, eq=False)
class Move:
    """The move of one partition away from this broker."""

    key: PartitionKey
    topic: str
    target: int
    since_ms: int
    backoff: Backoff
    phase: MovePhase = MovePhase.WAITING
    attempts: int = 0
    error: str = ""
    retry_at: float = 0.0
    closed_at: float = 0.0
    closed_ms: int = 0
    leader_epoch: int = -1
    """The last leader epoch at this broker."""
    drained_bytes: int = 0
    """WAL bytes of all streams that were not in the bucket when the log was closed; they are uploaded together."""
    stall_ms: float = 0.0
    """From the close to the hand-over; the target's opening comes in addition."""
    steps_ms: dict[str, float] = field(default_factory=dict)
    finished_ms: int = 0
    # The following fields belong to the current attempt.
    uploads: int = 0
    is_ready: bool = False
    """Little is left to upload: it waits for a slot to close."""
    was_late: bool = False
    """Much data arrived while it waited for a slot, and was uploaded."""
    is_committed: bool = False
    """The hand-over was refused once because the commit of the rest was not known: this commit is waited for."""
    step_at: float = 0.0
    drain_until: float = 0.0
    reason: TidelogError | None = None
    """The error of the attempt."""
    reclaim_backoff: Backoff | None = None
    delay_s: float = 0.0
    """Delay before the next request to reclaim the partition."""

    @property
    def partition(self) -> int:
        """Return the partition index."""
        return self.key[1]

    @property
    def is_running(self) -> bool:
        """Return whether an attempt is in progress."""
        return self.phase in _RUNNING

    def as_dict(self) -> dict[str, Any]:
        """Return the move as JSON for operators."""
        return {
            "topic": self.topic,
            "partition": self.partition,
            "target": self.target,
            "phase": self.phase.value,
            "since_ms": self.since_ms,
            "attempts": self.attempts,
            "leader_epoch": self.leader_epoch,
            "error": self.error or None,
            "drained_bytes": self.drained_bytes,
            "stall_ms": round(self.stall_ms, 1),
            "steps_ms": {name: round(value, 1) for name, value in self.steps_ms.items()},
            "closed_ms": self.closed_ms or None,
            "finished_ms": self.finished_ms or None,
        }

    def step(self, name: str, now: float) -> None:
        """Record the end of a step, and the start of the next."""
        self.steps_ms[name] = (now - self.step_at) * 1000
        self.step_at = now


class MoveTable:
    """All moves of one broker, and the last completed ones."""

    def __init__(self, moves_at_once: int, drain_timeout_s: float, rng: random.Random) -> None:
        self._moves: dict[PartitionKey, Move] = {}
        self._max_running = 2 * moves_at_once
        self._drain_timeout_s = drain_timeout_s
        self._rng = rng
        self.running = 0
        """Attempts in progress."""
        self.finished: deque[Move] = deque(maxlen=HISTORY)
        self.counts = {"done": 0, "cancelled": 0, "failed_attempts": 0}

    # -- between attempts

    def follow(self, topic: str, record: PartitionRecord) -> Move:
        """Return the move of an owned partition that has a target; create it if needed.

        Another target begins anew: what failed at the one before is no reason to wait.
        """
        assert record.target != NO_REPLICA_SET
        key = (record.topic_id, record.index)
        move = self._moves.get(key)
        if move is None:
            backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
            move = self._moves[key] = Move(key, topic, record.target, record.moving_since_ms, backoff)
        if move.target != record.target:
            move.error, move.retry_at = "", 0.0
            move.backoff.reset()
        move.target, move.since_ms = record.target, record.moving_since_ms
        return move

    def keep(self, keys: Collection[PartitionKey], now_ms: int) -> None:
        """Remove inactive moves of partitions that have no target any more: they were cancelled."""
        for move in [each for key, each in self._moves.items() if key not in keys]:
            if move.phase is MovePhase.WAITING:
                self._end(move, MovePhase.CANCELLED, now_ms)

    def wait_s(self, move: Move, now: float, *, target_lives: bool) -> float | None:
        """Return the seconds until `begin` may be called: 0 for now, None when something else must change first."""
        if not target_lives:
            move.error = _not_alive(move.target)
            return None
        if move.error == _not_alive(move.target):
            move.error = ""
        if self.running >= self._max_running:
            return None
        return max(0.0, move.retry_at - now)

    def begin(self, key: PartitionKey) -> Move:
        """Count a new attempt; the caller calls `left` at its end."""
        move = self._moves[key]
        assert move.phase is MovePhase.WAITING and self.running < self._max_running
        move.attempts += 1
        move.phase = MovePhase.UPLOADING
        move.uploads, move.is_ready, move.was_late, move.is_committed = 0, False, False, False
        move.reason, move.reclaim_backoff, move.delay_s = None, None, 0.0
        self.running += 1
        return move

    def left(self) -> None:
        """Record that an attempt's task has ended."""
        assert self.running > 0
        self.running -= 1

    def problems(self) -> list[str]:
        """Return the problems for operators."""
        return [
            f"{move.topic}-{move.partition} does not move to broker {move.target}: {move.error}"
            for move in self._moves.values()
            if move.error
        ]

    def report(self) -> list[dict[str, Any]]:
        """Return the moves in progress, then those completed, the newest last."""
        return [move.as_dict() for move in [*self._moves.values(), *self.finished]]

    # -- events of one attempt, in the order of the phases

    def uploaded(self, move: Move, rest_bytes: int) -> None:
        """An upload has ended while the log serves; `rest_bytes` have arrived meanwhile."""
        assert move.phase is MovePhase.UPLOADING and not move.is_ready
        move.uploads += 1
        is_little = rest_bytes <= SMALL_REST_BYTES
        move.is_ready = move.uploads >= MAX_UPLOADS or (move.uploads >= MIN_UPLOADS and is_little)

    def may_close(
        self,
        move: Move,
        record: PartitionRecord | None,
        rest_bytes: int,
        now: float,
        now_ms: int,
        *,
        target_lives: bool,
    ) -> None:
        """A slot is free; `record` is the partition in the image, and `target_lives` the state of its target."""
        assert move.phase is MovePhase.UPLOADING and move.is_ready
        if rest_bytes > SMALL_REST_BYTES and not move.was_late:
            move.was_late, move.is_ready, move.uploads = True, False, 0
        elif record is None or record.target == NO_REPLICA_SET:
            self.failed(move, NoReassignmentInProgress("the move was cancelled"), now, now_ms)
        elif not target_lives:
            self.failed(move, Unavailable(_not_alive(record.target)), now, now_ms)
        else:
            move.phase = MovePhase.CLOSING
            move.closed_at = move.step_at = now
            move.closed_ms = now_ms

    def closed(self, move: Move, rest_bytes: int, now: float) -> None:
        """The log is closed, and everything in it is confirmed."""
        assert move.phase is MovePhase.CLOSING
        move.phase = MovePhase.DRAINING
        move.drained_bytes = rest_bytes
        move.step("close", now)
        move.drain_until = now + self._drain_timeout_s

    def drained(self, move: Move, now: float) -> None:
        """The rest is in the bucket; its commit has been sent, or is known if `is_committed`."""
        assert move.phase is MovePhase.DRAINING
        move.phase = MovePhase.HANDING_OVER
        if not move.is_committed:
            move.step("drain", now)

    def handed_over(self, move: Move, now: float, now_ms: int) -> None:
        """The controller accepted the hand-over."""
        assert move.phase is MovePhase.HANDING_OVER
        self._done(move, now, now_ms)

    def reclaimed(self, move: Move, refused: TidelogError | None, now: float, now_ms: int) -> None:
        """The controller gave the partition back, or `refused` to."""
        assert move.phase is MovePhase.RECLAIMING and move.reason is not None
        if isinstance(refused, Fenced):  # the partition has another owner: the hand-over took effect
            self._done(move, now, now_ms)
        else:
            self._give_up(move, refused or move.reason, now, now_ms)

    def failed(self, move: Move, error: TidelogError, now: float, now_ms: int) -> None:
        """The I/O of the phase failed, or the controller refused it."""
        assert move.is_running
        if isinstance(error, Fenced) or move.phase is MovePhase.UPLOADING:
            self._give_up(move, error, now, now_ms)
        elif move.phase is MovePhase.RECLAIMING:
            assert move.reclaim_backoff is not None
            move.error, move.delay_s = str(error), move.reclaim_backoff.next_delay_s()
        elif move.phase is MovePhase.HANDING_OVER and isinstance(error, NotHandedOver) and not move.is_committed:
            move.phase, move.is_committed = MovePhase.DRAINING, True
        else:
            self._reclaim(move, error)

    # -- private

    def _reclaim(self, move: Move, reason: TidelogError) -> None:
        assert move.phase in _WITHDRAWN
        move.phase, move.reason, move.error = MovePhase.RECLAIMING, reason, str(reason)
        move.reclaim_backoff, move.delay_s = Backoff(RECLAIM_BASE_S, RECLAIM_CAP_S, self._rng), 0.0
        logger.warning(
            "a hand-over failed, or its outcome is unknown; reclaiming the partition",
            extra={"topic": move.topic, "partition": move.partition, "error": str(reason)},
        )

    def _give_up(self, move: Move, error: TidelogError, now: float, now_ms: int) -> None:
        """End the attempt; the image decides whether there is another one."""
        if isinstance(error, NoReassignmentInProgress):
            self._end(move, MovePhase.CANCELLED, now_ms)
            return
        self.counts["failed_attempts"] += 1
        delay_s = move.backoff.next_delay_s()
        move.phase, move.error, move.retry_at = MovePhase.WAITING, str(error), now + delay_s
        logger.log(
            logging.WARNING if error.retriable or isinstance(error, NotFound) else logging.ERROR,
            "a move failed; retrying",
            extra={
                "topic": move.topic,
                "partition": move.partition,
                "target": move.target,
                "attempt": move.attempts,
                "error": str(error),
                "retry_s": round(delay_s, 1),
            },
        )

    def _done(self, move: Move, now: float, now_ms: int) -> None:
        move.step("hand_over", now)
        move.stall_ms = (now - move.closed_at) * 1000
        self._end(move, MovePhase.DONE, now_ms)
        logger.info(
            "partition handed over",
            extra={
                "topic": move.topic,
                "partition": move.partition,
                "target": move.target,
                "stall_ms": round(move.stall_ms, 1),
                "drained_bytes": move.drained_bytes,
            },
        )

    def _end(self, move: Move, phase: MovePhase, now_ms: int) -> None:
        assert self._moves[move.key] is move
        del self._moves[move.key]
        move.phase, move.finished_ms, move.error = phase, now_ms, ""
        self.finished.append(move)
        self.counts[phase.value] += 1


def _not_alive(target: int) -> str:
    return f"its target, broker {target}, is not alive"
