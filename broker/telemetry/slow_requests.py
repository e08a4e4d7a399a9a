"""The slowest requests of the last hour, with what they spent their time on (docs/design/0029-explain.md). Sans-IO.

For each minute and API the slowest few are kept. Who serves a request compares its duration with `floors[API key]`,
and offers it only if it is longer, or a new minute has begun: nothing else happens for a request that is not among the
slowest. Durations are differences of the monotonic clock. What a client asked to wait for (a long poll) does not
count.

Invariants: of each minute at most `PER_MINUTE` are kept; the slowest of a minute is always; as long as the minute has
room, so are the slowest `kept` of each API.

Entry: `SlowRequests`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from tidelog.controller.model.records import MAX_TOPIC_CHARS

MINUTE_S = 60.0
MINUTES = 60
PER_MINUTE = 120
"""Requests that are kept of a minute, of all APIs: 15 APIs have room for 8 each. 7,200 in an hour."""
ENTRY_BYTES = 900
"""What one takes at most, its names included: 6.5 MB in an hour in which each minute had slow requests of 15 APIs."""
MAX_NAME = 64
"""Characters of a client's id that are kept."""
API_KEYS = 128
_NO_FLOOR = -1.0

STAGES = ("queue", "check", "append", "room", "sync", "replication", "read", "handler", "response")
"""What a request spends its time on, in the order in which it happens. docs/operations.md says what each is."""


class Stages(NamedTuple):
    """Seconds of each stage; 0 for those that a request does not have."""

    queue: float = 0.0
    """From its last byte to its start: behind earlier requests of its connection."""
    check: float = 0.0
    """CRC and other checks of batches of 16 KiB and more, and their recompression."""
    append: float = 0.0
    """Decoding, and the append to the log, with the checks of smaller batches."""
    room: float = 0.0
    """The write-ahead log or the log cache was full, the partition was opening, or a coordinator was asked."""
    sync: float = 0.0
    """Until this broker's write-ahead log had it, durably."""
    replication: float = 0.0
    """After that, until the quorum had it."""
    read: float = 0.0
    """Reads from the bucket."""
    handler: float = 0.0
    """All other work on it."""
    response: float = 0.0
    """From the answer to the socket: encoding, and earlier responses of its connection."""


class SlowRequest(NamedTuple):
    """One request."""

    duration_s: float
    """From its last byte to its response in the socket, without what the client asked to wait for."""
    api_key: int
    ended_ms: int
    """Wall clock."""
    stages: Stages
    waited_s: float
    """What the client asked to wait for data (`fetch.max.wait.ms`)."""
    client_id: str
    client_host: str
    topic: str
    """Of the first partition; empty: it has none, or that is not known."""
    partition: int
    partitions: int
    """How many it had."""
    bytes_in: int
    bytes_out: int
    error_code: int
    """Kafka error code of its first partition that failed; -1: it was not answered."""


class Timing(NamedTuple):
    """What a handler has measured of its request; the connection adds the stages around it."""

    stages: Stages
    answered_at: float
    """Monotonic seconds of the answer; 0: when the handler ended."""
    waited_s: float
    topic: str
    partition: int
    partitions: int
    error_code: int


NOT_MEASURED = Timing(Stages(), 0.0, 0.0, "", -1, 0, 0)


class Moments(NamedTuple):
    """When a request did what, in monotonic seconds."""

    arrived: float
    """Its last byte."""
    started: float
    handled: float
    """Its handler returned: with an answer, or one to come; 0: it has none, or failed."""
    answered: float
    """Its handler ended, if that was later; else 0."""
    written: float


class Sender(NamedTuple):
    """Whose request it is, and its size."""

    api_key: int
    client_id: str | None
    client_host: str
    bytes_in: int
    bytes_out: int
    is_answered: bool


