"""Sections `[kafka]`, `[admin]`, `[tracing]`, `[log]`, `[group]`, `[replication]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tidelog.controller.model.replication import PolicyRecord
from tidelog.storage.replication.policy import MAX_REPLICAS
from tidelog.stream.producer_state import ROWS_PER_PIECE

MIB = 1 << 20

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(ge=1)]


class KafkaSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[kafka]`: the Kafka listener and its limits."""

    host: str = "127.0.0.1"
    """Address the Kafka listener binds."""
    port: Port = 9092
    """Port of the Kafka listener; 0 chooses a free one. `tidelog up` gives broker i port + i - 1."""
    advertised_host: str = ""
    """Host announced to clients; empty: `host`."""
    advertised_port: Port = 0
    """Port announced to clients; 0: `port`."""
    peer_port: Port = 0
    """Port on `host` for hints from other brokers about partitions that move here; 0 chooses a free
    one. `tidelog up` gives broker i peer_port + i - 1."""
    peer_advertised_host: str = ""
    """Host announced to other brokers instead of `advertised_host`, if clients use another name."""
    rack: str = ""
    """Rack of this broker (Kafka: broker.rack)."""
    replica_selector: Literal["rack", "leader"] = "rack"
    """Which replica a consumer is told to read that names its rack (client.rack, KIP-392): one in sync in its rack,
    or always the leader (Kafka: replica.selector.class)."""
    max_request_bytes: Annotated[int, Meta(ge=1024, le=(1 << 31) - 1)] = 100 * MIB
    """A larger frame closes the connection before memory is allocated (Kafka: socket.request.max.bytes)."""
    max_connections: Positive = 4096
    """Open connections; further ones are closed at once (Kafka: max.connections)."""
    max_connections_per_address: Positive = 2048
    """Open connections from one address; further ones are closed at once (Kafka: max.connections.per.ip)."""
    max_in_flight_bytes: Annotated[int, Meta(ge=MIB)] = 512 * MIB
    """Bytes of requests being received or handled; at the bound the broker stops reading from sockets."""
    max_unread_bytes: Annotated[int, Meta(ge=MIB)] = 512 * MIB
    """Bytes of responses that clients have not read; at the bound no Fetch starts and stalled clients are dropped."""
    receive_timeout_ms: Positive = 30_000
    """A request, and the first one of a connection, must arrive within this time, or at 16 KiB/s after it."""
    idle_timeout_ms: Positive = 600_000
    """A connection without a request for this long is closed (Kafka: connections.max.idle.ms)."""
    auto_create_topics: bool = True
    """A Metadata request may create the topics it names (Kafka: auto.create.topics.enable)."""
    num_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 4
    """Partitions of a topic created without a number."""
    message_max_bytes: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 1_048_588
    """Largest record batch (Kafka: message.max.bytes); a topic's max.message.bytes overrides it."""
    fetch_max_bytes: Annotated[int, Meta(ge=1024, le=(1 << 31) - 1)] = 55 * MIB
    """Largest Fetch response, whatever the client requests (Kafka: fetch.max.bytes)."""
    fetch_session_partitions: Annotated[int, Meta(ge=0, le=10_000_000)] = 50_000
    """Partitions in all fetch sessions (KIP-227) together, some 1 KB each; 0: no sessions."""
    slow_requests: Annotated[int, Meta(ge=0, le=64)] = 8
    """Requests of each API that are kept of each minute of the last hour, the slowest, for `tidelog explain --slow`;
    some MB in all. 0: none."""
    telemetry_max_bytes: Annotated[int, Meta(ge=0, le=2 * MIB)] = MIB
    """Largest push of a client's metrics (KIP-714), as sent (Kafka: telemetry.max.bytes); 0: clients send none."""
    telemetry_series: Annotated[int, Meta(ge=1, le=1_000_000)] = 2_000
    """Series of all clients' metrics (KIP-714) in `/metrics`; further ones are dropped. Each takes some 1 KB, and up to
    40 µs of the event loop at a scrape."""


class AdminSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[admin]`: the admin HTTP listener."""

    host: str = "127.0.0.1"
    """Address the admin HTTP listener binds."""
    port: Annotated[int, Meta(ge=-1, le=65_535)] = -1
    """-1: 9644, or the first free one after it on a machine with several brokers; 0 chooses a free one. Clients find it
    through DescribeConfigs of the broker (`tidelog.admin.url`). `tidelog up` gives broker i port + i - 1."""
    advertised_host: str = ""
    """Host announced to clients; empty: `host`."""
    console: bool = False
    """Serve the console (docs/console.md) at `/console/` of this listener. It shows records, and asks for the token of
    the cluster's secret."""
    schema_registry: Annotated[str, Meta(pattern="^(https?://[^/?#@]+/?)?$")] = ""
    """Address of a schema registry, as http://HOST:PORT, by which the console reads values of Avro and Protobuf; empty:
    none."""


class TracingSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[tracing]`: OpenTelemetry traces (docs/operations.md). They need the extra `tidelog[tracing]`."""

    endpoint: Annotated[str, Meta(pattern=r"^(https?://[^/?#@\s]+(/[^?#\s]*)?)?$")] = ""
    """Address of an OpenTelemetry collector that takes OTLP over HTTP, as http://HOST:4318; without a path,
    `/v1/traces` is added. Empty: nothing is traced."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of requests that are traced. A Produce request whose records name a trace (`traceparent`) is traced if that
    trace is sampled, whatever this is; moves of partitions and uploads always are."""
    service_name: Annotated[str, Meta(min_length=1, max_length=255)] = "tidelog"
    """Name of the service in traces (OpenTelemetry: service.name)."""


class LogSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[log]`: defaults of topics, named as in Kafka."""

    retention_ms: Annotated[int, Meta(ge=-1)] = 604_800_000
    """Age at which a segment is deleted; -1: never (Kafka: log.retention.ms)."""
    retention_bytes: Annotated[int, Meta(ge=-1)] = -1
    """Size of a partition above which its oldest segments are deleted; -1: no bound."""
    segment_bytes: Annotated[int, Meta(ge=14)] = 1 << 30
    """Size at which a segment of a partition is rolled."""
    segment_ms: Positive = 604_800_000
    """Age at which a segment is rolled."""
    retention_check_interval_ms: Positive = 300_000
    """How often retention is applied."""
    cleaner_enabled: bool = True
    """Compact the topics with `cleanup.policy=compact` (Kafka: log.cleaner.enable)."""
    cleaner_interval_ms: Positive = 15_000
    """How often to look for a partition to compact (Kafka: log.cleaner.backoff.ms)."""
    cleaner_map_bytes: Annotated[int, Meta(ge=1 << 20)] = 128 << 20
    """Memory for the keys of one compaction, 48 bytes each (Kafka: log.cleaner.dedupe.buffer.size; ≥ 1 MiB). More
    keys take several compactions."""
    cleaner_bytes_per_s: Annotated[int, Meta(ge=1024)] = 32 << 20
    """Limit of bytes that a compaction reads and writes per second (Kafka: log.cleaner.io.max.bytes.per.second; ≥
    1,024). It must be more than what producers write to compacted topics."""
    recovery_batches: Positive = 16_384
    """Batches that the partitions of a broker may have behind their checkpoints, all together. At more, those with the
    most write a checkpoint: whoever leads them after this broker's death scans these batches first, in about 10 µs
    each."""
    producer_id_expiration_ms: Positive = 86_400_000
    """An idempotent producer that is silent for this long is forgotten."""
    producers_per_piece: Annotated[int, Meta(ge=1, le=ROWS_PER_PIECE)] = ROWS_PER_PIECE
    """A checkpoint of a partition with more idempotent producers has them in pieces of this many, which are written
    one after the other between appends (1 to 1,024). Fewer: a shorter pause for each piece, and more of them."""
    timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    """Source of a record's timestamp (Kafka: message.timestamp.type)."""
    moves_at_once: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Partitions leaving this broker that are closed concurrently; as many more upload meanwhile."""
    move_drain_timeout_ms: Positive = 5_000
    """How long a moving partition may be closed during its last upload; after that it is served here again."""


class GroupSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[group]`: consumer groups and transactions, named as in Kafka."""

    min_session_timeout_ms: Positive = 6_000
    """Smallest session time-out that a member may request."""
    max_session_timeout_ms: Positive = 1_800_000
    """Largest session time-out that a member may request."""
    initial_rebalance_delay_ms: Annotated[int, Meta(ge=0)] = 3_000
    """How long the first rebalance of an empty group waits for more members."""
    max_size: Positive = 2_147_483_647
    """Limit of members in one group."""
    members_max_bytes: Annotated[int, Meta(ge=1 << 20)] = 268_435_456
    """Memory for the members of all groups of a broker: their metadata, as long as their sessions, and assignments. At
    the bound no member joins (COORDINATOR_NOT_AVAILABLE, which clients retry)."""
    offsets_topic_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 16
    """Partitions of `__consumer_offsets`; fixed when the topic is created (Kafka's default is 50)."""
    transaction_topic_partitions: Annotated[int, Meta(ge=1, le=10_000)] = 50
    """Partitions of `__transaction_state`; fixed when the topic is created."""
    transaction_max_timeout_ms: Positive = 900_000
    """Largest time-out that a transactional producer may request (Kafka: transaction.max.timeout.ms)."""
    transactional_id_expiration_ms: Positive = 604_800_000
    """How long a transactional id may be idle before it is forgotten (Kafka: transactional.id.expiration.ms)."""
    transaction_check_interval_ms: Positive = 10_000
    """How often transactions over their time-out are searched for and aborted."""
    transaction_two_phase_commit: bool = False
    """Whether producers may keep a prepared transaction over a restart, and have none of theirs ended by time
    (Kafka: transaction.two.phase.commit.enable, KIP-939)."""
    offsets_retention_ms: Positive = 604_800_000
    """How long offsets of an empty group are kept."""
    offsets_check_interval_ms: Positive = 600_000
    """How often expired offsets are searched for."""
    offset_metadata_max_bytes: Annotated[int, Meta(ge=0)] = 4096
    """Bound on the metadata string of a committed offset."""


class ReplicationSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Section `[replication]`: the hot tier.

    The policy is that of this broker's replica set when its first start makes one; `tidelog replica-set set-policy`
    changes it later.
    """

    total_replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = 1
    """Brokers that keep the newest seconds of a replica set: 1 to 9 (Kafka: default.replication.factor). With more than
    one the cluster needs `wal.kind = disk` and `controller.secret_file`."""
    in_sync_replicas: Annotated[int, Meta(ge=0, le=MAX_REPLICAS)] = 0
    """Brokers that must have a record before it is acknowledged; 0: a majority of `total_replicas`."""
    min_in_sync_replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = 1
    """The least that `enable_auto_in_sync_replicas` may go down to."""
    enable_auto_in_sync_replicas: bool = False
    """Whether fewer acknowledge while brokers are missing (auto-degrade)."""
    all_ack_in_sync_state_set: bool = False
    """Whether all replicas in sync must acknowledge, as in Kafka."""
    election_priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] = 0
    """Among members whose WALs are equally far, the one with the larger number is elected; of equals the one with the
    smaller broker id. It counts in all sets in which this broker has a replica, from its next start on;
    `tidelog replica-set set-priority` sets it for one set. The preferred master leads again whatever its number is."""
    slave_timeout_ms: Positive = 3_000
    """How long a replica that has not caught up still counts as in sync."""
    max_behind_ms: Positive = 15_000
    """A replica that has not caught up for so long leaves the in-sync set (Kafka: replica.lag.time.max.ms)."""
    heartbeat_ms: Positive = 1_000
    """Interval of signs of life on an idle replication connection."""
    silence_ms: Positive = 5_000
    """A replication connection without one for so long is closed."""
    hung_disk_ms: Positive = 10_000
    """A master whose disk completes nothing for so long, while records wait for it, has another replica that is in sync
    elected in its place, as has one that was elected and cannot begin. Several times the longest pause that the disk
    makes when it is well."""
    window_bytes: Annotated[int, Meta(ge=MIB, le=1024 * MIB)] = 16 * MIB
    """Bytes on their way to one follower; at the bound it waits for acknowledgements."""
    live_bytes: Annotated[int, Meta(ge=MIB, le=1024 * MIB)] = 16 * MIB
    """Newest bytes of a replicated WAL kept in memory for followers; older ones are read from the files."""
    catch_up_bytes_per_s: Annotated[int, Meta(ge=0)] = 0
    """Bound on what a broker reads from its WALs for replicas that are not in sync, per second over all of them. It
    must be more than producers write. 0: none, for the reads give way to producers anyway, and fewer copies are worse
    than a busy disk. Replicas in sync are not bounded by it, nor any while writes are refused."""
    prefetch_bytes_per_s: Annotated[int, Meta(ge=0)] = 4 * MIB
    """Bound on what a broker reads of the bucket, per second over all replica sets that it follows, so that their
    partitions open without it after an election. 0: nothing; then they are read when they open."""
    tls_cert_file: str = ""
    """PEM file with this broker's certificate for connections between brokers (`kafka.peer_port`). With it,
    `tls_key_file` and `tls_ca_file` these have TLS 1.3, and both sides check the other's certificate. Set all three, on
    all brokers, or none. Files that change are read again."""
    tls_key_file: str = ""
    """PEM file with the private key that belongs to `tls_cert_file`, without a password."""
    tls_ca_file: str = ""
    """PEM file with the authority that has signed the certificates of all brokers, best one for this cluster alone."""
    tls_check_host_names: bool = True
    """Whether a broker's certificate must name the host at which the others reach it (kafka.peer_advertised_host)."""

    def policy(self) -> PolicyRecord:
        """Return the policy of a new replica set."""
        return PolicyRecord(
            self.total_replicas,
            self.in_sync_replicas or self.total_replicas // 2 + 1,
            self.min_in_sync_replicas,
            self.enable_auto_in_sync_replicas,
            self.all_ack_in_sync_state_set,
            slave_timeout_s=self.slave_timeout_ms / 1000,
            max_behind_s=self.max_behind_ms / 1000,
        )
