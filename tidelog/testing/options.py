"""How a broker of a test is to run, and the configuration that follows.

Only settings that are the same in a configuration file; `BROKER_SETTINGS` and `CLUSTER_SETTINGS` have the reason for
each that is not the product's default.

Entry: `RunOptions`, `configuration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tidelog.runtime.errors import InvalidInput, StorageFailed

if TYPE_CHECKING:
    from tidelog.config import Config

Storage = Literal["memory", "disk"]
Value = str | int | bool
"""The value of a setting, as `--set` takes it."""

BROKER_SETTINGS: Mapping[str, Value] = {
    "admin.port": 0,  # any free one: several runs on one machine
    "wal.segment_bytes": 4 << 20,  # WAL files are filled with zeros ahead of use
    "kafka.telemetry_max_bytes": 0,  # librdkafka writes a line about it to standard error for each client
    "group.initial_rebalance_delay_ms": 0,  # a lone consumer waits for no others; as in Kafka's own test brokers
    "group.offsets_topic_partitions": 4,
    "group.transaction_topic_partitions": 4,  # both are created at first use
    "node.drain_timeout_ms": 0,  # a stop waits for no moves
    "node.shutdown_timeout_ms": 10_000,
    "node.log_level": "info",
}
CLUSTER_SETTINGS: Mapping[str, Value] = {
    "controller.session_timeout_ms": 3_000,  # a test waits for others to take over from a killed broker
    "controller.heartbeat_interval_ms": 300,
}


class NotPossibleHere(InvalidInput):
    """A fault that this way of running a broker does not have; the hint says which one has it."""


class BrokerEnded(StorageFailed):
    """A broker ended by itself, or did not start; the message has the reason that it told."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How the brokers of one context run."""

    child: bool
    """In processes of their own, instead of threads of this one."""
    storage: Storage
    directory: Path | None
    """Of the user, and kept; None for a private one, which is deleted."""
    settings: Mapping[str, Value] = field(default_factory=dict)

    @property
    def wal_kind(self) -> Literal["disk", "memory"]:
        """A WAL in memory dies with its process, so one that can be killed has it on a disk, if only in memory."""
        return "memory" if self.storage == "memory" and not self.child and self.directory is None else "disk"


def configuration(options: RunOptions, own: Mapping[str, Value]) -> Config:
    """Return a configuration: defaults, `own`, then what the user has set. Raises `ConfigError`."""
    from tidelog.config import load

    flags = {**BROKER_SETTINGS, "wal.kind": options.wal_kind, **own, **options.settings}
    return load(flags=list(flags.items())).config
