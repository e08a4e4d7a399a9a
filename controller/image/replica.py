"""`Replica`: the `StateMachine` on the consensus thread, and its messages to the event loop.

`ControllerState` exists on the consensus thread only. The event loop has its own copy (`DeltaFeed.image`), updated by
the mutations posted here, so the two share only immutable records.

Entry: `Replica`, used by `tidelog.controller.node`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tidelog.controller.image.image import Delta, Image
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import RowChange
from tidelog.controller.model.commands import decode_envelope
from tidelog.controller.model.levels import NewerLevel
from tidelog.runtime.errors import CorruptData
from tidelog.runtime.msgpack import DECODE_ERRORS


class StateCopy(NamedTuple):
    """The whole state at one place of the log, to be encoded on any thread."""

    log_index: int
    """Index of the last command that it contains."""
    version: int
    encode: Callable[[], bytes]
    """See `ControllerState.freeze`."""


class Replica:
    """See `tidelog.controller.raft.consensus.StateMachine`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_deltas: Callable[[list[Delta]], None],
        on_image: Callable[[Image], None],
        new_image: Callable[[], Image] = Image,
    ) -> None:
        self.state = ControllerState()
        self._loop = loop
        self._on_deltas = on_deltas
        self._on_image = on_image
        self._new_image = new_image
        self._fresh: list[Delta] = []
        self._asked: deque[asyncio.Future[StateCopy]] = deque()

    def apply(self, blob: bytes, index: int) -> bytes:
        """Apply one command. Raises `CorruptData` if it does not decode: this member must stop instead of diverging."""
        try:
            envelope = decode_envelope(blob)
        except NewerLevel as error:
            raise _at(index, error) from error
        except DECODE_ERRORS as error:
            raise CorruptData(
                f"entry {index} of the Raft log is not a command this process knows: {error}",
                hint="it was written by a newer version: upgrade this controller",
            ) from error
        try:
            applied = self.state.apply(envelope, index)
        except NewerLevel as error:
            raise _at(index, error) from error
        if applied.mutations:
            self._fresh.append(Delta(index, applied.mutations, applied.ends))
        return applied.result

    def ask_copy(self) -> asyncio.Future[StateCopy]:
        """Return what will be a copy of the state, taken between two turns; called on the loop.

        It comes with the next turn of the consensus, which a command causes.
        """
        asked: asyncio.Future[StateCopy] = self._loop.create_future()
        self._asked.append(asked)
        return asked

    def flush(self) -> None:
        """Post the deltas to the loop before the results that depend on them, and the copies that were asked for."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader
                self._loop.call_soon_threadsafe(self._on_deltas, fresh)
        while self._asked:
            asked = self._asked.popleft()
            copy = StateCopy(self.state.applied_index, self.state.version, self.state.freeze())
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_answer, asked, copy)

    def freeze(self) -> Callable[[], bytes]:
        """See `ControllerState.freeze`."""
        return self.state.freeze()

    def level(self) -> int:
        """See `ControllerState.level`."""
        return self.state.level

    def load(self, data: bytes) -> None:
        """See `ControllerState.load`."""
        self.state.load(data)
        self._fresh.clear()
        image = self._new_image()
        rows = [
            RowChange(table.name, key, record)
            for table in self.state.tables.public()
            for key, record in table.rows.items()
        ]
        image.apply(Delta(self.state.version, rows, {}))
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_image, image)


def _answer(asked: asyncio.Future[StateCopy], copy: StateCopy) -> None:
    if not asked.done():
        asked.set_result(copy)


def _at(index: int, error: NewerLevel) -> NewerLevel:
    return NewerLevel(f"entry {index} of the Raft log: {error.message}", hint=error.hint)
