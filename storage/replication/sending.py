"""`FollowerLink`: one follower's connection, as its master sees it. Sans-IO: what to send next, and when to hang up.

States (RIP-44): READY, a connection without a word; HANDSHAKE, the WELCOME is sent and the follower cuts its WAL;
TRANSFER, records and acknowledgements; SHUTDOWN. A frame that does not belong to the state ends the connection.

Rules:
- The first ACK after a WELCOME says where the follower's WAL ends. It comes at once, also when there is nothing to
  send (A7), and transfer starts there (A8).
- A batch has records of one master epoch only (A6), and at most `batch_bytes`, but at least one record.
- Not more than `window_bytes` are on their way beyond the last acknowledgement, so a slow follower costs the master
  bounded memory (rule 12).
- After `heartbeat_s` without anything to send a heartbeat is sent; after `silence_s` without a frame from the follower
  the connection is given up (A9).

Entry: `FollowerLink`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum

from tidelog.storage.replication.frames import Ack, BadFrame, FollowerHello
from tidelog.storage.wal.epochs import EpochHistory


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Bounds and intervals of a connection."""

    batch_bytes: int = 1 << 20
    window_bytes: int = 16 << 20
    heartbeat_s: float = 5.0
    silence_s: float = 20.0


class LinkState(Enum):
    """State of a connection at the master."""

    READY = 0
    HANDSHAKE = 1
    TRANSFER = 2
    SHUTDOWN = 4


@dataclass(frozen=True, slots=True)
class NextBatch:
    """Which part of the WAL to send next."""

    offset: int
    epoch: int
    epoch_start: int
    max_end: int
    """Send whole records up to here; the first record even if it is larger than a batch, but never past the epoch."""
    epoch_end: int
    """WAL offset at which the epoch ends, or the end of the WAL."""


class FollowerLink:
    """The sending side of one connection, for one master epoch."""

    def __init__(self, master_epoch: int, settings: LinkSettings, now: float) -> None:
        self.master_epoch = master_epoch
        self.state = LinkState.READY
        self.next_offset = -1
        """WAL offset of the next byte to send; -1 before the first ACK."""
        self.acked_offset = -1
        self._settings = settings
        self._heard_at = self._sent_at = now

    # --- events --------------------------------------------------------------------------------------------------

    def hello(self, hello: FollowerHello, now: float) -> None:
        """The follower has introduced itself: send a WELCOME. Raises `BadFrame`."""
        if self.state is not LinkState.READY:
            raise BadFrame(f"broker {hello.broker_id} sent HELLO in the state {self.state.name}")
        self.state = LinkState.HANDSHAKE
        self._heard_at = self._sent_at = now

    def new_epoch(self, master_epoch: int, now: float) -> bool:
        """The same master has a newer epoch (A3); return whether to send another WELCOME on this connection."""
        assert master_epoch > self.master_epoch
        self.master_epoch = master_epoch
        if self.state is not LinkState.TRANSFER:
            return self.state is LinkState.HANDSHAKE
        self.state = LinkState.HANDSHAKE
        self._sent_at = now
        return True

    def acked(self, ack: Ack, now: float, *, start_offset: int, end_offset: int) -> bool:
        """Note an acknowledgement; return whether it ends a handshake (`Master.attached`; otherwise `acknowledged`).

        `start_offset` and `end_offset` are the bounds of the master's WAL. An ACK of an earlier epoch of this master
        is ignored while a handshake is in progress. Raises `BadFrame` for offsets that were never sent.
        """
        self._heard_at = now
        if self.state is LinkState.HANDSHAKE:
            if ack.master_epoch != self.master_epoch:
                return False
            if not start_offset <= ack.end_offset <= end_offset:
                raise BadFrame(
                    f"a follower begins at {ack.end_offset}; this WAL has [{start_offset}, {end_offset})",
                    hint="the master may have trimmed its WAL meanwhile; the follower connects again",
                )
            self.state = LinkState.TRANSFER
            self.next_offset = self.acked_offset = ack.end_offset
            return True
        if self.state is not LinkState.TRANSFER:
            raise BadFrame(f"ACK in the state {self.state.name}")
        if ack.master_epoch != self.master_epoch or not self.acked_offset <= ack.end_offset <= self.next_offset:
            raise BadFrame(
                f"ACK of {ack.end_offset} in epoch {ack.master_epoch}; {self.acked_offset} was acknowledged and"
                f" {self.next_offset} sent in epoch {self.master_epoch}"
            )
        self.acked_offset = ack.end_offset
        return False

    def sent(self, end_offset: int, now: float) -> None:
        """Records up to `end_offset` were handed to the socket, or a heartbeat was (then it is `next_offset`)."""
        assert end_offset >= self.next_offset
        self.next_offset = end_offset
        self._sent_at = now

    def shut_down(self) -> None:
        """The connection is over."""
        self.state = LinkState.SHUTDOWN

    # --- decisions -----------------------------------------------------------------------------------------------

    def batch(self, history: EpochHistory, end_offset: int) -> NextBatch | None:
        """Return what to send next of a WAL that ends at `end_offset`; None: nothing, or the window is full."""
        if self.state is not LinkState.TRANSFER or self.next_offset >= end_offset:
            return None
        room = self.acked_offset + self._settings.window_bytes - self.next_offset
        if room <= 0:
            return None
        entries = history.entries
        index = bisect_right(entries, self.next_offset, key=lambda entry: entry.start_offset) - 1
        assert index >= 0, f"no epoch is known at {self.next_offset}: {history}"
        epoch_end = min(end_offset, entries[index + 1].start_offset) if index + 1 < len(entries) else end_offset
        wanted = self.next_offset + min(self._settings.batch_bytes, room)
        return NextBatch(self.next_offset, *entries[index], min(epoch_end, wanted), epoch_end)

    def heartbeat_due(self, now: float) -> bool:
        """Return whether the follower should hear that the master lives."""
        return self.state is LinkState.TRANSFER and now - self._sent_at >= self._settings.heartbeat_s

    def is_silent(self, now: float) -> bool:
        """Return whether nothing was heard for so long that the connection is given up."""
        return now - self._heard_at > self._settings.silence_s
