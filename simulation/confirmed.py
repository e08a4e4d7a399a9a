"""What each life of a broker confirmed, against what later lives begin with (rules 1 and 8 of DESIGN.md, section 3).

A WAL that reports a byte durable has told it to everybody: acknowledgements, high watermarks and commits follow. So
whoever is the next master of that WAL, after any crash and on whatever broker, must begin its epoch at or behind it,
and the next owner of a stream must go on at or behind what was confirmed of it. `confirmed-lost` is a WAL or a stream
that goes on before, and a deposed master or owner that confirms what lies past its successor's beginning.

Entry: `Confirmed`; `simulation.watched_wal` tells it what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RULE = "confirmed-lost"


@dataclass(slots=True)
class _Line:
    """A replica set's WAL, or a stream."""

    epoch: int
    """The newest one that has begun."""
    began: int
    """Where that was."""
    confirmed: int
    """The end of what anybody has confirmed."""


class Confirmed:
    """Everything that was ever confirmed; `found` hears of `(rule, message)`."""

    def __init__(self, found: Callable[[str, str], None]) -> None:
        self._found = found
        self._sets: dict[int, _Line] = {}
        self._streams: dict[int, _Line] = {}

    def wal_begins(self, set_id: int, epoch: int, offset: int) -> None:
        """A master of the replica set goes on at WAL offset `offset`, with a new epoch."""
        self._begins(self._sets, f"the WAL of replica set {set_id}", set_id, epoch, offset)

    def wal_holds(self, set_id: int, epoch: int, offset: int) -> None:
        """The master of that epoch has confirmed the WAL up to `offset`."""
        self._holds(self._sets, f"the WAL of replica set {set_id}", set_id, epoch, offset)

    def forget_wal(self, set_id: int) -> None:
        """The replica set was removed."""
        self._sets.pop(set_id, None)

    def stream_goes_on(self, stream_id: int, epoch: int, offset: int) -> None:
        """Its owner of that epoch has opened it, and would append at `offset`, or does."""
        line = self._streams.get(stream_id)
        if line is None or line.epoch < epoch:
            self._begins(self._streams, f"stream {stream_id}", stream_id, epoch, offset)

    def stream_holds(self, stream_id: int, epoch: int, end: int) -> None:
        """What was appended with that epoch is confirmed up to stream offset `end`."""
        self._holds(self._streams, f"stream {stream_id}", stream_id, epoch, end)

    def stream_recovered(self, stream_id: int, epoch: int, end: int) -> None:
        """A WAL that was recovered holds this. It counts, unless the stream has a later owner."""
        line = self._streams.setdefault(stream_id, _Line(epoch, end, end))
        if epoch >= line.epoch:
            line.confirmed = max(line.confirmed, end)

    def _begins(self, lines: dict[int, _Line], what: str, key: int, epoch: int, offset: int) -> None:
        line = lines.setdefault(key, _Line(epoch, offset, offset))
        if offset < line.confirmed:
            said = f"{what} goes on at {offset} with epoch {epoch}"
            self._found(RULE, f"{said}; epoch {line.epoch} confirmed it up to {line.confirmed}")
        if epoch >= line.epoch:
            line.epoch, line.began = epoch, offset

    def _holds(self, lines: dict[int, _Line], what: str, key: int, epoch: int, end: int) -> None:
        line = lines.setdefault(key, _Line(epoch, end, end))
        if epoch < line.epoch and end > line.began:
            self._found(RULE, f"{what}: epoch {epoch} confirms {end}; epoch {line.epoch} began at {line.began}")
        line.confirmed = max(line.confirmed, end)
