"""Several brokers and one controller in this process, on a loop in a thread of their own: all parts real, over TCP.

    with Cluster(tmp_path, brokers=3) as cluster:
        cluster.move("t", 0, to=2)
        cluster.bucket.failing = True

The bucket is shared and can be made slow or to fail. For brokers that die use processes
(`tests.support.tidelog_process`).
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support.clients import wait_until
from tidelog.broker.inputs import BrokerIdentity, BrokerSettings, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.node import BrokerNode
from tidelog.broker.settings import AdminSettings, GroupSettings, KafkaSettings, LogSettings, ReplicationSettings
from tidelog.chaos.ports import free_port
from tidelog.controller.image.image import Image
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.commands import PartitionMove
from tidelog.controller.model.records import PartitionRecord
from tidelog.controller.model.settings import ControllerSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.handshake import Credentials
from tidelog.process.replica_disks import DirectoryReplicaDisks
from tidelog.runtime.clock import Clock, SystemClock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.network import TcpNetwork
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.bucket.proof import BucketProof
from tidelog.storage.bucket.store import ObjectInfo, View
from tidelog.storage.settings import CacheSettings, CleanSettings, CompactionSettings, UploadSettings, WalSettings
from tidelog.storage.storage import Storage
from tidelog.storage.wal.base import Wal
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.s3.wal import S3Wal

T = TypeVar("T")


class Bucket(MemoryObjectStore):
    """A bucket for all brokers that fails or takes its time when told to."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.failing = False
        self.delay_s = 0.0
        self.reads = 0
        """GETs answered."""

    async def _obey(self) -> None:
        if self.failing:
            await asyncio.sleep(0.02)
            raise Unavailable("503 on purpose")
        await asyncio.sleep(self.delay_s)

    async def put(self, key: str, body: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        await self._obey()
        return await super().put(key, body, if_absent=if_absent)

    async def get(self, key: str) -> bytes:
        await self._obey()
        self.reads += 1
        return await super().get(key)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[View]:
        await self._obey()
        self.reads += 1
        return await super().get_ranges(key, ranges)


class Cluster:
    """See the module. Methods are for the test's thread."""

    def __init__(
        self,
        directory: Path,
        *,
        brokers: int = 3,
        log: LogSettings | None = None,
        wal: str = "disk",
        session_timeout_ms: int = 10_000,
        replication: ReplicationSettings | None = None,
        transaction_check_interval_ms: int = 10_000,
        advertised_ports: Mapping[int, int] | None = None,
        clocks: Mapping[int, Clock] | None = None,
        admins: Mapping[int, AdminSettings] | None = None,
        **upload: int,
    ) -> None:
        """`replication`: the cluster has a secret, and WALs that are replicated so. `advertised_ports`, `clocks`,
        `admins`: of some brokers."""
        self._advertised_ports = advertised_ports or {}
        self._clocks = clocks or {}
        self._admins = admins or {}
        self._directory = directory
        self.replication = replication or ReplicationSettings()
        self._secret = b"s" * 32 if replication is not None else None
        self.log = log or LogSettings()
        self._upload = UploadSettings(**upload)
        self._group = GroupSettings(
            offsets_topic_partitions=2,
            initial_rebalance_delay_ms=0,
            transaction_topic_partitions=4,
            transaction_check_interval_ms=transaction_check_interval_ms,
        )
        self._wal_kind = wal
        self._session_timeout_ms = session_timeout_ms
        self._ids = range(1, brokers + 1)
        self.bucket = Bucket()
        self.nodes: dict[int, BrokerNode] = {}
        self.controller: ControllerNode
        self._disks: dict[int, list[FileDisk]] = {}
        self._ports: dict[int, int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Run `work` on the cluster's loop."""
        return self.begin(work).result(timeout_s)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin `work` on the cluster's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, action: Callable[[], object]) -> None:
        """Do it on the cluster's loop, soon."""
        self._loop.call_soon_threadsafe(action)

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self.run(self._start())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bucket.failing = False
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _start(self) -> None:
        settings = ControllerSettings(host="127.0.0.1", port=0, session_timeout_ms=self._session_timeout_ms)
        self.controller = ControllerNode(
            ControllerIdentity(0, self._directory / "controller", self._credentials(0)),
            ControllerSections(settings),
            ControllerWorld(TcpNetwork(), SystemClock(), random.Random()),
        )
        await self.controller.start()
        await self.controller.wait_active(30)
        await asyncio.gather(*(self.start_broker(broker) for broker in self._ids))

    def _credentials(self, node: int) -> Credentials | None:
        return Credentials(self._secret, node) if self._secret is not None else None

    async def start_broker(self, broker: int) -> None:
        """Start a broker, for the first time or again."""
        path = self._directory / f"broker-{broker}"
        path.mkdir(parents=True, exist_ok=True)
        disks = self._disks[broker] = []
        port = self._ports.setdefault(broker, free_port())
        store = GuardedObjectStore(self.bucket, PriorityGate(64), SystemClock(), proof=BucketProof(SystemClock()))

        def bucket_wal(cluster_id: str, of: int) -> Wal:
            return S3Wal(
                store,
                WalSettings(),
                cluster_id=cluster_id,
                replica_set_id=of,
                clock=SystemClock(),
                rng=random.Random(),
            )

        def own_wal(cluster_id: str) -> Wal:
            if self._wal_kind == "s3":
                return bucket_wal(cluster_id, broker)
            disks.append(FileDisk(path / "wal"))
            return DiskWal(disks[-1], WalSettings(), rng=random.Random())

        node = BrokerNode(
            identity=BrokerIdentity(broker, f"check-{broker}", True, lambda _cluster_id: None),
            settings=BrokerSettings(
                kafka=KafkaSettings(port=port, advertised_port=self._advertised_ports.get(broker, 0)),
                admin=self._admins.get(broker, AdminSettings()),
                log=self.log,
                group=self._group,
                upload=self._upload,
                cache=CacheSettings(),
                compaction=CompactionSettings(),
                clean=CleanSettings(),
                roles=["broker"],
                flat=dict,
                replication=self.replication,
            ),
            controllers=ControllerAccess(
                [self.controller.address], 0.2, credentials=self._credentials(broker), follows_controllers=False
            ),
            wal=WalAccess(
                self._wal_kind,
                own_wal,
                bucket_wal,
                replicas=DirectoryReplicaDisks(path, broker, WalSettings(), random.Random()),
            ),
            world=BrokerWorld(TcpNetwork(), self._clocks.get(broker, SystemClock()), random.Random(), store),
        )
        try:
            await node.start()
        except BaseException:
            await node.stop(1.0)
            raise
        self.nodes[broker] = node

    async def start_brokers(self, *brokers: int) -> None:
        """Start brokers at once: one of several replicas may wait for another."""
        await asyncio.gather(*(self.start_broker(broker) for broker in brokers))

    async def _stop(self) -> None:
        await asyncio.gather(*(self.stop_broker(broker) for broker in list(self.nodes)))
        await self.controller.close()

    async def stop_broker(self, broker: int) -> None:
        """End a broker; what it leads waits for it."""
        await self.nodes.pop(broker).stop(10.0)
        for disk in self._disks.pop(broker):
            await disk.close()

    # -- what tests ask

    @property
    def bootstrap(self) -> str:
        """All brokers."""
        return ",".join("{}:{}".format(*node.bootstrap) for node in self.nodes.values())

    @property
    def image(self) -> Image:
        """The controller's."""
        return self.controller.image

    def partition(self, topic: str, index: int) -> PartitionRecord:
        """The record of a partition."""
        found = self.image.partition(self.image.topic_ids[topic], index)
        assert found is not None
        return found

    def leader(self, topic: str, index: int) -> int:
        """The broker that leads a partition."""
        return self.image.leader(self.partition(topic, index))[0]

    def elsewhere(self, topic: str, index: int = 0) -> tuple[int, int]:
        """The broker that leads a partition, and another one."""
        source = self.leader(topic, index)
        return source, source % len(self.nodes) + 1

    def place(self, topic: str, index: int, to: int) -> None:
        """Commit a placement (-1: cancel); raises what it is refused with."""
        moves = [PartitionMove(self.image.topic_ids[topic], index, to)]
        client = next(iter(self.nodes.values())).controller
        (error,) = self.run(client.move_partitions(moves))
        if error is not None:
            raise error

    def serves(self, broker: int, topic: str, index: int) -> bool:
        """Whether the broker has the partition open."""
        partitions = self.nodes[broker].parts.partitions.manager
        return any((one.topic, one.partition) == (topic, index) for one in partitions.all())

    def storage(self, broker: int) -> Storage:
        """A broker's storage."""
        return self.nodes[broker].parts.data.storages.get(broker)

    def move(self, topic: str, index: int, to: int, timeout_s: float = 60.0) -> None:
        """Place a partition and wait until its new broker serves it."""
        self.place(topic, index, to)
        wait_until(lambda: self.serves(to, topic, index), f"{topic}-{index} is on {to}", timeout_s)

    def moves(self, broker: int) -> list[dict[str, Any]]:
        """What the broker tells of moves away from it."""
        partitions = self.nodes[broker].parts.partitions.manager
        return partitions.moves.table.report()
