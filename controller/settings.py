"""Sections `[controller]`, `[balancer]`, `[scale]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65_535)]
Millis = Annotated[int, Meta(ge=1)]
Positive = Annotated[int, Meta(ge=1)]


class ControllerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the controller listens, elects and keeps time."""

    host: str = "127.0.0.1"
    """Where its RPC server listens."""
    port: Port = 0
    """RPC port; 0: as `members` says, else a free one, which is written to the data directory. `tidelog up` gives
    controller i port + i - 1 when the cluster starts for the first time, and keeps it."""
    members: list[str] = msgspec.field(default_factory=list)
    """The quorum at its first start: `id@host:port` of 1, 3 or 5 controllers, on all nodes the same; empty: one."""
    secret_file: str = ""
    """File with the secret that all nodes share: 16 bytes or more, readable by its owner only. `members` need it."""
    endpoints: list[str] = msgspec.field(default_factory=list)
    """`host:port` by which this broker reaches the controllers, if not as `members` says."""
    session_timeout_ms: Millis = 10_000
    """A broker without a heartbeat for so long is dead."""
    heartbeat_interval_ms: Millis = 1_000
    """How often a broker says that it is alive."""
    startup_timeout_ms: Annotated[int, Meta(ge=0)] = 0
    """How long the others may take once a first broker of a cluster that starts as a whole is back; 0: 3 sessions."""
    reelect_timeout_ms: Millis = 2_000
    """When the owner of a moving partition has closed it and not asked for the election so long, it is held anyway."""
    snapshot_entries: Annotated[int, Meta(ge=10)] = 10_000
    """Journal entries after which a snapshot is taken and the journal rewritten."""
    command_timeout_ms: Millis = 10_000
    """After this a command's outcome is unknown and the caller asks again with the same id."""


BalancerMode = Literal["off", "advise", "on"]


class BalancerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the active controller evens out load between brokers; the same on all controllers."""

    mode: BalancerMode = "advise"
    """`off`: nothing is planned; `advise`: the plan is shown, and moves nothing unless asked; `on`: it is done."""
    interval_ms: Annotated[int, Meta(ge=100)] = 10_000
    """How often a new plan is made; brokers that come, go or drain are looked at sooner."""
    max_moves_in_flight: Annotated[int, Meta(ge=1, le=1_024)] = 128
    """Partitions that move at a time, all moves counted, before the balancer adds more."""
    max_moves_in_plan: Annotated[int, Meta(ge=1, le=10_000)] = 1_024
    """Bound of one plan; the next one is made when it is done and measured."""
    bytes_threshold_percent: Annotated[int, Meta(ge=1, le=1_000)] = 20
    """How far a broker's bytes in and out may be from the mean; beyond it they are brought within half of this."""
    partitions_threshold_percent: Annotated[int, Meta(ge=1, le=1_000)] = 10
    """The same for the number of partitions."""
    requests_threshold_percent: Annotated[int, Meta(ge=1, le=1_000)] = 30
    """The same for requests."""
    min_bytes_per_s: Annotated[int, Meta(ge=0)] = 1_048_576
    """Bytes in and out of a mean broker, below which they are not worth a move."""
    min_requests_per_s: Annotated[int, Meta(ge=0)] = 500
    """Requests of a mean broker, below which they are not worth a move."""
    min_gain_permille: Annotated[int, Meta(ge=1, le=1_000)] = 1
    """What a move must gain at least, in thousandths of a mean broker's load."""
    cooldown_ms: Annotated[int, Meta(ge=0)] = 300_000
    """A partition that has moved stays for so long, unless brokers come or go."""


class ScaleSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one broker can carry, and how many there may be: for `/scale`; the same on all controllers."""

    min_brokers: Positive = 1
    """Fewer are never wanted."""
    max_brokers: Positive = 100
    """More are never wanted."""
    broker_bytes_in_per_s: Positive = 50_000_000
    """Capacity of one broker: bytes produced a second."""
    broker_bytes_out_per_s: Positive = 150_000_000
    """Capacity of one broker: bytes consumed a second."""
    broker_requests_per_s: Positive = 5_000
    """Capacity of one broker: Produce and Fetch requests with records a second, each partition in one counted."""
    broker_cpu_percent: Positive = 100
    """Capacity of one broker: percent of a core; a broker's event loop uses one."""
    utilization_percent: Annotated[int, Meta(ge=1, le=100)] = 70
    """How much of its capacity a broker shall carry."""
    hysteresis_percent: Annotated[int, Meta(ge=0, le=99)] = 20
    """Fewer are wanted only if they then carry so much less than that mark."""
    up_window_ms: Annotated[int, Meta(ge=0)] = 15_000
    """More are wanted when they were needed for so long."""
    down_window_ms: Annotated[int, Meta(ge=0)] = 300_000
    """Fewer are wanted when more were not needed for so long."""
