"""The shape of a simulated cluster, drawn from the seed: small and fast, so that a minute covers hours.

Entry: `Shape.draw`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from tidelog.broker.inputs import BrokerSettings
from tidelog.broker.settings import AdminSettings, GroupSettings, KafkaSettings, LogSettings, ReplicationSettings
from tidelog.controller.image.feed import DEFAULT_LIMITS, FeedLimits
from tidelog.controller.model.levels import NEWEST, OLDEST
from tidelog.controller.model.settings import BalancerSettings, ControllerSettings, ScaleSettings
from tidelog.storage.settings import CacheSettings, CleanSettings, CompactionSettings, UploadSettings, WalSettings
from tidelog.stream.cleaning.key_map import ENTRY_BYTES
from tidelog.stream.producer_state import ROWS_PER_PIECE

KIB = 1 << 10
MIB = 1 << 20
RPC_PORT = 9193
KAFKA_PORT = 9092
PEER_PORT = 9094
SECRET = b"the secret of a simulated cluster"
"""The cluster secret: brokers accept hints from each other only if there is one."""
FIRST_CONTROLLER = 101
"""First node id of processes that are only controllers; brokers count from 1."""


WRITES_STATE = 1 / 5
"""The share of clusters that write their metadata to the bucket."""
REPLICATED = 1 / 3
"""The share of clusters whose WALs have several replicas."""
RAISED_LATER = 1 / 4
"""The share of those in which replication may have to wait for the feature level."""
BANKS = 1 / 3
"""The share of clusters with transactional clients."""
TABLES = 1 / 3
"""The share of clusters with a compacted topic."""
KEEPERS = 1 / 2
"""The share of those that are written to in transactions."""
AT_LEVEL_0 = 1 / 4
"""The share of clusters that were founded by a version before feature levels."""


def host_of(node_id: int) -> str:
    """The host that a node runs on."""
    return f"b{node_id}" if node_id < FIRST_CONTROLLER else f"c{node_id - FIRST_CONTROLLER + 1}"


@dataclass(slots=True)
class RaftShape:
    """What a seed draws of the controllers' Raft."""

    piece_bytes: int = MIB
    """Of a snapshot that is sent."""
    buffer_bytes: int = MIB
    """Of a socket between members: sending a snapshot that is larger takes many turns."""


