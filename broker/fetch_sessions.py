"""Fetch sessions (KIP-227): a consumer of ten thousand idle partitions does not name them with each poll.

A session remembers for each partition what its client asked last and was told last. An incremental request names what
changed, and its response holds only partitions that have something new. Each partition of a session is in one of three
places at any time:

- *due*: there may be something to send, so the next request looks at it;
- *in flight*: the request that is being answered has taken it (`take`), and gives it back (`due_again` or `rest`);
- *resting*: nothing is there for it now. One listener on its log makes it due again, and is gone then, so that a
  session nobody uses costs an append nothing.

So the work of a poll is bounded by what happened since the one before, not by the size of the session.

Due partitions keep their order; those that have just sent records go behind the others, as in Kafka, or the first ones
could keep the rest from a response for ever.

Memory is bounded by the partitions in all sessions (`kafka.fetch_session_partitions`, about 1 KB each). A new session
that does not fit pushes out the ones not used for the longest time, if that is `EVICTABLE_AFTER_S`; otherwise it is
declined with session id 0, and its client names all partitions each time, as without sessions. Sessions live in one
broker's memory: after a restart clients get FETCH_SESSION_ID_NOT_FOUND and begin a new one. A request that is cancelled
before it ran leaves its session busy; it is pushed out like others.

No I/O and no clock in here: `now` is monotonic seconds. `FetchSessions.begin` is the entry.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from broker.errors import FETCH_SESSION_ID_NOT_FOUND, FETCH_SESSION_TOPIC_ID_ERROR, INVALID_FETCH_SESSION_EPOCH
from broker.wire.fetch import FetchPartition, FetchRequest, FetchTopic

if TYPE_CHECKING:
    from stream.partition_log import PartitionLog

FULL_EPOCH: Final = 0
"""Of a request that names all its partitions and asks for a new session."""
FINAL_EPOCH: Final = -1
"""Of one that names them and wants none; it ends the session that it names."""
MAX_EPOCH: Final = (1 << 31) - 1
EVICTABLE_AFTER_S: Final = 120.0
"""A session used since then stays (Kafka's value)."""

Key = tuple[str | bytes, int]
"""Topic name, or topic id (16 bytes) from Fetch v13, and partition index."""
Told = tuple[int, int, int]
"""High watermark, last stable offset, log start offset."""


class SessionError(Exception):
    """The request does not fit the session it names; `code` is Kafka's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"fetch session error {code}")
        self.code = code


class SessionPartition:
    """What a session remembers of one partition."""

    __slots__ = ("forgotten", "key", "log", "session", "spec", "told", "topic", "unlisten")

    def __init__(self, session: FetchSession, key: Key, topic: FetchTopic, spec: FetchPartition) -> None:
        self.session = session
        self.key = key
        self.topic = topic
        """Its name or id; the partitions in there are of the request that it came with."""
        self.spec = spec
        self.told: Told | None = None
        self.log: PartitionLog | None = None
        """Only while it rests."""
        self.unlisten: Callable[[], None] | None = None
        self.forgotten = False

    def moved(self) -> None:
        """The log's listener: there may be something now."""
        self.session.due_again(self)
        if self.session.heard is not None:
            self.session.heard()

    def stop_listening(self) -> None:
        """Leave the log, if it rests."""
        if self.unlisten is not None:
            self.unlisten()
            self.unlisten = self.log = None


class FetchSession:
    """One client's session. At most one request uses it at a time (`busy`)."""

    def __init__(self, session_id: int, now: float, *, by_id: bool) -> None:
        self.id = session_id
        self.by_id = by_id
        self.epoch = FULL_EPOCH
        """Of the request that is being answered, or was last."""
        self.used_at = now
        self.busy = False
        self.partitions: dict[Key, SessionPartition] = {}
        self.heard: Callable[[], None] | None = None
        """Called, on the loop, when a resting partition becomes due."""
        self._due: dict[SessionPartition, None] = {}

    def __len__(self) -> int:
        return len(self.partitions)

    @property
    def incremental(self) -> bool:
        """Whether the request that is being answered wants only what is new."""
        return self.epoch != FULL_EPOCH

    def apply(self, request: FetchRequest) -> None:
        """Take over what the request names, then what it forgets."""
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

    def take(self) -> list[SessionPartition]:
        """All that are due, in order. Each must come back by `due_again` or `rest`."""
        taken = list(self._due)
        self._due.clear()
        return taken

    def due_again(self, partition: SessionPartition) -> None:
        """The next look is to include this one; behind the others, unless it is due already."""
        if not partition.forgotten:
            partition.stop_listening()
            self._due[partition] = None

    def rest(self, partition: SessionPartition, log: PartitionLog) -> None:
        """Nothing is there for this one until its log moves or closes."""
        if partition.forgotten:
            return
        assert partition.unlisten is None and partition not in self._due
        partition.log = log
        partition.unlisten = log.add_watermark_listener(partition.moved)

    def close(self) -> None:
        """Leave all logs. Nothing of it may be used afterwards."""
        self.heard = None
        self._due.clear()
        for partition in self.partitions.values():
            partition.forgotten = True
            partition.stop_listening()
        self.partitions.clear()


class FetchSessions:
    """All sessions of a broker, those used longest ago first."""

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
        """Sessions, partitions in them, and sessions that had to make room since the start."""
        return len(self._sessions), self._partitions - len(self._sessions), self._evicted

    def begin(self, request: FetchRequest, now: float, *, by_id: bool) -> FetchSession | None:
        """The session of this request, made busy, with what the request changes; None: answer it without one.

        Raises `SessionError` if the request names a session or an epoch that is not there. Give back what this returns
        by `end`.
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
        """The request is over. Without an answer nobody knows what the client knows: the session is dropped."""
        session.busy = False
        session.heard = None
        if not answered:
            self.drop(session)

    def drop(self, session: FetchSession) -> None:
        """Forget the session, and be it busy; its client begins a new one."""
        if self._sessions.pop(session.id, None) is not None:
            self._partitions -= len(session) + 1
            session.close()

    def _create(self, request: FetchRequest, now: float, *, by_id: bool) -> FetchSession | None:
        count = sum(len(topic.partitions) for topic in request.topics)
        if count == 0 or not self._make_room(count + 1, now):
            return None
        session = FetchSession(self._new_id(), now, by_id=by_id)
        session.apply(request)
        if len(session) != count:  # a partition named twice: an error of the request, which is answered as without
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
        """Whether `more` partitions fit, after sessions that nobody uses made room."""
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


def _after(epoch: int) -> int:
    """The epoch of the next request (KIP-227): after the largest one comes 1."""
    return 1 if epoch == MAX_EPOCH else epoch + 1
