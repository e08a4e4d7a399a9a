"""The feature level of a cluster: which commands, fields and formats its members may write (docs/design/0013).

Every version of the software supports a range of levels (`SUPPORTED`). A cluster is at one level, which is replicated
(`ClusterRecord.level`) and only grows. Whatever a member writes for others is in the form of that level. A command
names the level that it was written at, by the format version of its envelope, and is applied by the rules of that one.

Level 0 is what members before feature levels write. Level 1 adds the commands in `FIRST_LEVEL`, cluster time by what
elapses, versions at which objects were destroyed, images in numbered chunks, and state format 2. Level 2 adds replica
sets of several members: their commands, table `replication`, and state format 3. Level 3 adds leases of readers outside
the cluster: their commands, table `leases`, and state format 4. Level 4 adds no command and no table: from it on,
table `configs` has rows of groups and of client metrics, brokers take part in transactions, and they cut holes into
compacted topics, which brokers of older versions would misread. Level 5 adds snapshots and branches of topics: their
commands, tables `snapshots` and `branches`, and state format 5. Level 6 adds no command and no table: from it on, a
change of configs or of a replication policy names what it is based on, and is refused if that is another by then. Level
7 adds no command and no table: from it on, nobody is elected by promises of WALs that all end before what is in the
bucket. Level 8 adds no command and no table: from it on that holds for WALs that have received nothing, too, and an
election remembers that disks were rolled back, and what was known of a WAL that one broker had alone; and only brokers
that are assigned join.

A broker's range is a row of table `kv`, which members of every version keep. It names the registration that it belongs
to: a broker that was started anew in another version has told nothing until it says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tidelog.runtime.errors import CorruptData, InvalidInput
from tidelog.runtime.msgpack import DECODE_ERRORS

OLDEST = 0
NEWEST = 8
"""The newest level that this version supports; a new cluster begins with it."""
DIRECTORIES_LEVEL = 1
"""From here on the quorum records the ids of its members' directories."""
REPLICATION_LEVEL = 2
"""From here on a replica set may have several members."""
LEASES_LEVEL = 3
"""From here on readers outside the cluster have leases."""
TRANSACTIONS_LEVEL = 4
"""From here on brokers serve transactions and compact topics.

A broker of an older version knows neither: it would ask no coordinator about a transactional batch, drop the pending
offsets of a group that it takes over, and take the hole that compaction leaves in a stream for lost data.
"""
SNAPSHOTS_LEVEL = 5
"""From here on there are snapshots and branches of topics: older controllers would destroy what they hold."""
CONFIG_BASE_LEVEL = 6
"""From here on a change of configs names what it is based on (`tidelog.controller.model.configs`)."""
SET_BACK_LEVEL = 7
"""From here on WALs that were rolled back behind what is in the bucket elect nobody (`was_set_back`)."""
EMPTY_COPY_LEVEL = 8
"""From here on that holds for WALs, too, that have received nothing behind the offset at which they began; and
an election remembers it (`tidelog.controller.model.replication.voting`). The end of a WAL that a broker had alone is
known when another one joins, and a broker joins only while it is assigned."""
OVERRIDES_LEVEL = 2
"""From here on controllers know overrides of their settings (`tidelog.controller.model.overrides`)."""
NAMED_CONFIGS_LEVEL = 4
"""From here on groups and subscriptions of client metrics have configs."""
FEATURE = "tidelog.level"
"""Name of the level as a Kafka feature (KIP-584)."""
_KEY = "level/broker/"


class LevelRange(msgspec.Struct, frozen=True, array_like=True):
    """The levels that a member supports, both inclusive."""

    oldest: int = 0
    newest: int = 0

    def __contains__(self, level: int) -> bool:
        return self.oldest <= level <= self.newest

    def __str__(self) -> str:
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SUPPORTED = LevelRange(OLDEST, NEWEST)
BEFORE_LEVELS = LevelRange(0, 0)
"""What a member supports that tells nothing: it is of a version before feature levels."""


class UnsupportedLevel(InvalidInput):
    """The cluster's level does not allow this, or a member does not support a level.

    Kafka: INVALID_UPDATE_VERSION (95).
    """

    kafka_code = 95


class NewerLevel(CorruptData):
    """What is read was written at a level that this process does not support: it must end, not guess."""


class _Told(msgspec.Struct, frozen=True, array_like=True):
    registration_epoch: int
    oldest: int
    newest: int


_told = msgspec.msgpack.Decoder(_Told)


def level_key(broker_id: int) -> str:
    """Return the key in table `kv` of a broker's range."""
    return f"{_KEY}{broker_id}"


def told_range(registration_epoch: int, supported: LevelRange) -> bytes:
    """Encode a broker's range under one registration."""
    return msgspec.msgpack.encode(_Told(registration_epoch, supported.oldest, supported.newest))


def range_in(value: bytes | None, registration_epoch: int) -> LevelRange:
    """Return the range that a broker told under its current registration; `BEFORE_LEVELS` if it told none."""
    if value is None:
        return BEFORE_LEVELS
    try:
        told = _told.decode(value)
    except DECODE_ERRORS:
        return BEFORE_LEVELS
    return LevelRange(told.oldest, told.newest) if told.registration_epoch == registration_epoch else BEFORE_LEVELS


def unable(level: int, ranges: Mapping[str, LevelRange]) -> list[str]:
    """Return the names of the members that do not support a level, each with what it supports."""
    return [f"{name} (levels {each})" for name, each in ranges.items() if level not in each]


def require_all(level: int, ranges: Mapping[str, LevelRange]) -> None:
    """Raises `UnsupportedLevel` unless every member supports `level`."""
    found = unable(level, ranges)
    if found:
        raise UnsupportedLevel(
            f"feature level {level} is not supported by {', '.join(found)}",
            hint="upgrade these members, or remove them from the cluster (`tidelog broker remove`, `tidelog controller"
            " remove`); `tidelog cluster upgrade --dry-run` shows all",
        )


def require_known(level: int, what: str) -> None:
    """Check a level that was read. Raises `NewerLevel`, naming `what` it was read from."""
    if level not in SUPPORTED:
        raise NewerLevel(
            f"{what} is of feature level {level}; this process supports levels {SUPPORTED}",
            hint="start the version that wrote it, or a newer one; a feature level is never lowered",
        )


def highest_common(ranges: Iterable[LevelRange]) -> int:
    """Return the highest level that all members support, this one included."""
    return min([NEWEST, *(each.newest for each in ranges)])
