"""Kafka's features (KIP-584) besides the cluster's own level: what is supported, and what is finalized.

`metadata.version` follows the feature level. `transaction.version` is finalized at its newest level from feature level
`TRANSACTIONS_LEVEL` on; an operator may set it lower (UpdateFeatures), which an entry of table `kv` records: key
`feature/transaction.version`, value the level in decimal ASCII. Members of every version keep the entry.

Entry: `finalized`, `transaction_version`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.controller.model.levels import FEATURE, OLDEST, SUPPORTED, TRANSACTIONS_LEVEL, LevelRange

METADATA_VERSION = "metadata.version"
TRANSACTION_VERSION = "transaction.version"
_METADATA_BEFORE_TRANSACTIONS = 21
"""3.9-IV0: what clusters below `TRANSACTIONS_LEVEL` say."""
METADATA_LEVELS = LevelRange(7, 29)
"""From 3.3-IV3, the oldest that Kafka 4's tools know, to 4.2-IV1, which goes with the request versions served."""
METADATA_NAMES = {_METADATA_BEFORE_TRANSACTIONS: "3.9-IV0", METADATA_LEVELS.newest: "4.2-IV1"}
"""Kafka's names of the levels that `metadata.version` is finalized at."""
TRANSACTION_LEVELS = LevelRange(0, 2)
"""2: a producer's epoch grows with each of its transactions (KIP-890, second part)."""
SUPPORTED_FEATURES = {
    METADATA_VERSION: METADATA_LEVELS,
    FEATURE: LevelRange(max(1, OLDEST), SUPPORTED.newest),
    TRANSACTION_VERSION: TRANSACTION_LEVELS,
}
"""Levels of every feature. One whose range begins with 0 is hidden from clients that cannot decode that."""


def feature_key(name: str) -> str:
    """Return the key in table `kv` of a feature's finalized level."""
    return f"feature/{name}"


def transaction_version(level: int, kv: Mapping[str, bytes]) -> int:
    """Return the finalized level of `transaction.version`, 0 to 2, at a feature level and with the rows of `kv`.

    0 means that the feature is not finalized. Clients then use the first protocol, which stays served from
    `TRANSACTIONS_LEVEL` on.
    """
    if level < TRANSACTIONS_LEVEL:
        return 0
    value = kv.get(feature_key(TRANSACTION_VERSION))
    return TRANSACTION_LEVELS.newest if value is None else int(value)


def finalized(level: int, kv: Mapping[str, bytes]) -> dict[str, int]:
    """Return the finalized level of each feature that has one; a feature at level 0 has none."""
    found = {
        METADATA_VERSION: METADATA_LEVELS.newest if level >= TRANSACTIONS_LEVEL else _METADATA_BEFORE_TRANSACTIONS,
        FEATURE: level,
        TRANSACTION_VERSION: transaction_version(level, kv),
    }
    return {name: found_level for name, found_level in found.items() if found_level > 0}
