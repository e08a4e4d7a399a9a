"""What a coordinator passes on with a partition that moves: its state, so that the next one need not read the log.

The state is that of the log up to an offset: what `load_store` makes of the records before it. It goes with the hint of
the move (`tidelog.broker.partitions.hints`), which is used only if the next leader has the same log up to the same end,
and is a hint like its other parts: whoever gets none, or cannot read it, reads the log.

Layout (msgpack): `PassedState`, an array whose first element is the version.

Invariant: `read_passed(encode_state(store, …))` replayed into an empty store gives the same store. No I/O. Entry:
`encode_state`, `read_passed`, `PassedState.replay`.
"""

from __future__ import annotations

import msgspec

from tidelog.broker.coordinators.store import StateStore, TransactionalStore, TxnProducer
from tidelog.runtime.msgpack import DECODE_ERRORS

VERSION = 1
MAX_STATE_BYTES = 512 << 10
"""Of keys and values. A larger state is read from the log."""
RECORD_OVERHEAD = 8
"""At most so many bytes more than key and value are sent of a record."""


class PassedState(msgspec.Struct, frozen=True, array_like=True):
    """A state, as it is sent."""

    version: int
    offset: int
    """The state is that of the log's records before it."""
    log_bytes: int
    """About the size of the log before the offset."""
    live: list[tuple[bytes, bytes]]
    pending: list[tuple[int, int, list[tuple[bytes, bytes | None]]]]
    """Producer id, producer epoch and records of each batch of an open transaction, in order."""

    def replay(self, store: StateStore) -> None:
        """Fill an empty store. Raises `CorruptRecord`."""
        for key, value in self.live:
            store.replay(key, value)
        if isinstance(store, TransactionalStore):
            for producer_id, epoch, records in self.pending:
                for pending_key, pending_value in records:
                    store.replay_pending(TxnProducer(producer_id, epoch), pending_key, pending_value)


def encode_state(store: StateStore, offset: int, log_bytes: int) -> bytes:
    """Return the state of a loaded store; empty if it has more than `MAX_STATE_BYTES`."""
    size = 0
    live: list[tuple[bytes, bytes]] = []
    for key, value in store.live_records():
        live.append((key, value))
        size += len(key) + len(value) + RECORD_OVERHEAD
        if size > MAX_STATE_BYTES:
            return b""
    pending: list[tuple[int, int, list[tuple[bytes, bytes | None]]]] = []
    if isinstance(store, TransactionalStore):
        for producer, records in store.pending_records():
            pending.append((*producer, list(records)))
            size += sum(len(key) + len(value or b"") + RECORD_OVERHEAD for key, value in records)
            if size > MAX_STATE_BYTES:
                return b""
    return msgspec.msgpack.encode(PassedState(VERSION, offset, log_bytes, live, pending))


def read_passed(note: bytes) -> PassedState | None:
    """Return the state that `encode_state` has made; None if there is none, or it is of another version."""
    if not note:
        return None
    try:
        state = msgspec.msgpack.decode(note, type=PassedState)
    except DECODE_ERRORS:
        return None
    return state if state.version == VERSION and state.offset >= 0 else None
