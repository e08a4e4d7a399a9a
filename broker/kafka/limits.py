"""The admission limits shared by all connections of a listener: number of connections, and their memory.

A client decides what is announced, sent and read, so each is bounded by its cost in the broker:

- `Seats`: connections, in total and per address.
- `ByteBudget`: requests, from their first byte until they are answered. A frame costs the bytes received of it, not its
  announced size: its buffer grows as it fills, doubling from a first step, which is smaller when much is being
  received. Incomplete frames may fill half of the budget, so that complete requests always find room. Frames that fill
  a bound together would deadlock: one of them at a time may exceed it, and may exceed the whole budget only while
  nothing else is in it. So memory stays under the bound plus one largest request, and there is always progress.
- `UnreadOutput`: responses of clients that do not read. At the bound no Fetch starts, and clients that have read
  nothing for a while are disconnected; at twice the bound those idle the longest are disconnected immediately.

Sans-I/O: an owner is any hashable object. Entry: the three classes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

FIRST_STEP_BYTES = 64 << 10
"""First buffer of a large frame when memory is scarce: 4,096 connections with large frames then hold 256 MiB."""
EAGER_BYTES = 2 << 20
"""First buffer otherwise: fits most requests. Not larger: a new buffer is zeroed, so a hostile client that announces
100 MiB a hundred times per second, and sends four bytes each time, would keep the event loop busy."""
_EAGER_SHARE = 4
"""First buffers are `EAGER_BYTES` while all incomplete frames together stay under limit / 4."""
_RECEIVING_SHARE = 2
STALL_S = 10.0
"""A client that reads no byte for this time is disconnected first when unread output is at its bound."""


class Seats:
    """Connections in total and by address."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._by_address: dict[str, int] = {}
        self.taken = 0

    @property
    def addresses(self) -> int:
        """Number of addresses with connections."""
        return len(self._by_address)

    def take(self, address: str) -> str | None:
        """Admit a connection, or return the bound that is reached (`connections`, `connections_per_address`)."""
        if self.taken >= self._limit:
            return "connections"
        count = self._by_address.get(address, 0)
        if count >= self._limit_per_address:
            return "connections_per_address"
        self._by_address[address] = count + 1
        self.taken += 1
        return None

    def leave(self, address: str) -> None:
        """Release a connection's place."""
        self.taken -= 1
        count = self._by_address.pop(address) - 1
        assert self.taken >= 0 and count >= 0
        if count:
            self._by_address[address] = count


class ByteBudget:
    """Bytes of requests that are being received or handled, and the connections waiting for room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self._overdrawn: Hashable | None = None
        self.used = 0
        self.receiving = 0
        """The part of `used` for buffers of incomplete frames."""

    @property
    def full(self) -> bool:
        """Whether reading should stop until bytes are released."""
        return self.used >= self._limit

    def grant(self, owner: Hashable, capacity: int, filled: int, size: int) -> int:
        """The permitted buffer size for `owner`'s frame of `size` bytes, of which `filled` bytes have arrived.

        The current size is `capacity` (0: no buffer). An unchanged result means no room: call `wait`.
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
        """Account a complete frame's buffer as a request."""
        self.receiving -= capacity
        assert self.receiving >= 0
        if self._waiting or self._overdrawn is not None:
            self._settle()

    def take(self, size: int) -> None:
        """Account bytes already in memory: this exceeds the bound by at most one read per connection."""
        self.used += size

    def release(self, size: int) -> None:
        """Release bytes and, once there is room, wake the waiters in order."""
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
        for wake in waiting.values():  # waiters that find no room wait again, in the same order
            wake()

    def wait(self, owner: Hashable, wake: Callable[[], None]) -> None:
        """Call `wake` once, when bytes are released."""
        self._waiting[owner] = wake

    def leave(self, owner: Hashable, capacity: int, held: int) -> None:
        """Release the buffer of `owner`'s incomplete frame and the `held` bytes of its requests."""
        self._waiting.pop(owner, None)
        self.receiving -= capacity
        self.release(capacity + held)


class ResponseReader(Hashable, Protocol):
    """A client that receives responses."""

    def unread_bytes(self) -> int:
        """Output that the client has not read; records the time if that has changed."""
        ...

    @property
    def last_active(self) -> float:
        """Time of its last byte read or sent, in monotonic seconds."""
        ...

    def drop_slow_reader(self) -> None:
        """Disconnect the client."""
        ...


class UnreadOutput:
    """Output of slow clients (over their transport's high-water mark)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._behind: dict[ResponseReader, int] = {}
        self._waiting: dict[Hashable, Callable[[], None]] = {}
        self.used = 0

    @property
    def full(self) -> bool:
        """Whether no further large response should be built."""
        return self.used >= self._limit

    def note(self, reader: ResponseReader, now: float) -> None:
        """Record that `reader` is slow or got more output. At the bound, disconnects clients that do not read."""
        self._update(reader)
        if self.used >= self._limit:
            self.sweep(now)

    def _update(self, reader: ResponseReader) -> None:
        size = reader.unread_bytes()
        self.used += size - self._behind.get(reader, 0)
        self._behind[reader] = size

    def forget(self, reader: ResponseReader) -> None:
        """Remove `reader`, which has caught up or disconnected."""
        self._waiting.pop(reader, None)
        self.used -= self._behind.pop(reader, 0)
        self._wake()

    def sweep(self, now: float) -> None:
        """Update all slow clients, and enforce the bounds. Also called every few seconds."""
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
        """Call `wake` once, when there is room."""
        self._waiting[owner] = wake
