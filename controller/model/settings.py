"""Sections `[controller]`, `[balancer]`, `[scale]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65_535)]
Millis = Annotated[int, Meta(ge=1)]
Positive = Annotated[int, Meta(ge=1)]


class ControllerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Listener, quorum and time-outs of the controller."""

    host: str = "127.0.0.1"
    """Address on which the RPC server listens."""
    port: Port = 0
    """RPC port; 0: the port in `members`, else a free port, which is written to the data directory. `tidelog up`
    assigns port + i - 1 to controller i when the cluster starts for the first time, and keeps it."""
    members: list[str] = msgspec.field(default_factory=list)
    """The initial quorum: `id@host:port` of 1, 3 or 5 controllers, the same on all nodes; empty: one controller."""
    secret_file: str = ""
    """File with the secret that all nodes share: 16 bytes or more, readable by its owner only. `members` needs it."""
    endpoints: list[str] = msgspec.field(default_factory=list)
    """`host:port` at which this broker reaches the controllers, if it differs from `members`."""
    session_timeout_ms: Millis = 10_000
    """Time without a heartbeat after which a broker is considered dead."""
    heartbeat_interval_ms: Millis = 1_000
    """Interval between a broker's heartbeats."""
    startup_timeout_ms: Annotated[int, Meta(ge=0)] = 0
    """When a cluster starts as a whole: time to wait for the other brokers after the first is back; 0: 3 sessions."""
    reelect_timeout_ms: Millis = 2_000
    """Time after which the target of a move is elected if the source closed the partition and sent no request."""
    replica_repair_after_ms: Millis = 600_000
    """Time after which a dead broker's replicas are replaced on other brokers; the same on all controllers."""
    preferred_master_enable: bool = True
    """Whether the broker with a replica set's own id becomes its master again when it is back and in sync for 30 s
    (Kafka: auto.leader.rebalance.enable); the same on all controllers."""
    replica_balance_enable: bool = True
    """Whether replicas move, one at a time, to brokers that have fewer: those that come later, or are in a rack that a
    replica set lacks; the same on all controllers."""
    read_grace_ms: Annotated[int, Meta(ge=100)] = 60_000
    """Time without an answer of the active controller after which a broker reads nothing from the bucket any more,
    because objects that it knows may be deleted; the same on all controllers."""
    lease_max_hold_ms: Annotated[int, Meta(ge=1_000)] = 86_400_000
    """Time for which a lease of a reader outside the cluster may hold one version of the metadata, and with it the
    objects that were destroyed later; the same on all controllers."""
    snapshot_entries: Annotated[int, Meta(ge=10)] = 10_000
    """Journal entries after which a snapshot is taken and the journal is rewritten."""
    snapshot_bytes: Annotated[int, Meta(ge=16 << 20)] = 64 << 20
    """Bytes of the journal after which the same is done: a commit of many streams is an entry of 57 KB and more, and
    the journal is kept in memory, too. The smallest value is four times the largest command."""
    state_interval_ms: Annotated[int, Meta(ge=100)] = 60_000
    """Time after which the active controller writes the changed metadata to the bucket, from which
    `tidelog cluster rebuild` makes a cluster."""
    state_after_change_ms: Annotated[int, Meta(ge=100)] = 5_000
    """The same after a change of topics, partitions, configurations or brokers, which no object in the bucket tells."""
    state_kept: Annotated[int, Meta(ge=2, le=100)] = 3
    """States of the metadata that are kept in the bucket; older ones are deleted."""
    command_timeout_ms: Millis = 10_000
    """Time after which the outcome of a command is unknown and the caller repeats it with the same id."""


BalancerMode = Literal["off", "advise", "on"]


class BalancerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the active controller balances load between brokers; the same on all controllers."""

    mode: BalancerMode = "advise"
    """`off`: no plan; `advise`: plans are shown and executed only on request; `on`: plans are executed."""
    interval_ms: Annotated[int, Meta(ge=100)] = 10_000
    """Interval between plans; a plan is made sooner when a broker joins, leaves or drains."""
    max_moves_in_flight: Annotated[int, Meta(ge=1, le=1_024)] = 128
    """Concurrent moves, of any origin, up to which the balancer starts more."""
    max_moves_in_plan: Annotated[int, Meta(ge=1, le=10_000)] = 1_024
    """Moves in one plan; the next plan is made when they are done and the load is measured again."""
    bytes_threshold_percent: Annotated[int, Meta(ge=1, le=1_000)] = 20
    """Tolerated deviation of a broker's bytes in and out from the mean; a larger one is reduced to half of this."""
    partitions_threshold_percent: Annotated[int, Meta(ge=1, le=1_000)] = 10
    """The same for the number of partitions."""
    requests_threshold_percent: Annotated[int, Meta(ge=1, le=1_000)] = 30
    """The same for requests."""
    min_bytes_per_s: Annotated[int, Meta(ge=0)] = 1_048_576
    """Mean bytes in and out of a broker below which they cause no moves."""
    min_requests_per_s: Annotated[int, Meta(ge=0)] = 500
    """Mean requests of a broker below which they cause no moves."""
    min_gain_permille: Annotated[int, Meta(ge=1, le=1_000)] = 1
    """Minimum gain of a move, in thousandths of a mean broker's load."""
    cooldown_ms: Annotated[int, Meta(ge=0)] = 300_000
    """Time for which a moved partition is not moved again, unless a broker joins or leaves."""


class ScaleSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Capacity of one broker and bounds of their number, for `/scale`; the same on all controllers."""

    min_brokers: Positive = 1
    """Lower bound of the wanted number of brokers."""
    max_brokers: Positive = 100
    """Upper bound of the wanted number of brokers."""
    broker_bytes_in_per_s: Positive = 50_000_000
    """Capacity of one broker: bytes produced per second."""
    broker_bytes_out_per_s: Positive = 150_000_000
    """Capacity of one broker: bytes consumed per second."""
    broker_requests_per_s: Positive = 5_000
    """Capacity of one broker: Produce and Fetch requests with records per second, counted once for each partition."""
    broker_cpu_percent: Positive = 100
    """Capacity of one broker: percent of a core. The event loop of a broker uses one core."""
    utilization_percent: Annotated[int, Meta(ge=1, le=100)] = 70
    """Target utilisation of a broker's capacity."""
    hysteresis_percent: Annotated[int, Meta(ge=0, le=99)] = 20
    """Fewer brokers are wanted only if their utilisation stays this far below the target."""
    up_window_ms: Annotated[int, Meta(ge=0)] = 15_000
    """How long more brokers must be needed before they are wanted."""
    down_window_ms: Annotated[int, Meta(ge=0)] = 300_000
    """How long fewer brokers must suffice before they are wanted."""
