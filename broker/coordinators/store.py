"""What a coordinator keeps of one partition in memory, as the loader and the writer see it.

Entry: `StateStore`; `TransactionalStore` for a partition in which producers have transactions, `LossAwareStore` for one
that gives out numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from tidelog.broker.coordinators.timers import Now

KeyValue = tuple[bytes, bytes | None]
"""A record of an internal topic; None is a tombstone."""


class TxnProducer(NamedTuple):
    """A transactional producer as its batches name it: producer id (int64) and epoch (int16)."""

    id: int
    epoch: int


class StateStore(Protocol):
    """The content of one partition. It begins empty, is filled by `replay`, and changed when records are confirmed."""

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply the next record of the log while it is loaded. Raises `CorruptRecord`."""
        ...

    def finish_loading(self, now: Now) -> None:
        """The log was read to its end: everything that `replay` was told is durable."""
        ...

    def live_records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield everything durable once: replaying it gives this store. What is durable does not change meanwhile."""
        ...

    def counts(self) -> dict[str, int]:
        """Return figures for the log message that the partition is loaded."""
        ...


@runtime_checkable
class LossAwareStore(Protocol):
    """A store to which it matters that records of its partition were lost."""

    def records_lost(self) -> None:
        """Records may have been lost that followed all that `replay` was told so far."""
        ...


@runtime_checkable
class TransactionalStore(StateStore, Protocol):
    """A store with records of open transactions: *pending* until the marker of their producer."""

    def replay_pending(self, producer: TxnProducer, key: bytes, value: bytes | None) -> None:
        """Apply the next record of a transactional batch. Raises `CorruptRecord`."""
        ...

    def replay_marker(self, producer_id: int, *, commit: bool) -> None:
        """Apply the next marker: the producer's pending records count from now on, or never will."""
        ...

    def pending_records(self) -> Iterator[tuple[TxnProducer, Sequence[KeyValue]]]:
        """Yield every pending record once, in order, as batches; replaying them after `live_records` gives this store.

        A log that ends with `live_records` and any part of this, all written again, must be replayed as if it did not.
        """
        ...
