"""`Replica`: the `StateMachine` that the consensus thread drives, and what it hands to the event loop.

`ControllerState` lives on the consensus thread only. The loop has its own copy (`DeltaFeed.image`), kept by the
mutations posted here, so the two share nothing but immutable records.

Entry: `Replica`, used by `controller.node`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from controller.commands import decode_envelope
from controller.image import Delta, Image
from controller.state import ControllerState
from controller.tables import Mutation
from runtime.errors import CorruptData
from runtime.msgpack import DECODE_ERRORS


class Replica:
    """See `controller.consensus.StateMachine`."""

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

    def apply(self, blob: bytes, index: int) -> bytes:
        """Apply one command. Raises `CorruptData` for one that does not decode: this member must stop, not diverge."""
        try:
            envelope = decode_envelope(blob)
        except DECODE_ERRORS as error:
            raise CorruptData(
                f"entry {index} of the Raft log is not a command this process knows: {error}",
                hint="it was written by a newer version: upgrade this controller",
            ) from error
        applied = self.state.apply(envelope, index)
        if applied.mutations:
            self._fresh.append(Delta(index, applied.mutations, applied.ends))
        return applied.result

    def flush(self) -> None:
        """Hand the deltas to the loop, before the results that depend on them."""
        if self._fresh:
            fresh, self._fresh = self._fresh, []
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._on_deltas, fresh)

    def freeze(self) -> Callable[[], bytes]:
        """See `ControllerState.freeze`."""
        return self.state.freeze()

    def load(self, data: bytes) -> None:
        """See `ControllerState.load`."""
        self.state.load(data)
        self._fresh.clear()
        image = self._new_image()
        rows = [
            Mutation(table.name, key, record)
            for table in self.state.tables.public()
            for key, record in table.rows.items()
        ]
        image.apply(Delta(self.state.version, rows, {}))
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._on_image, image)
