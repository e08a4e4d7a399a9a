"""The content of one partition of `__transaction_state` in memory: its transactional ids. Sans-I/O.

Records are added with `replay` while the partition is loaded; afterwards each change is persisted first and then
applied by its `TransactionalId`. Replaying `live_records` gives the same store.

Invariants: an id with a durable record is in `ids`; one without a record and without a pending change is not.

Entry: `TxnStore`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.broker.txn.records import (
    TxnKey,
    TxnState,
    TxnValue,
    encode_txn_key,
    encode_txn_value,
    parse_txn_key,
    parse_txn_value,
)
from tidelog.broker.txn.state import TransactionalId, TxnLimits


class TxnStore:
    """The transactional ids of one state partition."""

    def __init__(self, limits: TxnLimits, now_ms: int) -> None:
        """`now_ms`: the time since the Unix epoch by the coordinator's clock, which does not jump."""
        self.ids: dict[str, TransactionalId] = {}
        self._limits = limits
        self._now_ms = now_ms
        self._replayed: dict[str, TxnValue] = {}
        self._unknown: dict[bytes, bytes] = {}
        """Records of unknown types from a newer version: kept unchanged, so that a downgrade loses nothing."""

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply the next record of the log. Raises `CorruptRecord`."""
        parsed = parse_txn_key(key)
        if isinstance(parsed, TxnKey):
            found = None if value is None else parse_txn_value(value)
            if found is None or found.state is TxnState.DEAD:
                self._replayed.pop(parsed.transactional_id, None)
            else:
                self._replayed[parsed.transactional_id] = found
        elif value is None:
            self._unknown.pop(key, None)
        else:
            self._unknown[key] = value

    def records_lost(self) -> None:
        """Epochs that came after those that were replayed may have been given to clients: none is given again."""
        for transactional_id, value in self._replayed.items():
            self._replayed[transactional_id] = value._replace(is_behind=True)

    def finish_loading(self, now: object) -> None:
        """Make the ids after the log was read to its end."""
        for transactional_id, value in self._replayed.items():
            self.ids[transactional_id] = TransactionalId.load(transactional_id, value, self._now_ms, self._limits)
        self._replayed.clear()

    def obtain(self, transactional_id: str) -> TransactionalId:
        """Return the id; makes one without a record if it is not known. `drop_if_blank` follows."""
        found = self.ids.get(transactional_id)
        if found is None:
            found = self.ids[transactional_id] = TransactionalId(transactional_id, self._limits)
        return found

    def drop_if_blank(self, one: TransactionalId) -> None:
        """Forget an id without a record: a refused first request must leave nothing behind."""
        if one.value is None and not one.pending and self.ids.get(one.transactional_id) is one:
            del self.ids[one.transactional_id]

    def live_records(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield everything durable once."""
        for transactional_id, one in list(self.ids.items()):
            if one.value is not None:
                yield encode_txn_key(transactional_id), encode_txn_value(one.value)
        yield from self._unknown.items()

    def counts(self) -> dict[str, int]:
        """The number of transactional ids, and of those whose transaction is open or being ended."""
        values = [one.value for one in self.ids.values() if one.value is not None]
        busy = (TxnState.ONGOING, TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT)
        return {"transactional_ids": len(values), "open": sum(value.state in busy for value in values)}