@dataclass(slots=True)
class Shape:
    """One cluster."""

    controllers: int
    brokers: int
    wal: Literal["disk", "s3"]
    partitions: int
    spares: int = 0
    """Number of brokers that are not started, for operators to add."""
    embedded: bool = False
    """Brokers are also controllers, as far as there are brokers: one life, one host, one crash for both."""
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    raft: RaftShape = field(default_factory=RaftShape)
    balancer: BalancerSettings = field(default_factory=BalancerSettings)
    scale: ScaleSettings = field(default_factory=ScaleSettings)
    log: LogSettings = field(default_factory=LogSettings)
    group: GroupSettings = field(default_factory=GroupSettings)
    wal_settings: WalSettings = field(default_factory=WalSettings)
    upload: UploadSettings = field(default_factory=UploadSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    compaction: CompactionSettings = field(default_factory=CompactionSettings)
    clean: CleanSettings = field(default_factory=CleanSettings)
    feed: FeedLimits = DEFAULT_LIMITS
    writes_state: bool = False
    """Whether the active controller writes its metadata to the bucket."""
    level: int = NEWEST
    """The feature level that it begins at (docs/design/0013-feature-levels.md)."""
    replication: ReplicationSettings = field(default_factory=ReplicationSettings)
    bank: bool = False
    """Whether transactional clients take part."""
    table: bool = False
    """Whether there is a compacted topic."""
    keeper: bool = False
    """Whether that is written to in transactions, too."""
    session_partitions: int = 50_000
    """How many partitions a broker has in fetch sessions at most."""
    racks: int = 0
    """Over how many racks brokers are spread; 0: they name none."""

    @property
    def replicas(self) -> int:
        """How many brokers keep each WAL."""
        return self.replication.total_replicas

    def rack_of(self, number: int) -> str:
        """Return the rack of a broker, by its id, or of a consumer that draws a number; empty: none."""
        return f"rack-{number % self.racks}" if self.racks else ""

    @property
    def members(self) -> dict[int, str]:
        """The quorum: `host:port` by node id."""
        both = min(self.controllers, self.brokers) if self.embedded else 0
        ids = [*range(1, both + 1), *range(FIRST_CONTROLLER, FIRST_CONTROLLER + self.controllers - both)]
        return {node_id: f"{host_of(node_id)}:{RPC_PORT}" for node_id in ids}

    def is_local(self, node_id: int) -> bool:
        """Whether this is the only controller, and a broker beside it follows it without a connection."""
        return self.embedded and self.controllers == 1 and node_id in self.members

    @classmethod
    def draw(
        cls, rng: random.Random, *, brokers: int = 0, controllers: int = 0, wal: str = "", embedded: bool = False
    ) -> Shape:
        """Draw a cluster from the seed; given values are not drawn."""
        shape = cls(
            controllers=controllers or rng.choice((1, 1, 3, 3, 3, 3, 5)),
            brokers=brokers or rng.choice((1, 2, 3, 3)),
            wal="disk" if (wal or rng.choice(("disk", "s3"))) == "disk" else "s3",
            partitions=rng.randint(1, 4),
            spares=rng.choice((0, 0, 1)),
            embedded=embedded,
        )
        shape.controller = ControllerSettings(
            session_timeout_ms=rng.choice((1_500, 3_000)),
            heartbeat_interval_ms=500,
            reelect_timeout_ms=1_000,
            command_timeout_ms=3_000,
            read_grace_ms=2_500,
            snapshot_entries=rng.choice((20, 50, 400, 10_000)),
            members=[f"{node_id}@{address}" for node_id, address in shape.members.items()],
        )
        shape.raft = RaftShape(rng.choice((128, KIB, MIB)), rng.choice((512, 4 * KIB, MIB)))
        shape.balancer = BalancerSettings(
            mode=rng.choice(("off", "advise", "on")), interval_ms=5_000, cooldown_ms=5_000, min_bytes_per_s=1
        )
        shape.log = LogSettings(
            segment_bytes=rng.choice((8, 64, 1024)) * KIB,
            retention_check_interval_ms=4_000,
            recovery_batches=64,
            producers_per_piece=rng.choice((1, 3, ROWS_PER_PIECE)),
            move_drain_timeout_ms=3_000,
        )
        shape.group = GroupSettings(
            min_session_timeout_ms=1_000, initial_rebalance_delay_ms=200, offsets_topic_partitions=rng.randint(1, 3)
        )
        shape.wal_settings = WalSettings(
            kind=shape.wal, segment_bytes=MIB, max_bytes=rng.choice((4, 16)) * MIB, max_record_bytes=MIB
        )
        shape.upload = UploadSettings(
            size_bytes=rng.choice((4, 32, 256)) * KIB,
            age_ms=rng.choice((500, 2_000, 5_000)),
            split_bytes=rng.choice((2, 16, 1024)) * KIB,
            block_bytes=4 * KIB,
            max_in_flight=rng.choice((1, 2, 4)),
            prepare_ttl_ms=rng.choice((15_000, 60_000)),
            delete_delay_ms=rng.choice((1_000, 5_000)),
        )
        shape.cache = CacheSettings(
            log_bytes=rng.choice((4, 16)) * MIB, block_bytes=rng.choice((0, 64, 1024)) * KIB, cold_in_flight_bytes=MIB
        )
        shape.compaction = CompactionSettings(
            interval_ms=rng.choice((1_000, 5_000)), min_objects=rng.choice((2, 4)), age_ms=10_000, target_bytes=64 * KIB
        )
        shape.clean = CleanSettings(interval_ms=12_000, orphan_age_ms=25_000)
        return shape

    def draw_feed(self, rng: random.Random) -> None:
        """Draw how far behind a follower must be to load an image, in how many chunks it loads it, and room for fetch
        sessions."""
        self.feed = FeedLimits(
            ring_deltas=rng.choice((4, 64, 4_096)),
            chunk_rows=rng.choice((3, 20, 5_000)),
            chunk_bytes=rng.choice((200, 1 << 20)),
        )
        self.session_partitions = rng.choice((6, 50_000))

    def draw_replication(self, rng: random.Random) -> None:
        """Draw whether several brokers keep each WAL, and by which policy; then there are enough of them, with disks.

        Whether it costs a broker more than the loss of its own disk is up to the policy (`tolerates_loss`).
        """
        if rng.random() >= REPLICATED:
            return
        total, policy = rng.choice(((3, "majority"), (3, "majority"), (3, "degrade"), (3, "all"), (2, "degrade")))
        self.replication = ReplicationSettings(
            total_replicas=total,
            enable_auto_in_sync_replicas=policy == "degrade",
            all_ack_in_sync_state_set=policy == "all",
            slave_timeout_ms=rng.choice((500, 1_500)),
            max_behind_ms=rng.choice((1_000, 4_000)),
            heartbeat_ms=rng.choice((200, 500)),
            silence_ms=rng.choice((1_000, 3_000)),
            hung_disk_ms=1_000,
            window_bytes=MIB,
            live_bytes=MIB,
        )
        if rng.random() >= RAISED_LATER:
            self.level = NEWEST
        self.racks = rng.choice((0, 2, 3))
        self.brokers = max(self.brokers, total)
        self.wal = "disk"
        self.wal_settings = msgspec.structs.replace(self.wal_settings, kind="disk")
        members = [f"{node_id}@{address}" for node_id, address in self.members.items()]
        self.controller = msgspec.structs.replace(self.controller, members=members)

    def draw_transactions(self, rng: random.Random) -> None:
        """Draw whether there are transactional clients, and what their coordinators are like."""
        self.bank = rng.random() < BANKS
        self.group = msgspec.structs.replace(
            self.group,
            transaction_topic_partitions=rng.randint(1, 3),
            transaction_check_interval_ms=rng.choice((500, 2_000)),
        )

    def draw_table(self, rng: random.Random, *, surely: bool = False, keeper: bool = False) -> None:
        """Draw whether there is a compacted topic, and then how often, how fast and how far a round goes."""
        self.table = rng.random() < TABLES or surely
        self.keeper = rng.random() < KEEPERS or keeper
        if not self.table:
            return
        self.log = msgspec.structs.replace(
            self.log,
            cleaner_interval_ms=rng.choice((200, 1_000)),
            cleaner_map_bytes=rng.choice((20, 64, 4_096)) * ENTRY_BYTES,
            cleaner_bytes_per_s=rng.choice((32 * MIB, 64 * KIB, 16 * KIB)),
        )
        self.compaction = msgspec.structs.replace(
            self.compaction,
            target_bytes=rng.choice((8, 64)) * KIB,
            throttle_bytes_per_s=rng.choice((32 * MIB, 64 * KIB)),
        )

    def draw_level(self, rng: random.Random) -> None:
        """Draw the feature level that the cluster begins at."""
        self.level = OLDEST if rng.random() < AT_LEVEL_0 else NEWEST

    def draw_state(self, rng: random.Random) -> None:
        """Draw whether and how often the metadata is written to the bucket."""
        self.writes_state = rng.random() < WRITES_STATE
        self.controller = msgspec.structs.replace(
            self.controller,
            state_interval_ms=rng.choice((2_000, 10_000, 30_000)),
            state_after_change_ms=rng.choice((500, 2_000, 5_000)),
            state_kept=rng.choice((2, 3)),
        )

    def broker_settings(self, host: str, *, rack: str = "", is_controller: bool = False) -> BrokerSettings:
        """The sections that a broker on `host` reads."""
        return BrokerSettings(
            kafka=KafkaSettings(
                host=host,
                port=KAFKA_PORT,
                peer_port=PEER_PORT,
                auto_create_topics=False,
                rack=rack,
                fetch_session_partitions=self.session_partitions,
            ),
            admin=AdminSettings(host=host, port=0),
            log=self.log,
            group=self.group,
            upload=self.upload,
            cache=self.cache,
            compaction=self.compaction,
            clean=self.clean,
            replication=self.replication,
            roles=["controller", "broker"] if is_controller else ["broker"],
            flat=dict,
        )
