"""Moves of partitions away from this broker: the source's part of docs/design/0006-partition-moves.md.

The partition manager passes the open log of a partition that has a target in the image to `PartitionMoves.run`. It
uploads while the log serves, withdraws the log, closes it, sends the target a hint (in the background), uploads
the rest, and sends the hand-over right after the commit of that. `MoveTable` decides the order of the steps and the
reaction to failures; this module does the I/O. The controller decides the outcome: afterwards either the image names
another owner, or the manager opens the log here again. Invariant: `run` returns only when no hand-over of its own can
take effect any more.

Each move succeeds or fails by itself, but moves at the same time share uploads and controller commands
(`tidelog.broker.partitions.coalesce`). While `log.moves_at_once` of them are closed, as many more upload and
wait for a slot.

Entry: `PartitionMoves`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tidelog.broker.partitions.coalesce import Answers, Commands, Rounds
from tidelog.broker.partitions.hints import HintBox, HintParams, Told, encode_hint
from tidelog.broker.partitions.move_table import Move, MovePhase, MoveTable
from tidelog.broker.partitions.storages import Mastership, MasterStorages
from tidelog.broker.settings import LogSettings
from tidelog.broker.telemetry.traced import TracedMove
from tidelog.controller.model.commands import ClosedPartition
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionKey
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError, Unavailable
from tidelog.runtime.task_errors import expected
from tidelog.runtime.tasks import TaskSet

if TYPE_CHECKING:
    from tidelog.controller.client.client import ControllerClient
    from tidelog.stream.partition_close import ClosedLog
    from tidelog.stream.partition_log import PartitionLog

PRE_UPLOAD_TIMEOUT_S = 60.0
"""Limit of an upload while the partition serves; with a slower bucket the attempt starts again later."""

SendHint = Callable[[int, HintParams | None], Told]


def no_hint(replica_set: int, hint: HintParams | None) -> Told:
    """Default: no connection to other brokers."""
    return Told()


def _traced(move: Move, began: float, ended: float) -> TracedMove:
    was_closed = move.closed_at >= began
    is_over = move.phase in (MovePhase.DONE, MovePhase.CANCELLED)
    return TracedMove(
        topic=move.topic,
        topic_id=move.key[0],
        partition=move.partition,
        target=move.target,
        leader_epoch=move.leader_epoch if was_closed else -1,
        began=began,
        closed_at=move.closed_at if was_closed else 0.0,
        ended=ended,
        steps_ms=dict(move.steps_ms) if was_closed else {},
        stall_ms=move.stall_ms if move.phase is MovePhase.DONE else 0.0,
        outcome=move.phase.value if is_over else "failed",
        error=move.error,
    )


class MoveTimeout(Unavailable):
    """A step of a move exceeded its time limit."""


@dataclass(slots=True)
class _Attempt:
    """The I/O state of one attempt."""

    move: Move
    log: PartitionLog
    term: Mastership
    """The master's, under which it is open here."""
    withdraw: Callable[[], None]
    told: Told | None = None
    ends: ClosedPartition | None = None
    broken: AssertionError | None = None
    """The last assertion that failed in it."""


@dataclass(frozen=True, slots=True)
class HintExchange:
    """The exchange of hints between brokers about moving partitions."""

    taken: HintBox | None = None
    """Hints received for partitions that move here. None: hints are not accepted."""
    send: SendHint = no_hint
    """Sends hints."""


NO_HINTS = HintExchange()


