"""The bounds that all connections of a listener share: how many there are, and the memory they may hold.

A stranger decides what is announced, what is sent and what is read, so each is bounded by what it costs here:

- `Seats`: connections, in all and from one address.
- `ByteBudget`: requests, from their first byte until they are answered. A frame costs what has been received of it, not
  what it announces: its buffer grows as it fills, doubling each time from a first step, which is smaller when much is
  being received. What is still being received may fill half of the budget, so that whole requests always find room.
  Frames that fill a bound together would wait for each other for ever: one of them at a time may go over it, over the
  whole budget's only while nothing else is in it. So memory stays under the bound plus one largest request, and
  something always moves.
- `UnreadOutput`: responses of clients that do not read. At the bound no Fetch starts, and clients that took nothing
  for a while are dropped; at twice the bound those who took nothing the longest are, at once.

Sans-IO: an owner is anything hashable. Entry: the three classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

FIRST_STEP_BYTES = 64 << 10
"""First buffer of a large frame when memory is scarce: 4,096 connections that announce much hold 256 MiB with it."""
EAGER_BYTES = 2 << 20
"""First buffer otherwise: most requests whole. Not more: a fresh buffer is zeroed, so a hostile client that announces
100 MiB a hundred times a second, and sends four bytes each time, would keep the loop busy with it."""
_EAGER_SHARE = 4
"""First buffers are `EAGER_BYTES` while all that is being received stays under limit / 4."""
_RECEIVING_SHARE = 2
STALL_S = 10.0
"""A client that takes no byte for so long is dropped first when unread output is at its bound."""


class Seats:
    """Connections in all and by address."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._by_address: dict[str, int] = {}
        self.taken = 0

    def take(self, address: str) -> str | None:
        """Seat one more, or name the bound that it meets (`connections`, `connections_per_address`)."""
        if self.taken >= self._limit:
            return "connections"
        count = self._by_address.get(address, 0)
        if count >= self._limit_per_address:
            return "connections_per_address"
        self._by_address[address] = count + 1
        self.taken += 1
        return None

    def leave(self, address: str) -> None:
        """Give a seat back."""
        self.taken -= 1
        count = self._by_address.pop(address) - 1
        assert self.taken >= 0 and count >= 0
        if count:
            self._by_address[address] = count


class ByteBudget:
    """Bytes of requests that are being received or handled, and the connections that wait for some to be done."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._overdrawn: Hashable | None = None
        self.used = 0
        self.receiving = 0
        """The part of `used` that is buffers of incomplete frames."""

    @property
    def full(self) -> bool:
        """Nothing more should be read before something is given back."""
        return self.used >= self._limit

    def grant(self, owner: Hashable, capacity: int, filled: int, size: int) -> int:
        """How large the buffer of `owner`'s frame of `size` bytes may be now, of which `filled` bytes have arrived.

        It is `capacity` now (0: none yet). Unchanged: not now, `wait`.
        """
        assert capacity <= filled < size and capacity in (0, filled), (capacity, filled, size)
        eager = min(size, EAGER_BYTES)
        if capacity or self.receiving + eager > self._limit // _EAGER_SHARE or eager <= filled:
            eager = FIRST_STEP_BYTES
        wanted = min(size, max(2 * filled, eager))
        more = wanted - capacity
        fits = self.used + more <= self._limit
        if not fits or self.receiving + more > self._limit // _RECEIVING_SHARE:
            may_overdraw = self._overdrawn is None and (fits or self.used == self.receiving)
            if self._overdrawn != owner and not may_overdraw:
                return capacity
            self._overdrawn = owner
        self.used += more
        self.receiving += more
        return wanted

    def received(self, capacity: int) -> None:
        """A frame is complete: its buffer is a request now."""
        self.receiving -= capacity
        assert self.receiving >= 0
        if self._waiting or self._overdrawn is not None:
            self._settle()

    def take(self, size: int) -> None:
        """Take bytes that are in memory already: at most one read of each connection goes over the bound like this."""
        self.used += size

    def release(self, size: int) -> None:
        """Give bytes back and, once there is room, wake who waits, in order."""
        self.used -= size
        assert self.used >= 0
        if self._waiting or self._overdrawn is not None:
            self._settle()

    def _settle(self) -> None:
        if self.used <= self._limit and self.receiving <= self._limit // _RECEIVING_SHARE:
            self._overdrawn = None
        if self.full or not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for wake in waiting.values():  # who finds no room waits again, in the same order
            wake()

    def wait(self, owner: Hashable, wake: Callable[[], None]) -> None:
        """Call `wake` once, when bytes were given back."""
        self._waiting[owner] = wake

    def leave(self, owner: Hashable, capacity: int, held: int) -> None:
        """`owner` is gone: give back the buffer of its incomplete frame and the `held` bytes of its requests."""
        self._waiting.pop(owner, None)
        self.receiving -= capacity
        self.release(capacity + held)


class Reader(Hashable, Protocol):
    """A client that reads its responses, or does not."""

    def unread_bytes(self) -> int:
        """Output that it has not taken yet, and a note of the time if that has changed."""
        ...

    @property
    def last_active(self) -> float:
        """When it last took or sent a byte, in monotonic seconds."""
        ...

    def drop_slow_reader(self) -> None:
        """End it now."""
        ...


class UnreadOutput:
    """Output of the clients that are behind (over their transport's high-water mark)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._behind: dict[Reader, int] = {}
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self.used = 0

    @property
    def full(self) -> bool:
        """No further response should be made that may be large."""
        return self.used >= self._limit

    def note(self, reader: Reader, now: float) -> None:
        """`reader` is behind, or got more output while it is. At the bound, drops who does not read."""
        self._update(reader)
        if self.used >= self._limit:
            self.sweep(now)

    def _update(self, reader: Reader) -> None:
        size = reader.unread_bytes()
        self.used += size - self._behind.get(reader, 0)
        self._behind[reader] = size

    def forget(self, reader: Reader) -> None:
        """`reader` has caught up, or is gone."""
        self._waiting.pop(reader, None)
        self.used -= self._behind.pop(reader, 0)
        self._wake()

    def sweep(self, now: float) -> None:
        """Look again at all who are behind, and keep to the bounds. Called every few seconds, too."""
        for reader in self._behind:
            self._update(reader)
        if self.used >= self._limit:
            for reader in sorted(self._behind, key=lambda reader: reader.last_active):
                stalled = now - reader.last_active >= STALL_S
                if self.used < self._limit or (not stalled and self.used < 2 * self._limit):
                    break
                self.used -= self._behind.pop(reader)
                reader.drop_slow_reader()
        self._wake()

    def _wake(self) -> None:
        if self.full or not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        for wake in waiting.values():
            wake()

    def wait(self, owner: Hashable, wake: Callable[[], None]) -> None:
        """Call `wake` once, when there is room again."""
        self._waiting[owner] = wake
