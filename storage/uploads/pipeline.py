"""State machine of uploads: the state of every upload between plan and commit, without I/O.

Theory of operation. `UploadPlanner` cuts the confirmed log into tasks; each becomes an `Upload`. Several run
concurrently. Their objects may complete in any order; their commits are sent in the order of the WAL, one at a time.
`tidelog.storage.uploads.uploader` does the I/O: it passes events in and executes the answers.

    state       event                                          next
    ─────────   ────────────────────────────────────────────   ─────────────────────────────────────────────────────
    PUTTING     `landed`: its objects are in the bucket         LANDED
    LANDED      `begin_commit`: another upload is older         LANDED: it commits when that one is finished
                  it is the oldest; layout or ids are stale     PUTTING: laid out again, under new ids
                  it is the oldest; both are current            COMMITTING
    COMMITTING  `committed`: the controller accepted it         COMMITTED
                `refused`: our metadata shows the range         COMMITTED: an earlier attempt succeeded
                  `CommitGap` in a stream that it carries       PUTTING: the stream is quarantined first
                  `CommitGap` elsewhere (the WAL)               uploads stop
                  `NotFound`                                    PUTTING: at once if a stream was lost, else after a
                                                                back-off (an id is gone)
                  `Fenced`; a stream was lost or ids are old    PUTTING: a controller refuses both in the same way
                  `Fenced`, up to `REFUSALS` times              COMMITTING after a back-off: our metadata may be late
                  `Fenced` once more                            uploads stop: a newer master owns the WAL (rule 4)
                  anything else                                 COMMITTING after a back-off, the same commit; if the
                                                                outcome was unknown, our metadata is checked first
    COMMITTED   `finish`: its records were released             removed; the next one may commit
    any         `stop`                                          nothing begins to commit any more

Invariants:
1. Nothing beyond the confirm offset is in an upload (rule 2).
2. The uploads follow each other in the WAL without a gap; only the oldest is COMMITTING or COMMITTED (rule 5).
3. `committed_offset`, up to which the WAL may be trimmed, advances over committed uploads only, in order (rule 3).
4. At most `max_in_flight` uploads are in progress (rule 12).
5. An object is committed within `_TTL_SHARE` of the TTL of its id, counted from before the id was requested.

Times are monotonic seconds. Entry: `UploadPipeline`, `PreparedIds`.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import Fenced, NotFound, TidelogError, Unavailable
from tidelog.storage.cache.log_cache import Fate, StreamLog
from tidelog.storage.commits import CommitGap
from tidelog.storage.objects.writer import BuiltObject
from tidelog.storage.settings import UploadSettings
from tidelog.storage.uploads.plan import ObjectLayout, UploadPlanner, UploadTask

logger = logging.getLogger(__name__)

REFUSALS = 5
"""How often a refused commit is retried, about 3 s in all: our copy of the metadata may lag behind a deletion."""
RETRY_BASE_S, RETRY_CAP_S = 0.05, 5.0
_TTL_SHARE = 0.7
"""Objects are put again under new ids when this share of the TTL has passed before the first commit attempt."""
_RESERVED = 2
"""Number of ids kept in reserve: the next upload may be another one than they were prepared for."""
_RESERVED_SHARE = 0.5
"""A reserved id is used within this share of its TTL; from there to `_TTL_SHARE` there is time to commit it."""


class UploadState(Enum):
    """The progress of an upload; the table is in the module's docstring."""

    PUTTING = "putting"
    LANDED = "landed"
    COMMITTING = "committing"
    COMMITTED = "committed"


class NextStep(Enum):
    """The next step of an upload after a refused commit."""

    FINISH = "finish"
    """It is committed."""
    COMMIT = "commit"
    """Retry the same commit after the delay."""
    PUT = "put"
    """Lay it out again after the delay."""
    QUARANTINE = "quarantine"
    """Quarantine the stream of the gap, then lay it out again."""
    STOP = "stop"
    """Uploads end with the error."""


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """The consequence of a refused commit, and the delay before it."""

    next: NextStep
    delay_s: float = 0.0
    stream: StreamLog | None = None
    """For `QUARANTINE`."""


