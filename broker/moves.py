"""Partitions that leave this broker: the source's part of docs/design/0006-partition-moves.md.

The partition manager gives a `PartitionMoves` the open log of a partition that has a target in the image (`run`). It
uploads while the log serves, has the log withdrawn, closes it, tells the target what it will read (a hint, in the
background), uploads the rest, and hands the partition over right behind the commit of that. What comes of it is the
controller's word: either the image names another owner afterwards, or the manager opens the log here again. Invariant:
`run` returns only when no hand-over of its own can take effect any more.

Each move succeeds or fails by itself, but those that leave at the same time upload together and ask the controller
together (`broker.move_rounds`). While `log.moves_at_once` of them are closed, as many more upload and wait their turn.

Everything that goes on, and the last that went, can be read by operators (`report`, `problems`).

Entry: `PartitionMoves`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from broker.hints import HintParams, Told, encode_hint
from broker.move_rounds import Answers, Commands, Rounds
from broker.settings import LogSettings
from controller.commands import ClosedPartition
from controller.errors import NoReassignmentInProgress, NotHandedOver
from controller.model import NO_REPLICA_SET, PartitionRecord
from runtime.clock import Clock
from runtime.errors import Fenced, NotFound, TidelogError, Unavailable
from runtime.tasks import Backoff, TaskSet

if TYPE_CHECKING:
    from controller.client import ControllerClient
    from storage.storage import Storage
    from stream.partition_log import ClosedLog, PartitionLog

log = logging.getLogger(__name__)

HISTORY = 1_024
"""Finished moves that can still be read."""
PRE_UPLOADS = 4
SMALL_REST_BYTES = 256 << 10
"""What is uploaded in about the time that it takes to say so."""
PRE_UPLOAD_TIMEOUT_S = 60.0
"""An upload while the partition serves; a bucket that is slower makes the attempt start over, later."""
RETRY_BASE_S, RETRY_CAP_S = 0.5, 30.0

Key = tuple[bytes, int]
SendHint = Callable[[int, HintParams | None], Told]


def no_hint(replica_set: int, hint: HintParams | None) -> Told:
    """Where there is no way to other brokers."""
    return Told()


class Phase(Enum):
    """How far a move is."""

    WAITING = "waiting"
    """For its target to live, for a slot, or for the next attempt."""
    UPLOADING = "uploading"
    """The partition serves."""
    CLOSING = "closing"
    """From here on it does not, until it is handed over or the attempt is given up."""
    DRAINING = "draining"
    HANDING_OVER = "handing over"
    RECLAIMING = "reclaiming"
    """It failed, or its outcome is not known; the partition goes on here under a new leader epoch, or there."""
    DONE = "done"
    CANCELLED = "cancelled"


class MoveTimeout(Unavailable):
    """A step of a move took longer than it may."""


@dataclass(slots=True)
class Move:
    """One partition on its way out."""

    topic: str
    partition: int
    target: int
    since_ms: int
    backoff: Backoff
    phase: Phase = Phase.WAITING
    attempts: int = 0
    error: str = ""
    retry_at: float = 0.0
    closed_at: float = 0.0
    closed_ms: int = 0
    leader_epoch: int = -1
    """What this broker led it with last."""
    drained_bytes: int = 0
    """WAL bytes that were not in the bucket when the log was closed: everybody's, for they go together."""
    stall_ms: float = 0.0
    """From the close to the hand-over; the target adds its opening."""
    steps_ms: dict[str, float] = field(default_factory=dict)
    finished_ms: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For operators."""
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


class PartitionMoves:
    """See the module. All methods are for the event loop's thread."""

    def __init__(
        self,
        *,
        node_id: int,
        controller: ControllerClient,
        storage: Storage,
        clock: Clock,
        rng: random.Random,
        settings: LogSettings,
        send_hint: SendHint = no_hint,
    ) -> None:
        """`send_hint(replica set, hint)` carries a hint to a target, if it can; it neither waits nor raises. What the
        target answers is in what it returns, when it is there."""
        self._send_hint = send_hint
        self._node_id = node_id
        self._controller = controller
        self._storage = storage
        self._clock = clock
        self._rng = rng
        self._settings = settings
        self._moves: dict[Key, Move] = {}
        self._running = 0
        self._tasks = TaskSet("moves")
        self._uploads = Rounds(self._upload, self._tasks, "upload")
        self._hand_overs: Commands[ClosedPartition] = Commands(self._send_hand_overs, self._tasks, "hand-over")
        self._reclaims: Commands[Key] = Commands(self._send_reclaims, self._tasks, "reclaim")
        self._may_close = asyncio.Semaphore(settings.moves_at_once)
        self.finished: deque[Move] = deque(maxlen=HISTORY)
        self.counts = {"done": 0, "cancelled": 0, "failed_attempts": 0}

    # --- what the manager asks -----------------------------------------------------------------------------------

    def follow(self, topic: str, record: PartitionRecord) -> Move:
        """The move of a partition of ours that has a target."""
        assert record.target != NO_REPLICA_SET
        key = (record.topic_id, record.index)
        move = self._moves.get(key)
        if move is None:
            backoff = Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)
            move = self._moves[key] = Move(topic, record.index, record.target, record.moving_since_ms, backoff)
        move.target, move.since_ms = record.target, record.moving_since_ms
        return move

    def keep(self, keys: Collection[Key]) -> None:
        """Forget moves of partitions that do not move any more and are not in work: they were cancelled."""
        for key in [key for key, move in self._moves.items() if key not in keys and move.phase is Phase.WAITING]:
            self._end(key, Phase.CANCELLED)

    def wait_s(self, key: Key) -> float | None:
        """Seconds until `run` may be called: 0 for now, None when something else must change first."""
        move = self._moves[key]
        if self._controller.image.master_of(move.target) is None:
            move.error = f"broker {move.target}, where it shall go, is not alive"
            return None
        if self._running >= 2 * self._settings.moves_at_once:
            return None
        return max(0.0, move.retry_at - self._clock.monotonic())

    def problems(self) -> list[str]:
        """What is wrong, for operators."""
        return [
            f"{move.topic}-{move.partition} does not move to broker {move.target}: {move.error}"
            for move in self._moves.values()
            if move.error
        ]

    def report(self) -> list[dict[str, Any]]:
        """All moves that go on, then those that ended, the newest last."""
        return [move.as_dict() for move in [*self._moves.values(), *self.finished]]

    @property
    def in_flight(self) -> int:
        """Moves in work now."""
        return self._running

    async def close(self) -> None:
        """End what is shared; every `run` has been cancelled before."""
        await self._tasks.close()

    # --- one attempt ---------------------------------------------------------------------------------------------

    def take(self, key: Key) -> None:
        """Count an attempt that begins: `run` follows."""
        self._moves[key].attempts += 1
        self._moves[key].phase = Phase.UPLOADING
        self._running += 1

    async def run(self, key: Key, one: PartitionLog, master_epoch: int, withdraw: Callable[[], None]) -> None:
        """Try to move the partition of the open log `one`; `withdraw` takes it out of service.

        Returns when the partition is handed over, or when it may be opened here again. Never raises `TidelogError`.
        """
        move = self._moves[key]
        try:
            await self._attempt(key, move, one, master_epoch, withdraw)
        except NoReassignmentInProgress:
            self._end(key, Phase.CANCELLED)
        except TidelogError as error:
            self._failed(move, error)
        else:
            self._end(key, Phase.DONE)
        finally:
            self._running -= 1

    async def _attempt(
        self, key: Key, move: Move, one: PartitionLog, master_epoch: int, withdraw: Callable[[], None]
    ) -> None:
        await self._upload_while_it_serves()
        async with self._may_close:
            if self._rest_bytes() > SMALL_REST_BYTES:  # it came while others were closed
                await self._upload_while_it_serves()
            self._still_moves(key)
            try:
                await self._close_and_hand_over(key, move, one, master_epoch, withdraw)
            except Fenced:
                raise
            except TidelogError as error:
                if move.phase is Phase.RECLAIMING:
                    raise
                # Clients were told that the target leads the next epoch: this broker may not lead again before that.
                if await self._reclaim(key, move, master_epoch, error) is not None:
                    raise

    async def _close_and_hand_over(
        self, key: Key, move: Move, one: PartitionLog, master_epoch: int, withdraw: Callable[[], None]
    ) -> None:
        move.phase, move.leader_epoch = Phase.CLOSING, one.leader_epoch
        move.closed_at = at = self._clock.monotonic()
        move.closed_ms = self._clock.time_ms()
        withdraw()
        closed = await one.close_for_move()
        told = self._hint(key, one.leader_epoch, closed)
        at = self._step(move, "close", at)
        move.phase = Phase.DRAINING
        move.drained_bytes = self._rest_bytes()
        drain_until = at + self._settings.move_drain_timeout_ms / 1000
        await self._drained(drain_until, self._storage.send_now())
        at = self._step(move, "drain", at)
        move.phase = Phase.HANDING_OVER
        ends = ClosedPartition(*key, one.leader_epoch, closed.end_offsets, closed.meta_start)
        if told.ready is not None:
            ready = told.ready
            ends = msgspec.structs.replace(
                ends, ready_replica_set=ready.replica_set, ready_master_epoch=ready.master_epoch
            )
        try:  # right behind the commit: it is applied first, unless it is late
            await self._hand_over(key, move, ends, master_epoch)
        except NotHandedOver:
            await self._drained(drain_until, self._storage.upload_now())
            await self._hand_over(key, move, ends, master_epoch)
        self._step(move, "hand_over", at)
        move.stall_ms = (self._clock.monotonic() - move.closed_at) * 1000

    async def _upload_while_it_serves(self) -> None:
        """The first upload takes what has gathered, the next what came meanwhile, and so on while that is much."""
        for number in range(PRE_UPLOADS):
            await self._within(PRE_UPLOAD_TIMEOUT_S, self._uploads.join(), "the upload before the close")
            if number and self._rest_bytes() <= SMALL_REST_BYTES:
                break

    async def _upload(self) -> None:
        await asyncio.gather(self._storage.upload_now(), self._storage.reserve_upload())

    def _rest_bytes(self) -> int:
        return self._storage.confirm.value - self._storage.committed_offset

    async def _drained(self, until: float, work: Coroutine[Any, Any, None]) -> None:
        await self._within(max(0.0, until - self._clock.monotonic()), work, "the upload after the close")

    def _hint(self, key: Key, leader_epoch: int, closed: ClosedLog) -> Told:
        """Tell the target what it is about to read. Everything in it is confirmed."""
        record = self._controller.image.partition(*key)
        if record is None or record.target == NO_REPLICA_SET:
            return Told()
        hint = encode_hint(key, leader_epoch, record.first_stream, closed.end_offsets, closed.tails)
        return self._send_hint(record.target, hint)

    def _step(self, move: Move, name: str, since: float) -> float:
        now = self._clock.monotonic()
        move.steps_ms[name] = (now - since) * 1000
        return now

    async def _within(self, seconds: float, work: Any, what: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                await work
        except TimeoutError:
            raise MoveTimeout(
                f"{what} did not end within {seconds:.1f} s", hint="see bucket in `tidelog status`"
            ) from None

    def _still_moves(self, key: Key) -> None:
        record = self._controller.image.partition(*key)
        if record is None or record.target == NO_REPLICA_SET:
            raise NoReassignmentInProgress("the move was cancelled")
        if self._controller.image.master_of(record.target) is None:
            raise Unavailable(f"broker {record.target}, where it shall go, is not alive")

    async def _hand_over(self, key: Key, move: Move, closed: ClosedPartition, master_epoch: int) -> None:
        try:
            error = await self._hand_overs.ask(master_epoch, closed)
        except Fenced:
            raise
        except TidelogError as unknown:  # it may still take effect, or it has and the image is late
            error = await self._reclaim(key, move, master_epoch, unknown)
        if error is not None:
            raise error

    async def _send_hand_overs(self, master_epoch: int, closed: list[ClosedPartition]) -> Answers:
        return await self._controller.hand_over(self._node_id, master_epoch, closed)

    async def _send_reclaims(self, master_epoch: int, keys: list[Key]) -> Answers:
        return await self._controller.reclaim_partitions(self._node_id, master_epoch, keys)

    async def _reclaim(self, key: Key, move: Move, master_epoch: int, reason: TidelogError) -> TidelogError | None:
        """Have the partition back under a new leader epoch, or learn what it is refused with; None: it was handed over.

        It may go on here when this returned an error: `reason`, or the refusal.
        """
        move.phase = Phase.RECLAIMING
        move.error = str(reason)
        log.warning(
            "a hand-over failed, or its outcome is not known; asking for the partition back",
            extra={"topic": move.topic, "partition": move.partition, "error": str(reason)},
        )
        backoff = Backoff(0.1, 5.0, self._rng)
        while True:
            try:
                refused = await self._reclaims.ask(master_epoch, key)
            except Fenced:
                raise
            except TidelogError as error:
                move.error = str(error)
                await self._clock.sleep(backoff.next_delay_s())
                continue
            if isinstance(refused, Fenced):
                return None
            return refused or reason

    # --- ends ----------------------------------------------------------------------------------------------------

    def _failed(self, move: Move, error: TidelogError) -> None:
        self.counts["failed_attempts"] += 1
        delay_s = move.backoff.next_delay_s()
        move.phase, move.error = Phase.WAITING, str(error)
        move.retry_at = self._clock.monotonic() + delay_s
        level = logging.WARNING if error.retriable or isinstance(error, NotFound) else logging.ERROR
        log.log(
            level,
            "a move failed; will try again",
            extra={
                "topic": move.topic,
                "partition": move.partition,
                "target": move.target,
                "attempt": move.attempts,
                "error": str(error),
                "retry_s": round(delay_s, 1),
            },
        )

    def _end(self, key: Key, phase: Phase) -> None:
        move = self._moves.pop(key)
        move.phase, move.finished_ms = phase, self._clock.time_ms()
        move.error = ""
        self.finished.append(move)
        self.counts[phase.value] += 1
        if phase is Phase.DONE:
            log.info(
                "partition handed over",
                extra={
                    "topic": move.topic,
                    "partition": move.partition,
                    "target": move.target,
                    "stall_ms": round(move.stall_ms, 1),
                    "drained_bytes": move.drained_bytes,
                },
            )
