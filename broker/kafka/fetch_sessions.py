"""Fetch sessions (KIP-227): a consumer of ten thousand idle partitions does not list them in each poll.

A session stores for each partition its last request parameters and its last returned offsets. An incremental request
lists only changes, and its response contains only partitions with new data. Each partition of a session is in one of
three states:

- *due*: there may be new data, so the next request checks it;
- *in flight*: the current request has taken it (`take`), and returns it (`due_again` or `rest`);
- *resting*: there is no new data. A one-shot listener on its log makes it due again, so that an unused session costs an
  append nothing.

So the work of a poll is proportional to the changes since the last poll, not to the size of the session.

Due partitions keep their order; partitions that have just returned records move to the end, as in Kafka, or else the
first ones could starve the others.

Memory is bounded by the partitions in all sessions (`kafka.fetch_session_partitions`, about 1 KB each). A new session
that does not fit evicts the least recently used ones, if unused for `EVICTABLE_AFTER_S`; otherwise it is declined with
session id 0, and its client lists all partitions in each request, as without sessions. Sessions are in the memory of
one broker: after a restart clients get FETCH_SESSION_ID_NOT_FOUND and create a new one. A request that is cancelled
before it ran leaves its session busy; it is evicted like others.

Sans-I/O: `now` is monotonic seconds. Entry: `FetchSessions.begin`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, KeysView
from typing import TYPE_CHECKING, Final

from tidelog.broker.kafka.errors import (
    FETCH_SESSION_ID_NOT_FOUND,
    FETCH_SESSION_TOPIC_ID_ERROR,
    INVALID_FETCH_SESSION_EPOCH,
)
from tidelog.broker.kafka.wire.fetch import FetchPartition, FetchRequest, FetchTopic
from tidelog.controller.model.records import MAX_TOPIC_CHARS

if TYPE_CHECKING:
    from tidelog.broker.partitions.read_replicas import FollowedLog
    from tidelog.stream.partition_log import PartitionLog

FULL_EPOCH: Final = 0
"""Epoch of a request that lists all its partitions and requests a new session."""
FINAL_EPOCH: Final = -1
"""Epoch of a request without a session; it closes the session with the given id."""
MAX_EPOCH: Final = (1 << 31) - 1
EVICTABLE_AFTER_S: Final = 120.0
"""A session used more recently is not evicted (Kafka's value)."""

SessionKey = tuple[str | bytes, int]
"""Topic name, or topic id (16 bytes) from Fetch v13, and partition index."""
Told = tuple[int, int, int]
"""High watermark, last stable offset, log start offset."""


class SessionError(Exception):
    """The request does not match its session; `code` is Kafka's error code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"fetch session error {code}")
        self.code = code


class SessionPartition:
    """The state of one partition in a session."""

    __slots__ = ("forgotten", "key", "log", "session", "spec", "told", "topic", "unlisten")

    def __init__(self, session: FetchSession, key: SessionKey, topic: FetchTopic, spec: FetchPartition) -> None:
        self.session = session
        self.key = key
        self.topic = topic
        """Its topic; the partitions in it are those of the request that added it."""
        self.spec = spec
        self.told: Told | None = None
        self.log: PartitionLog | FollowedLog | None = None
        """Set only while resting."""
        self.unlisten: Callable[[], None] | None = None
        self.forgotten = False

    def moved(self) -> None:
        """Listener of the log: there may be new data."""
        self.session.due_again(self)
        if self.session.heard is not None:
            self.session.heard()

    def stop_listening(self) -> None:
        """Remove the listener, if resting."""
        if self.unlisten is not None:
            self.unlisten()
            self.unlisten = self.log = None


class FetchSession:
    """One client's session. At most one request uses it at a time (`busy`)."""

    def __init__(self, session_id: int, now: float, *, by_id: bool) -> None:
        self.id = session_id
        self.by_id = by_id
        self.epoch = FULL_EPOCH
        """Epoch of the current or last request."""
        self.used_at = now
        self.busy = False
        self.partitions: dict[SessionKey, SessionPartition] = {}
        self.heard: Callable[[], None] | None = None
        """Called on the event loop when a resting partition becomes due."""
        self._due: dict[SessionPartition, None] = {}

    def __len__(self) -> int:
        return len(self.partitions)

    @property
    def incremental(self) -> bool:
        """Whether the current request is incremental."""
        return self.epoch != FULL_EPOCH

    def apply(self, request: FetchRequest) -> None:
        """Apply the partitions that the request adds, then those that it removes."""
        assert not self.busy
        for topic in request.topics:
            name = topic.topic_id if self.by_id else topic.name
            head = FetchTopic(topic.name, topic.topic_id, [])
            for spec in topic.partitions:
                key = (name, spec.partition)
                known = self.partitions.get(key)
                if known is None:
                    known = self.partitions[key] = SessionPartition(self, key, head, spec)
                else:
                    known.spec = spec
                self.due_again(known)
        for forgotten in request.forgotten_topics:
            name = forgotten.topic_id if self.by_id else forgotten.name
            for index in forgotten.partitions:
                gone = self.partitions.pop((name, index), None)
                if gone is not None:
                    gone.forgotten = True
                    gone.stop_listening()
                    self._due.pop(gone, None)

    @property
    def due(self) -> KeysView[SessionPartition]:
        """The due partitions in order; a view that changes with them."""
        return self._due.keys()

    def take(self) -> list[SessionPartition]:
        """Return all due partitions in order. Each must be returned by `due_again` or `rest`."""
        taken = list(self._due)
        self._due.clear()
        return taken

    def due_again(self, partition: SessionPartition) -> None:
        """Make the partition due for the next request, at the end of the queue unless it is already due."""
        if not partition.forgotten:
            partition.stop_listening()
            self._due[partition] = None

    def rest(self, partition: SessionPartition, log: PartitionLog | FollowedLog) -> None:
        """Let the partition rest until its log changes or closes."""
        if partition.forgotten:
            return
        assert partition.unlisten is None and partition not in self._due
        partition.log = log
        partition.unlisten = log.add_watermark_listener(partition.moved)

    def close(self) -> None:
        """Remove all listeners. The session must not be used afterwards."""
        self.heard = None
        self._due.clear()
        for partition in self.partitions.values():
            partition.forgotten = True
            partition.stop_listening()
        self.partitions.clear()


class FetchSessions:
    """All sessions of a broker, least recently used first."""

    def __init__(self, max_partitions: int, ids: random.Random) -> None:
        """`max_partitions` (0: no sessions) bounds the partitions of all sessions together."""
        self._max_partitions = max_partitions
        self._ids = ids
        self._sessions: dict[int, FetchSession] = {}
        self._partitions = 0
        self._evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def figures(self) -> tuple[int, int, int]:
        """Sessions, partitions in them, and sessions evicted since the start."""
        return len(self._sessions), self._partitions - len(self._sessions), self._evicted

    def begin(self, request: FetchRequest, now: float, *, by_id: bool) -> FetchSession | None:
        """Return the session of this request, busy and with the request's changes; None: answer without a session.

        Raises `SessionError` for an unknown session or a wrong epoch. Release the session with `end`.
        """
        session_id, epoch = request.session_id, request.session_epoch
        if epoch in (FULL_EPOCH, FINAL_EPOCH):
            old = self._sessions.get(session_id)
            if old is not None:
                self.drop(old)
            return self._create(request, now, by_id=by_id) if epoch == FULL_EPOCH else None
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionError(FETCH_SESSION_ID_NOT_FOUND if session_id else INVALID_FETCH_SESSION_EPOCH)
        if session.busy or epoch != _after(session.epoch):
            raise SessionError(INVALID_FETCH_SESSION_EPOCH)
        if session.by_id != by_id:
            raise SessionError(FETCH_SESSION_TOPIC_ID_ERROR)
        if _has_long_name(request):
            self.drop(session)
            raise SessionError(FETCH_SESSION_ID_NOT_FOUND)
        before = len(session)
        session.apply(request)
        self._partitions += len(session) - before
        session.epoch = epoch
        self._use(session, now)
        if self._partitions > self._max_partitions and not self._make_room(0, now):
            self.drop(session)
            raise SessionError(FETCH_SESSION_ID_NOT_FOUND)
        return session

    def end(self, session: FetchSession, *, answered: bool) -> None:
        """Release the session. Without a response the client's state is unknown: the session is dropped."""
        session.busy = False
        session.heard = None
        if not answered:
            self.drop(session)

    def drop(self, session: FetchSession) -> None:
        """Remove the session, even if busy; its client creates a new one."""
        if self._sessions.pop(session.id, None) is not None:
            self._partitions -= len(session) + 1
            session.close()

    def _create(self, request: FetchRequest, now: float, *, by_id: bool) -> FetchSession | None:
        count = sum(len(topic.partitions) for topic in request.topics)
        if count == 0 or _has_long_name(request) or not self._make_room(count + 1, now):
            return None
        session = FetchSession(self._new_id(), now, by_id=by_id)
        session.apply(request)
        if len(session) != count:  # a partition is listed twice: a client error, answered as without a session
            session.close()
            return None
        self._sessions[session.id] = session
        self._partitions += count + 1
        self._use(session, now)
        return session

    def _use(self, session: FetchSession, now: float) -> None:
        session.used_at = now
        session.busy = True
        self._sessions[session.id] = self._sessions.pop(session.id)

    def _make_room(self, more: int, now: float) -> bool:
        """Evict unused sessions as needed; return whether `more` partitions fit."""
        if more > self._max_partitions:
            return False
        while self._partitions + more > self._max_partitions:
            oldest = next(iter(self._sessions.values()), None)
            if oldest is None or now - oldest.used_at < EVICTABLE_AFTER_S:
                return False
            self.drop(oldest)
            self._evicted += 1
        return True

    def _new_id(self) -> int:
        while (session_id := self._ids.randint(1, MAX_EPOCH)) in self._sessions:
            pass
        return session_id


def _has_long_name(request: FetchRequest) -> bool:
    """Whether a name is none of a topic: sessions, which count partitions alone, keep none of megabytes."""
    return any(len(topic.name) > MAX_TOPIC_CHARS for topic in request.topics)


def _after(epoch: int) -> int:
    """The epoch of the next request (KIP-227): the largest one is followed by 1."""
    return 1 if epoch == MAX_EPOCH else epoch + 1
