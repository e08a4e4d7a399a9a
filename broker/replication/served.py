"""`ServedFollower`: one follower's connection, as its master serves it.

`tidelog.storage.replication.sending.FollowerLink` decides what is next. It comes from the live tail, where the follower
keeps up; otherwise from the files, by the master's one reader at a time.

Entry: `ServedFollower`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidelog.broker.replication.connection import WalConnection
from tidelog.runtime.types import Buffer
from tidelog.storage.replication.configuration import WalReplica
from tidelog.storage.replication.frames import FollowerHello, Records, Welcome, trimmed_history
from tidelog.storage.replication.master import Master
from tidelog.storage.replication.sending import FollowerLink, LinkState, NextBatch
from tidelog.storage.wal.base import ReplicatedWal
from tidelog.storage.wal.live import LiveTail


class SourceOfBytes(NamedTuple):
    """A master's WAL and what is known of it."""

    wal: ReplicatedWal
    live: LiveTail
    core: Master

    @property
    def end_offset(self) -> int:
        """Return the end of what may be sent: what the disk was given."""
        return max(self.live.end_offset, self.wal.durable_offset)


class ServedFollower:
    """A follower, its connection, and what it is sent."""

    def __init__(
        self, source: SourceOfBytes, connection: WalConnection, link: FollowerLink, hello: FollowerHello
    ) -> None:
        self.connection = connection
        self.link = link
        self.replica = WalReplica(hello.broker_id, hello.wal_id)
        self.learner = hello.learner
        self.is_attached = False
        """Whether the core knows of this connection (`Master.attached`)."""
        self.is_reading = False
        """Whether a read of the files for it is wanted or under way."""
        self._told_confirm = -1
        """The confirm offset that it was told last."""
        self._source = source

    def welcome(self, now: float, hello: FollowerHello, committed_offset: int) -> None:
        """Answer HELLO. Raises `BadFrame`."""
        self.link.hello(hello, now)
        wal, core = self._source.wal, self._source.core
        epochs = trimmed_history(wal.epoch_history)
        bounds = (wal.start_offset, self._source.end_offset, core.confirm_offset, committed_offset)
        self.connection.send(Welcome(self.link.master_epoch, *bounds, epochs))
        self._told_confirm = core.confirm_offset

    def pump(self, now: float, committed_offset: int) -> bool:
        """Send what can be sent now; return whether the files have to be read for what is next."""
        wal, live, _ = self._source
        while self.connection.is_writable and not self.is_reading:
            batch = self.link.batch(wal.epoch_history, self._source.end_offset)
            if batch is None:
                self._note_sent(now)
                return False
            piece = live.take(batch.offset, batch.max_end)
            if piece is None:
                return batch.offset < wal.durable_offset
            self.send(batch, piece.end_offset, piece.buffers, now, committed_offset)
        return False

    def send(
        self, batch: NextBatch, end_offset: int, buffers: Sequence[Buffer], now: float, committed_offset: int
    ) -> None:
        """Send records of one epoch, from the start of `batch` to `end_offset`."""
        self._told_confirm = confirm = self._source.core.confirm_offset
        head = Records(self.link.master_epoch, batch.offset, batch.epoch, batch.epoch_start, confirm, committed_offset)
        self.connection.send_records(head, buffers, end_offset - batch.offset)
        self.link.sent(end_offset, now)
        self._note_sent(now)

    def heartbeat(self, now: float, committed_offset: int) -> None:
        """Show that the master lives, and up to where it has confirmed."""
        entry = self._source.wal.epoch_history.entry_at(max(0, self.link.next_offset - 1))
        epoch, start = entry if entry is not None else (self.link.master_epoch, self.link.next_offset)
        self._told_confirm = confirm = self._source.core.confirm_offset
        head = Records(self.link.master_epoch, self.link.next_offset, epoch, start, confirm, committed_offset)
        self.connection.send_records(head, (), 0)
        self.link.sent(self.link.next_offset, now)

    def tell_confirmed(self, now: float, committed_offset: int) -> None:
        """Tell up to where the master has confirmed, unless records that are still to be sent will."""
        if (
            self._told_confirm < self._source.core.confirm_offset
            and self.link.state is LinkState.TRANSFER
            and self.link.next_offset >= self._source.end_offset
            and self.connection.is_writable
        ):
            self.heartbeat(now, committed_offset)

    def _note_sent(self, now: float) -> None:
        """Tell the core that everything is on its way, if it is."""
        is_all = self.link.state is LinkState.TRANSFER and self.link.next_offset >= self._source.wal.end_offset
        if is_all and self.is_attached:
            self._source.core.sent(self.replica, now)