@dataclass(slots=True, eq=False)
class Upload:
    """One upload in progress."""

    task: UploadTask
    backoff: Backoff
    """Of the current commit."""
    state: UploadState = UploadState.PUTTING
    layout: ObjectLayout = field(default_factory=lambda: ObjectLayout([], [], []))
    objects: list[BuiltObject] = field(default_factory=list)
    stale_at: float = 0.0
    """The time from which the ids may have expired."""
    refusals: int = 0
    """Refusals of the current commit."""
    outcome_unknown: bool = False
    """Whether the last commit attempt may have succeeded."""
    began: float = 0.0
    put_at: float = 0.0
    """Monotonic seconds of its start, and of when its objects were in the bucket; 0: not yet."""


class UploadPipeline:
    """All uploads in progress, oldest first."""

    def __init__(
        self,
        planner: UploadPlanner,
        settings: UploadSettings,
        rng: random.Random,
        owns_stream: Callable[[int], bool],
    ) -> None:
        """`owns_stream` tests in local memory whether a stream is this replica set's; `rng` is for the back-off."""
        self._planner = planner
        self._max_in_flight = settings.max_in_flight
        self._rng = rng
        self._owns_stream = owns_stream
        self._uploads: deque[Upload] = deque()
        self._stopped = False
        self.committed_offset = planner.planned
        """The WAL offset up to which all uploads are committed: everything before it may be trimmed."""
        self.rebuilt = 0
        """How often an upload was laid out again."""

    @property
    def in_flight(self) -> int:
        """Return the number of uploads in progress."""
        return len(self._uploads)

    @property
    def stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopped

    @property
    def is_full(self) -> bool:
        """Return whether the number of uploads is at its limit."""
        return len(self._uploads) >= self._max_in_flight

    def start(self) -> None:
        """Set the start of the first upload to the planner's, after the WAL was recovered."""
        assert not self._uploads and self._planner.planned >= self.committed_offset
        self.committed_offset = self._planner.planned

    def stop(self) -> None:
        """Stop planning and committing after an upload failed permanently."""
        self._stopped = True

    # -- starting uploads

    def begin_due(self, now: float, confirmed: int) -> list[Upload]:
        """Begin uploads that are due, within the limit; `confirmed` is the confirm offset."""
        if self._stopped:
            return []
        self._planner.observe(now, confirmed)
        begun: list[Upload] = []
        while not self.is_full and (task := self._planner.next_task(now)) is not None:
            assert task.wal_end <= confirmed, "unconfirmed data is planned (rule 2)"
            end = self._uploads[-1].task.wal_end if self._uploads else self.committed_offset
            assert task.wal_start == end, f"an upload starts at {task.wal_start}, not at {end} (rule 5)"
            upload = Upload(task, self._new_backoff())
            self._uploads.append(upload)
            begun.append(upload)
        return begun

    def watch_at(self) -> int | None:
        """Return the confirm offset at which to check again; None if an upload ends before, or nothing is due."""
        return None if self.is_full else self._planner.watch_at()

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until pending data is old enough; None if another event must happen first."""
        return None if self.is_full else self._planner.wait_s(now)

    def pending_age_s(self, now: float) -> float:
        """Return for how long the oldest confirmed byte has not been in the bucket; 0 if all are."""
        oldest = self._uploads[0].task.waiting_since if self._uploads else self._planner.waiting_since()
        return max(0.0, now - oldest) if oldest is not None else 0.0

    # -- one upload

    def landed(self, upload: Upload, layout: ObjectLayout, objects: list[BuiltObject], stale_at: float) -> None:
        """Record that the objects of `upload`, with this layout, are in the bucket; ids are valid until `stale_at`."""
        assert upload.state is UploadState.PUTTING
        upload.state = UploadState.LANDED
        upload.layout, upload.objects, upload.stale_at = layout, objects, stale_at

    def has_turn(self, upload: Upload) -> bool:
        """Return whether `upload` is the oldest: only this one may commit."""
        return self._uploads[0] is upload

    def begin_commit(self, upload: Upload, now: float) -> bool:
        """Return whether to send the commit of `upload`, which is the oldest; if False, lay it out again."""
        assert upload.state is UploadState.LANDED
        assert self.has_turn(upload) and not self._stopped, "commits are in the order of the WAL (rule 5)"
        if not upload.layout.is_current or now >= upload.stale_at:
            self._lay_out_again(upload)
            return False
        upload.state = UploadState.COMMITTING
        upload.backoff, upload.refusals, upload.outcome_unknown = self._new_backoff(), 0, False
        return True

    def committed(self, upload: Upload) -> None:
        """Record that the commit of `upload` is in the metadata."""
        assert upload.state is UploadState.COMMITTING
        self._accept(upload)

    def refused(self, upload: Upload, error: TidelogError, now: float, *, is_committed: bool) -> CommitAnswer:
        """Handle a failed commit attempt. `is_committed`: our copy of the metadata shows the range committed."""
        assert upload.state is UploadState.COMMITTING
        upload.outcome_unknown = isinstance(error, Unavailable)
        if isinstance(error, CommitGap | NotFound) and is_committed:
            self._accept(upload)
            return CommitAnswer(NextStep.FINISH)
        if isinstance(error, CommitGap):
            return self._gap(upload, error)
        if isinstance(error, NotFound):  # the controller does not know an id (expired) or a stream (deleted)
            lost = self._drop_lost_streams(upload)
            self._lay_out_again(upload)
            return CommitAnswer(NextStep.PUT, 0.0 if lost else upload.backoff.next_delay_s())
        if isinstance(error, Fenced):
            upload.refusals += 1
            if self._drop_lost_streams(upload) or now >= upload.stale_at:
                self._lay_out_again(upload)
                return CommitAnswer(NextStep.PUT)
            if upload.refusals > REFUSALS:
                return CommitAnswer(NextStep.STOP)
        return CommitAnswer(NextStep.COMMIT, upload.backoff.next_delay_s())

    def found_committed(self, upload: Upload, *, is_committed: bool) -> bool:
        """Return whether the commit, about to be retried after a delay, is no longer needed."""
        assert upload.state is UploadState.COMMITTING
        if upload.outcome_unknown and is_committed:
            self._accept(upload)
            return True
        return False

    def finish(self, upload: Upload) -> Upload | None:
        """Remove a committed upload whose records were released; return the next upload to commit, if any."""
        assert upload.state is UploadState.COMMITTED and self.has_turn(upload)
        self._uploads.remove(upload)
        return self._uploads[0] if self._uploads else None

    # -- inside

    def _new_backoff(self) -> Backoff:
        return Backoff(RETRY_BASE_S, RETRY_CAP_S, self._rng)

    def _accept(self, upload: Upload) -> None:
        assert self.has_turn(upload) and upload.task.wal_start == self.committed_offset
        upload.state = UploadState.COMMITTED
        self.committed_offset = upload.task.wal_end

    def _lay_out_again(self, upload: Upload) -> None:
        upload.state = UploadState.PUTTING
        self.rebuilt += 1

    def _gap(self, upload: Upload, error: CommitGap) -> CommitAnswer:
        """Handle a gap: one in a stream removes that stream from the upload; one in the WAL stops all uploads."""
        for stream_log, fate in upload.layout.fates:
            if stream_log.stream_id == error.stream_id and fate is Fate.UPLOAD:
                self._lay_out_again(upload)
                return CommitAnswer(NextStep.QUARANTINE, stream=stream_log)
        return CommitAnswer(NextStep.STOP)

    def _drop_lost_streams(self, upload: Upload) -> bool:
        """Drop streams that are no longer ours; return whether the layout has changed."""
        for stream_log, fate in upload.layout.fates:
            if fate is Fate.UPLOAD and not self._owns_stream(stream_log.stream_id):
                logger.warning("stream is gone, dropping its records", extra={"stream": stream_log.stream_id})
                stream_log.fate = Fate.DROP
        return not upload.layout.is_current


class PreparedIds:
    """Reserved object ids and their age. Their TTL counts from before they were requested."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl_ms = ttl_ms
        self._at_hand: deque[tuple[int, float]] = deque()
        """Ids, and the times from which their TTL counts; the oldest first."""

    def missing(self, now: float) -> int:
        """Return how many ids to request for the next small uploads; drops those that are too old."""
        while self._at_hand and not self._is_fresh(self._at_hand[0][1], now):
            self._at_hand.popleft()
        return max(0, _RESERVED - len(self._at_hand))

    def add(self, first: int, count: int, since: float) -> None:
        """Add `count` ids from `first` on, requested at `since`."""
        self._at_hand.extend((first + number, since) for number in range(count))

    def take(self, count: int, now: float) -> tuple[int, float] | None:
        """Return a reserved id and the start of its TTL; None if `count` of them must be requested."""
        while count == 1 and self._at_hand:
            object_id, since = self._at_hand.popleft()
            if self._is_fresh(since, now):
                return object_id, since
        return None

    def stale_at(self, since: float) -> float:
        """Return the time from which an id requested at `since` is not committed any more."""
        return since + _TTL_SHARE * self.ttl_ms / 1000

    def _is_fresh(self, since: float, now: float) -> bool:
        return now < since + _RESERVED_SHARE * self.ttl_ms / 1000
