"""`Readers`: up to which metadata version every broker has followed (rule 6). Soft state, never replicated.

A destroyed object stays in the bucket until no reader can hold metadata that names it. Each heartbeat tells the version
that the broker has applied; a registration never goes back behind it. A broker that is silent holds deletions up, too,
until it knows by itself that its metadata is old: each answer of the active controller allows it to read from the
bucket for the grace, counted from when it asked, and here `SILENCE_GRACES` graces have passed since it was heard last.
The surplus covers clocks that run at different rates, and a predecessor that answered after it was deposed; and a
broker that finds an object missing asks the controllers before it believes its metadata.

A new active controller knows nothing of what its predecessor heard: silence counts from its activation.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `Readers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tidelog.controller.model.records import BrokerRecord

SILENCE_GRACES = 1.5
"""Graces after which a silent broker reads nothing from the bucket any more."""
NEVER = -1
"""No version of this registration is known."""
ALL = (1 << 63) - 1
"""A version that no object was destroyed after."""


class _Follower(NamedTuple):
    registration_epoch: int
    version: int
    heard_s: float


class Readers:
    """The brokers, and what they have applied; see the module docstring."""

    def __init__(self, grace_s: float) -> None:
        assert grace_s > 0
        self._silence_s = SILENCE_GRACES * grace_s
        self._active_since_s = float("inf")
        self._readers: dict[int, _Follower] = {}

    def activated(self, now_s: float) -> None:
        """Record that this controller became active."""
        self._active_since_s = now_s

    def heartbeat(self, broker_id: int, registration_epoch: int, version: int, now_s: float) -> None:
        """Record the version that a broker has applied; `NEVER` from an older process, which does not tell it."""
        known = self._readers.get(broker_id)
        if known is not None and known.registration_epoch == registration_epoch:
            version = max(version, known.version)
        self._readers[broker_id] = _Follower(registration_epoch, version, now_s)

    def passed(self, brokers: Iterable[BrokerRecord], now_s: float) -> int:
        """Return the version that every registered broker has passed; `ALL` if none can hold any metadata."""
        rows = {record.id: record for record in brokers}
        for gone in self._readers.keys() - rows.keys():
            del self._readers[gone]
        return min((self._version_of(record, now_s) for record in rows.values()), default=ALL)

    def _version_of(self, record: BrokerRecord, now_s: float) -> int:
        reader = self._readers.get(record.id)
        if reader is None or reader.registration_epoch != record.registration_epoch:
            reader = _Follower(record.registration_epoch, NEVER, now_s)  # seen now for the first time
            self._readers[record.id] = reader
        silent_s = now_s - max(reader.heard_s, self._active_since_s)
        return ALL if silent_s > self._silence_s else reader.version

    def versions(self) -> dict[int, int]:
        """Return the last known version by broker id, for operators."""
        return {broker_id: reader.version for broker_id, reader in sorted(self._readers.items())}
