"""Compares the data confirmed by each life of a broker with the start of later lives (docs/rules.md, rules 1 and 8).

Bytes that a WAL reports as durable lead to acknowledgements, high watermarks and commits. So the next master of that
WAL, after any crash and on any broker, must begin its epoch at or after them, and the next owner of a stream must
continue at or after its confirmed end. `confirmed-lost` is a WAL or a stream that continues before that point, or a
deposed master or owner that confirms data past the start of its successor.

Nothing is read before it is confirmed (rule 2): `unconfirmed-read` is a record that a consumer was given before.

Entry: `Confirmed`, which gets its events from `tidelog.simulation.world.watched_wal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RULE = "confirmed-lost"
READ_RULE = "unconfirmed-read"


@dataclass(slots=True)
class _Line:
    """A replica set's WAL, or a stream."""

    epoch: int
    """The latest epoch that has begun."""
    began: int
    """The start of that epoch."""
    confirmed: int
    """The confirmed end."""


class Confirmed:
    """All confirmed ends; `found` is called with `(rule, message)`."""

    def __init__(self, found: Callable[[str, str], None]) -> None:
        self._found = found
        self._sets: dict[int, _Line] = {}
        self._streams: dict[int, _Line] = {}

    def wal_begins(self, set_id: int, epoch: int, offset: int) -> None:
        """Record that a master of the replica set continues at WAL offset `offset`, with a new epoch."""
        self._begins(self._sets, f"the WAL of replica set {set_id}", set_id, epoch, offset)

    def wal_holds(self, set_id: int, epoch: int, offset: int) -> None:
        """Record that the master of that epoch has confirmed the WAL up to `offset`."""
        self._holds(self._sets, f"the WAL of replica set {set_id}", set_id, epoch, offset)

    def wal_starts_over(self, set_id: int, offset: int) -> None:
        """Record that another WAL takes the place of the one before, at `offset`.

        What that one had may be records of epochs, and of streams that were deleted or are elsewhere. What it had of
        others is missed when they go on.
        """
        line = self._sets.get(set_id)
        if line is not None:
            line.confirmed = min(line.confirmed, offset)

    def forget_wal(self, set_id: int) -> None:
        """Drop a removed replica set."""
        self._sets.pop(set_id, None)

    def stream_goes_on(self, stream_id: int, epoch: int, offset: int) -> None:
        """Record that the owner of that epoch opened the stream, or appends, at `offset`."""
        line = self._streams.get(stream_id)
        if line is None or line.epoch < epoch:
            self._begins(self._streams, f"stream {stream_id}", stream_id, epoch, offset)

    def stream_opens(self, stream_id: int, epoch: int, offset: int) -> None:
        """Record that a master, of which a quorum may have nothing yet, opened the stream at `offset`.

        Its term counts from the first of its appends that is confirmed on (`stream_goes_on`): until then another
        replica may be elected, and confirm what this one does not have.
        """
        line = self._streams.get(stream_id)
        if line is not None and line.epoch < epoch and offset < line.confirmed:
            self._lost(f"stream {stream_id}", line, epoch, offset)

    def stream_holds(self, stream_id: int, epoch: int, end: int) -> None:
        """Record that the appends of that epoch are confirmed up to stream offset `end`."""
        self._holds(self._streams, f"stream {stream_id}", stream_id, epoch, end)

    def stream_was_read(self, stream_id: int, end: int, where: str) -> None:
        """Check that the stream is confirmed up to `end`, which a consumer has read up to, at `where`."""
        line = self._streams.get(stream_id)
        if line is not None and end > line.confirmed:
            said = f"stream {stream_id} was read up to {end} {where}, and is confirmed up to {line.confirmed}"
            self._found(READ_RULE, said)

    def stream_recovered(self, stream_id: int, epoch: int, end: int) -> None:
        """Record data of a recovered WAL, unless the stream has a later owner."""
        line = self._streams.setdefault(stream_id, _Line(epoch, end, end))
        if epoch >= line.epoch:
            line.confirmed = max(line.confirmed, end)

    def _begins(self, lines: dict[int, _Line], what: str, key: int, epoch: int, offset: int) -> None:
        line = lines.setdefault(key, _Line(epoch, offset, offset))
        if offset < line.confirmed:
            self._lost(what, line, epoch, offset)
        if epoch >= line.epoch:
            line.epoch, line.began = epoch, offset

    def _lost(self, what: str, line: _Line, epoch: int, offset: int) -> None:
        said = f"{what} continues at {offset} with epoch {epoch}"
        self._found(RULE, f"{said}; epoch {line.epoch} confirmed it up to {line.confirmed}")

    def _holds(self, lines: dict[int, _Line], what: str, key: int, epoch: int, end: int) -> None:
        line = lines.setdefault(key, _Line(epoch, end, end))
        if epoch < line.epoch and end > line.began:
            self._found(RULE, f"{what}: epoch {epoch} confirms {end}; epoch {line.epoch} began at {line.began}")
        line.confirmed = max(line.confirmed, end)
