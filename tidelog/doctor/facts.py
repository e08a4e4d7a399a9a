"""The facts that are judged: of each node, and of the cluster as a whole.

Entry: `NodeView`, `ClusterView`, `Facts`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tidelog.config import Config
from tidelog.controller.checkup import CheckupReport
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.facts.node import NodeFacts
from tidelog.runtime.facts.reach import AddressTry, ClockSample


class PortFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A port that a node is going to listen on, tried while it does not run."""

    setting: str
    host: str
    port: int
    error: str = ""
    is_taken: bool = False
    """Whether something listens there; else, with an error, the host is the matter."""


class DirectoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A data directory as its files tell it."""

    path: str
    node: int = -1
    """The broker id in it; -1: none yet."""
    cluster_id: str = ""
    holder: int = 0
    """The process that has locked it; 0: none."""
    damage: str = ""
    hint: str = ""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node: of a running cluster, or as a configuration describes it."""

    where: str
    config: Config | None = None
    """None: it was not told."""
    sources: dict[str, str] = {}
    told: NodeFacts | None = None
    report: CheckupReport | None = None
    directory: DirectoryFacts | None = None
    ports: list[PortFacts] = []
    is_running: bool = True
    """Whether this is what a running process told."""
    bucket_error: str = ""
    """Why the bucket could not be opened with these settings."""
    bucket_hint: str = ""
    collector: AddressTry | None = None
    """The collector of traces, tried from here; None: it has none, or was not tried."""
    tracing_needs: str = ""
    """The library that traces need and this environment lacks."""
    missing: list[str] = []
    """What could not be had of it, and why: sentences."""
    no_token: bool = False
    is_older: bool = False
    """It runs a version without checkups."""

    asked_id: int = -1
    """The id by which the cluster knows it; -1: it was not asked."""

    @property
    def id(self) -> int:
        """The node's id, which one of an older version does not tell itself; -1: not known."""
        return self.told.node if self.told is not None else self.asked_id


class NodeClock(msgspec.Struct, frozen=True):
    """A node's clock, as the doctor's machine saw it."""

    node: str
    sample: ClockSample


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    """A running cluster, as one of its brokers tells it."""

    bootstrap: str
    error: str = ""
    """Why no broker could be asked; then the rest is empty."""
    hint: str = ""
    is_named: bool = True
    """Whether the user has named the address."""
    status: dict[str, Any] = {}
    """As `tidelog status --format json`."""
    levels: dict[str, Any] = {}
    """As `GET /cluster`; empty: not told."""
    levels_error: str = ""
    """Why they were not told."""
    clocks: list[NodeClock] = []
    from_here: list[AddressTry] = []
    """The brokers' addresses, tried from the doctor's machine."""
    silent: dict[int, str] = {}
    """Brokers whose admin HTTP did not answer, with the reason."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was gathered."""

    errors: list[ConfigError] = []
    """What is wrong with the configuration that was given."""
    config_file: str = ""
    nodes: list[NodeView] = []
    cluster: ClusterView | None = None
    now_ms: int = 0
