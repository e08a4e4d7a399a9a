"""Leader epochs and the offsets that they wrote (KIP-101, KIP-279, KIP-320).

Sans-I/O. An ordered list of `(epoch, start offset)`; an epoch ends where the next one starts, the last one at the log
end. Invariant: epochs and start offsets both grow strictly. An epoch without any record is replaced by the next one at
the same start offset.

Entry: `LeaderEpochs`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import msgspec

from tidelog.stream.errors import require_version

UNKNOWN = -1
_VERSION = 1


class LeaderEpochs:
    """The leader epochs of one partition. Epochs are int32 ≥ 0, offsets int64."""

    __slots__ = ("_epochs", "_starts")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        for epoch, start in entries:
            self.assign(epoch, start)

    def entries(self) -> list[tuple[int, int]]:
        """Return all `(epoch, start offset)` pairs, oldest first."""
        return list(zip(self._epochs, self._starts, strict=True))

    @property
    def latest(self) -> int:
        """Return the newest epoch, or -1."""
        return self._epochs[-1] if self._epochs else UNKNOWN

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Record that `epoch` writes from `start_offset` on. Returns whether anything changed.

        Entries at or after that offset are of epochs without records (or with truncated ones), and are removed. An
        epoch that is not newer than the newest changes nothing.
        """
        if self._epochs and epoch <= self._epochs[-1]:
            return False
        while self._starts and self._starts[-1] >= start_offset:
            self._starts.pop()
            self._epochs.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        return True

    def end_offset(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Return `(largest epoch ≤ epoch, its end offset)`, or `(-1, -1)` for an epoch newer than all known.

        As in Kafka, the result for an epoch older than all known is that epoch and the first known start: all its
        records are below that offset, so a client at or below it has lost nothing.
        """
        if not self._epochs or epoch < 0 or epoch > self._epochs[-1]:
            return UNKNOWN, UNKNOWN
        at = bisect_right(self._epochs, epoch)
        if at == len(self._epochs):
            return self._epochs[-1], log_end_offset
        return (self._epochs[at - 1] if at else epoch), self._starts[at]

    def epoch_at(self, offset: int) -> int:
        """Return the epoch that wrote `offset`, or -1."""
        at = bisect_right(self._starts, offset)
        return self._epochs[at - 1] if at else UNKNOWN

    def truncate_start(self, log_start_offset: int) -> None:
        """Remove epochs that end at or before the log start, and move the start of the epoch that contains it."""
        at = bisect_right(self._starts, log_start_offset) - 1
        if at < 0:
            return
        del self._epochs[:at]
        del self._starts[:at]
        self._starts[0] = log_start_offset

    def encode(self) -> bytes:
        """Return the versioned snapshot: msgpack `[1, [epoch, …], [start offset, …]]`."""
        return msgspec.msgpack.encode([_VERSION, self._epochs, self._starts])

    @classmethod
    def decode(cls, data: bytes) -> LeaderEpochs:
        """Decode the result of `encode`. Raises `msgspec.ValidationError`, `UnknownVersion`."""
        version, epochs, starts = msgspec.msgpack.decode(data, type=tuple[int, list[int], list[int]])
        require_version(version, _VERSION, "the list of leader epochs")
        return cls(zip(epochs, starts, strict=True))
