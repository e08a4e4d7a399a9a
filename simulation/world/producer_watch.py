"""Compares the producers that a partition knows when it opens with those whose batches were confirmed before.

Whoever opens a partition knows every idempotent producer that it had: the producer's epoch is no smaller, and in the
same epoch its last sequence is no earlier (KIP-98). Else a batch that the producer sends again, because no
acknowledgement came, is written twice. `producer-forgotten` is a producer that is missing in the table, or is there as
it was before a confirmed batch. The clients notice that only where one of them sends a batch again just then.

Nothing of this depends on how the table is stored and recovered: only the headers of confirmed batches are looked at.

Entry: `ProducerWatch`, which gets its batches from `tidelog.simulation.world.watched_wal` and
`tidelog.simulation.world.watched_replica`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from tidelog.batch.batch import BatchHeader, parse_header
from tidelog.runtime.types import Buffer
from tidelog.stream.partition_log import ProducerInfo

RULE = "producer-forgotten"
_SEQUENCES = 1 << 31
"""Sequences wrap (int32 ≥ 0)."""
_NONE = -1


class ProducerBatch(NamedTuple):
    """What a batch, or a transaction marker, says of its producer."""

    producer_id: int
    epoch: int
    last_sequence: int
    """-1 for a marker, and for offsets that a coordinator writes on behalf of a transaction."""


class ProducerWatch:
    """The last confirmed batch of every producer, by data stream; `found` is called with `(rule, message)`."""

    def __init__(self, found: Callable[[str, str], None]) -> None:
        self._found = found
        self._streams: dict[int, dict[int, ProducerBatch]] = {}
        self._epochs: dict[int, int] = {}
        """The newest leader epoch in which something was confirmed, by data stream."""

    def confirms(self, stream_id: int, epoch: int, batch: ProducerBatch) -> None:
        """Record that a batch of a data stream is confirmed in a leader epoch. They come in the order of offsets."""
        self._epochs[stream_id] = max(epoch, self._epochs.get(stream_id, epoch))
        producers = self._streams.setdefault(stream_id, {})
        old = producers.get(batch.producer_id)
        if old is None or batch.epoch > old.epoch or (batch.epoch == old.epoch and batch.last_sequence != _NONE):
            producers[batch.producer_id] = batch

    def opens(self, stream_id: int, epoch: int, known: Iterable[ProducerInfo]) -> None:
        """Check the producers of a partition that has opened with this leader epoch.

        One that opens late in an epoch of the past, as after a time without a network, knows what was written until
        then, and can confirm nothing.
        """
        if epoch < self._epochs.get(stream_id, epoch):
            return
        table = {one.producer_id: one for one in known}
        for last in self._streams.get(stream_id, {}).values():
            info = table.get(last.producer_id)
            if info is None:
                now = "it is unknown"
            elif info.producer_epoch < last.epoch or (info.producer_epoch == last.epoch and _is_behind(info, last)):
                now = f"it is known up to sequence {info.last_sequence} of epoch {info.producer_epoch}"
            else:
                continue
            self._found(
                RULE,
                f"stream {stream_id} opened with epoch {epoch}: producer {last.producer_id} wrote up to sequence"
                f" {last.last_sequence} of epoch {last.epoch}, and {now}",
            )

    def forget(self, stream_id: int) -> None:
        """Drop a stream that was deleted."""
        self._streams.pop(stream_id, None)
        self._epochs.pop(stream_id, None)


def producer_batch(payload: Buffer) -> ProducerBatch | None:
    """Return what a record batch says of its producer; None if it has none."""
    header: BatchHeader = parse_header(payload)
    if header.producer_id < 0:
        return None
    return ProducerBatch(header.producer_id, header.producer_epoch, header.last_sequence)


def _is_behind(info: ProducerInfo, last: ProducerBatch) -> bool:
    if last.last_sequence == _NONE:
        return False
    return info.last_sequence == _NONE or 0 < (last.last_sequence - info.last_sequence) % _SEQUENCES < _SEQUENCES // 2