def describe(moments: Moments, timing: Timing, sender: Sender, ended_ms: int) -> SlowRequest:
    """Put together what is known of a request. What no stage accounts for is the handler's."""
    arrived, started, handled, answered, written = moments
    answered = timing.answered_at or answered or handled or started
    duration_s = max(written - arrived - timing.waited_s, 0.0)
    queue, response = max(started - arrived, 0.0), max(written - answered, 0.0)
    rest = max(duration_s - queue - response - sum(timing.stages), 0.0)
    return SlowRequest(
        duration_s,
        sender.api_key,
        ended_ms,
        timing.stages._replace(queue=queue, response=response, handler=rest),
        timing.waited_s,
        (sender.client_id or "")[:MAX_NAME],
        sender.client_host,
        timing.topic[:MAX_TOPIC_CHARS],
        timing.partition,
        timing.partitions,
        sender.bytes_in,
        sender.bytes_out,
        timing.error_code if sender.is_answered else -1,
    )


class _Minute:
    """The slowest requests of one minute: for each API a heap, the quickest on top."""

    __slots__ = ("began_s", "count", "heaps")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.count = 0
        self.heaps: dict[int, list[tuple[float, int, SlowRequest]]] = {}

    def all(self) -> Iterable[SlowRequest]:
        return (one for heap in self.heaps.values() for _, _, one in heap)


class SlowRequests:
    """The recorder of one broker. All methods are called on the event loop's thread."""

    def __init__(self, kept: int) -> None:
        """`kept`: how many of each API are kept of a minute, at least 1."""
        assert kept > 0
        self.kept = kept
        self.floors = [_NO_FLOOR] * API_KEYS
        """By API key: a request that took no longer need not be offered in this minute."""
        self.minute_end_s = -math.inf
        """Monotonic seconds from which on every request is to be offered, as a new minute has begun."""
        self._minutes: deque[_Minute] = deque(maxlen=MINUTES)
        self._offered = 0
        self.recorded = 0
        """How many were taken, of which most were displaced later; the rate says what the recorder costs."""

    def offer(self, request: SlowRequest, now_s: float) -> bool:
        """Keep a request that ended now, if it is among the slowest of this minute; return whether it is."""
        if now_s >= self.minute_end_s:
            self._begin_minute(now_s)
        minute = self._minutes[-1]
        heap = minute.heaps.get(request.api_key)
        if heap is None:
            heap = minute.heaps[request.api_key] = []
        if len(heap) >= self.kept:
            if request.duration_s <= heap[0][0]:
                return False
            heapq.heappop(heap)
        elif minute.count >= PER_MINUTE:
            victim = min((each for each in minute.heaps.values() if each), key=lambda each: each[0][0])
            if request.duration_s <= victim[0][0]:
                return False
            heapq.heappop(victim)
        else:
            minute.count += 1
        self._offered += 1
        self.recorded += 1
        heapq.heappush(heap, (request.duration_s, self._offered, request))
        if len(heap) >= self.kept:
            self.floors[request.api_key & (API_KEYS - 1)] = heap[0][0]
        return True

    def _begin_minute(self, now_s: float) -> None:
        self.forget_old(now_s)
        self._minutes.append(_Minute(now_s))
        self.minute_end_s = now_s + MINUTE_S
        self.floors[:] = [_NO_FLOOR] * API_KEYS

    def forget_old(self, now_s: float) -> None:
        """Drop the minutes that began more than an hour ago."""
        while self._minutes and self._minutes[0].began_s < now_s - MINUTES * MINUTE_S:
            self._minutes.popleft()

    def slowest(
        self, now_s: float, limit: int, api_key: int | None = None, topic: str | None = None
    ) -> list[SlowRequest]:
        """Return the slowest requests of the last hour, slowest first: `limit` of each API, or of one; with a topic,
        of those whose first partition is of it."""
        self.forget_old(now_s)
        by_api: dict[int, list[SlowRequest]] = {}
        for minute in self._minutes:
            for one in minute.all():
                if api_key in (None, one.api_key) and topic in (None, one.topic):
                    by_api.setdefault(one.api_key, []).append(one)
        found: list[SlowRequest] = []
        for requests in by_api.values():
            found += heapq.nlargest(limit, requests)
        return sorted(found, reverse=True)

    def __len__(self) -> int:
        """Return how many are kept."""
        return sum(minute.count for minute in self._minutes)