class PartitionMoves:
    """The moves of one broker; see the module. All methods are called on the event loop's thread."""

    def __init__(
        self,
        *,
        controller: ControllerClient,
        storages: MasterStorages,
        clock: Clock,
        rng: random.Random,
        settings: LogSettings,
        send_hint: SendHint = no_hint,
    ) -> None:
        """`send_hint(replica set, hint)` sends a hint to a target, if possible; it neither waits nor raises. It returns
        an object that receives the target's reply."""
        self._send_hint = send_hint
        self._controller = controller
        self._storages = storages
        self._clock = clock
        self._tasks = TaskSet("moves")
        self._uploads = Rounds(self._upload, self._tasks, "upload")
        self._hand_overs: Commands[Mastership, ClosedPartition]
        self._hand_overs = Commands(self._send_hand_overs, self._tasks, "hand-over")
        self._reclaims: Commands[Mastership, PartitionKey] = Commands(self._send_reclaims, self._tasks, "reclaim")
        self._may_close = asyncio.Semaphore(settings.moves_at_once)
        self.on_ended: Callable[[TracedMove], None] | None = None
        """Called at the end of each attempt, for traces."""
        self.table = MoveTable(settings.moves_at_once, settings.move_drain_timeout_ms / 1000, rng)
        """The state of each move."""

    @property
    def counts(self) -> dict[str, int]:
        """Return `done`, `cancelled`, `failed_attempts` since the start."""
        return self.table.counts

    async def close(self) -> None:
        """Stop the shared tasks; every `run` has been cancelled before."""
        await self._tasks.close()

    async def run(self, move: Move, one: PartitionLog, term: Mastership, withdraw: Callable[[], None]) -> None:
        """Try to move the partition of the open log `one`, an attempt begun in the table; `withdraw` takes the log out
        of service.

        Returns when the partition is handed over, or when it may be opened here again. Never raises `TidelogError`.
        """
        attempt = _Attempt(move, one, term, withdraw)
        began = self._clock.monotonic()
        try:
            while move.is_running and not move.is_ready:
                await self._step(attempt)
            if move.is_ready:
                async with self._may_close:
                    self._slot_is_free(attempt)
                    while move.is_running:
                        await self._step(attempt)
            if attempt.broken is not None:
                raise attempt.broken
        finally:
            self.table.left()
            if self.on_ended is not None:
                self.on_ended(_traced(move, began, self._clock.monotonic()))

    def _slot_is_free(self, attempt: _Attempt) -> None:
        move = attempt.move
        try:
            self._check_quorum(attempt)
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            self._failed(attempt, failure)
            return
        record = self._controller.image.partition(*move.key)
        target_lives = record is not None and self._controller.image.master_of(record.target) is not None
        now, now_ms = self._clock.monotonic(), self._clock.time_ms()
        self.table.may_close(move, record, self._rest_bytes(attempt), now, now_ms, target_lives=target_lives)

    async def _step(self, attempt: _Attempt) -> None:
        """Do the I/O of the phase, and report the outcome to the table."""
        move = attempt.move
        try:
            if move.phase is MovePhase.UPLOADING:
                await self._upload_while_it_serves(attempt)
            elif move.phase is MovePhase.CLOSING:
                await self._close(attempt)
            elif move.phase is MovePhase.DRAINING:
                await self._drain(attempt)
            elif move.phase is MovePhase.HANDING_OVER:
                await self._hand_over(attempt)
            else:
                await self._reclaim(attempt)
        except Exception as failure:  # noqa: BLE001  # whatever it is: an assertion is raised again
            self._failed(attempt, failure)

    def _failed(self, attempt: _Attempt, failure: Exception) -> None:
        """End the attempt. A failed assertion is raised again, but later: only the controller's word brings a partition
        back that was withdrawn."""
        if isinstance(failure, AssertionError):
            attempt.broken = failure
            error: TidelogError = Unavailable(f"a check failed: {failure}")
        else:
            error = expected("moves", failure)
        self.table.failed(attempt.move, error, self._clock.monotonic(), self._clock.time_ms())

    def _check_quorum(self, attempt: _Attempt) -> None:
        """Raise `NotEnoughReplicas` if no quorum would confirm now what a close writes.

        A log that is closed without one is read by nobody, and is neither handed over nor opened again until there is
        one. It would keep its slot, too, from the moves of other replica sets.
        """
        self._storages.in_term(attempt.term).check_writable(1)

    # --- the phases ----------------------------------------------------------------------------------------------

    async def _upload_while_it_serves(self, attempt: _Attempt) -> None:
        move = attempt.move
        self._check_quorum(attempt)
        await self._within(PRE_UPLOAD_TIMEOUT_S, self._uploads.join(), "the upload before the close")
        self.table.uploaded(move, self._rest_bytes(attempt))
        if move.is_ready and move.was_late:  # it already has its slot
            self._slot_is_free(attempt)

    async def _upload(self) -> None:
        works = [(storage.upload_now(), storage.reserve_upload()) for storage in self._storages.all()]
        await asyncio.gather(*(work for both in works for work in both))

    def _rest_bytes(self, attempt: _Attempt) -> int:
        return self._storages.not_uploaded_of(attempt.term.replica_set)

    async def _close(self, attempt: _Attempt) -> None:
        move, one = attempt.move, attempt.log
        move.leader_epoch = one.leader_epoch
        attempt.withdraw()
        closed = await one.close_for_move()
        attempt.told = self._hint(move.key, one, closed)
        attempt.ends = ClosedPartition(*move.key, one.leader_epoch, closed.end_offsets, closed.meta_start)
        self.table.closed(move, self._rest_bytes(attempt), self._clock.monotonic())

    def _hint(self, key: PartitionKey, one: PartitionLog, closed: ClosedLog) -> Told:
        """Send the target a hint with the data that it will need. Everything in it is confirmed."""
        record = self._controller.image.partition(*key)
        if record is None or record.target == NO_REPLICA_SET:
            return Told()
        hint = encode_hint(
            key, one.leader_epoch, record.first_stream, closed.end_offsets, closed.tails, one.hint_note()
        )
        return self._send_hint(record.target, hint)

    async def _drain(self, attempt: _Attempt) -> None:
        """Upload the rest: the hand-over is sent right after the commit and applied after it. If it was refused because
        the commit was late, wait for the commit."""
        move, storage = attempt.move, self._storages.in_term(attempt.term)
        work = storage.upload_now() if move.is_committed else storage.send_now()
        await self._within(max(0.0, move.drain_until - self._clock.monotonic()), work, "the upload after the close")
        self.table.drained(move, self._clock.monotonic())

    async def _hand_over(self, attempt: _Attempt) -> None:
        ends, told = attempt.ends, attempt.told
        assert ends is not None and told is not None
        if told.ready is not None:
            ready = told.ready
            ends = msgspec.structs.replace(
                ends, ready_replica_set=ready.replica_set, ready_master_epoch=ready.master_epoch
            )
        refused = await self._hand_overs.ask(attempt.term, ends)
        if refused is not None:
            raise refused
        self.table.handed_over(attempt.move, self._clock.monotonic(), self._clock.time_ms())

    async def _reclaim(self, attempt: _Attempt) -> None:
        """Get the partition back under a new leader epoch, or the error of the refusal.

        A hand-over that was sent may still take effect, or has taken effect and the image is late.
        """
        if attempt.move.delay_s > 0:
            await self._clock.sleep(attempt.move.delay_s)
        refused = await self._reclaims.ask(attempt.term, attempt.move.key)
        self.table.reclaimed(attempt.move, refused, self._clock.monotonic(), self._clock.time_ms())

    # --- private -------------------------------------------------------------------------------------------------

    async def _within(self, seconds: float, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            raise MoveTimeout(
                f"{what} did not end within {seconds:.1f} s", hint="see bucket in `tidelog status`"
            ) from None

    async def _send_hand_overs(self, term: Mastership, closed: list[ClosedPartition]) -> Answers:
        return await self._controller.hand_over(term.replica_set, term.master_epoch, closed)

    async def _send_reclaims(self, term: Mastership, keys: list[PartitionKey]) -> Answers:
        return await self._controller.reclaim_partitions(term.replica_set, term.master_epoch, keys)
