"""A simulated cluster: real controllers and brokers over simulated interfaces, as processes that crash and restart.

`SimNode` is a machine with its disk and one process at a time; `_Process` ties the parts together as
`tidelog.process.serve.NodeProcess` does over the real interfaces. A process that ends by itself (its WAL failed, its
broker was deposed) is restarted, as by `tidelog up` or a service manager; an end by an exception other than
`TidelogError` is a finding.

Entry: `SimCluster`.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from tidelog.broker.inputs import BrokerIdentity, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.node import BrokerNode
from tidelog.broker.partitions.log_cleaner import LogCleaner
from tidelog.controller.active.state_keeper import BucketSuperseded
from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.records import ObjectState
from tidelog.controller.model.wal_notes import DATA_STREAM, WalLost
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.runtime.errors import ConfigError, TidelogError, Unavailable
from tidelog.runtime.tasks import unless_failed
from tidelog.simulation.world.bucket import SimBucket
from tidelog.simulation.world.clock import IdleCpu, SimClock
from tidelog.simulation.world.consensus import RaftHost, RaftWatch, SimConsensus
from tidelog.simulation.world.disk import SimDisk
from tidelog.simulation.world.loop import Life, VirtualLoop
from tidelog.simulation.world.network import SimNetwork
from tidelog.simulation.world.raft_files import RaftPlatters
from tidelog.simulation.world.replica_disks import NodeDisks, SimReplicaDisks
from tidelog.simulation.world.rounds import CleaningRounds
from tidelog.simulation.world.settings import FIRST_CONTROLLER, KAFKA_PORT, SECRET, Shape, host_of
from tidelog.simulation.world.watch import PARTITIONS_PER_DELETION, Watch
from tidelog.simulation.world.watched_replica import WatchedReplica
from tidelog.simulation.world.watched_wal import watched
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.proof import BucketProof
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.cleaning.deleter import ObjectCleaner
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata
from tidelog.storage.commits import CommitRefused
from tidelog.storage.wal.base import ReplicatedWal, Wal
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.s3.wal import S3Wal
from tidelog.stream.partition_log import PartitionLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

BUCKET_CONNECTIONS = 32
RESTART_S = 1.0
"""Delay before the restart of a process that ended by itself."""
STOP_GRACE_S = 5.0
MAX_SKEW_MS = 500
"""Maximum base skew of a node's wall clock."""

Note = Callable[[str, str], None]
"""(node, event), for the trace."""


class SimNode:
    """One machine: its disk, its clock, and its process, if one is running."""

    def __init__(self, cluster: SimCluster, node_id: int) -> None:
        self.cluster = cluster
        self.id = node_id
        self.is_controller = node_id in cluster.shape.members
        self.is_broker = node_id < FIRST_CONTROLLER
        self.host = host_of(node_id)
        usual_ms = cluster.rng.choice((0, 0, cluster.rng.randint(-MAX_SKEW_MS, MAX_SKEW_MS)))
        self.clock = SimClock(cluster.loop, usual_ms, odd=cluster.network.odd, host=self.host)
        self.disks = NodeDisks(node_id)
        """The directories of its WALs, by replica set."""
        self.raft_platters = RaftPlatters()
        self.cluster_id = ""
        """The cluster id that the data directory is bound to."""
        self.starts = 0
        self.life: Life | None = None
        self.broker: BrokerNode | None = None
        self.log_cleaner: LogCleaner | None = None
        """Of a broker that has started."""
        self.controller: ControllerNode | None = None
        self.consensus: SimConsensus | None = None
        self.ready = False
        self.belongs = self.is_controller
        """Whether the node is part of the cluster: False before it is added and after it was removed."""
        self.wanted = False
        """Whether a process that ends by itself is restarted."""
        self.stop_asked: asyncio.Event | None = None

    @property
    def open_disks(self) -> list[SimDisk]:
        """Those of the process that runs, by replica set."""
        return [self.disks.open[each] for each in sorted(self.disks.open)]

    @property
    def alive(self) -> bool:
        """Whether a process exists, paused or not."""
        return self.life is not None

    def start(self) -> None:
        """Start the process."""
        assert self.life is None
        self.starts += 1
        self.wanted = True
        self.ready = False
        life = self.life = Life(f"{self.host}.{self.starts}")
        self.cluster.note(self.host, "start")
        rng = random.Random(self.cluster.rng.getrandbits(64))
        life.spawn(self.cluster.loop, self._run(life, rng), "process")

    def crash(self, *, power: bool) -> None:
        """Kill the process at the current awaits of its tasks; with `power` also the host, with unsynced data."""
        life = self.life
        if life is None:
            return
        self.cluster.note(self.host, "power loss" if power else "kill")
        self.wanted = False
        self._end(life)
        self.cluster.network.crash(self.host, silent=power)
        if power:
            self.disks.lose_power(self.cluster.rng)
            self.raft_platters.lose_power(self.cluster.rng)

    def _end(self, life: Life) -> None:
        if self.log_cleaner is not None:
            self.cluster.rounds.add(self.log_cleaner)
            self.log_cleaner = None
        life.end(self.cluster.loop)
        self.life = self.broker = self.controller = self.consensus = self.stop_asked = None
        self.disks.open.clear()
        self.ready = False

    def recover(self) -> None:
        """Start again after a crash."""
        if self.life is None and self.belongs:
            self.cluster.network.revive(self.host)
            self.start()

    def change_wal_directory(self, replica_set: int) -> None:
        """While no process runs: mount the other directory for the WAL of a replica set. The first one is empty."""
        assert self.life is None
        mount = self.disks.mount(replica_set)
        mount.exchange()
        self.cluster.watch.replicas.exchanged(replica_set, self.id)
        which = "" if replica_set == self.id else f" of set {replica_set}"
        self.cluster.note(self.host, f"finds another WAL directory{which}, of {len(mount.platters.files)} files")

    def open_disk(self, replica_set: int, rng: random.Random) -> SimDisk:
        """Open the directory of a replica set's WAL, in a process."""
        disk = self.disks.open[replica_set] = SimDisk(
            self.disks.mount(replica_set).platters,
            self.cluster.loop,
            rng,
            odd=self.cluster.network.odd,
            host=self.host,
        )
        return disk

    def pause(self) -> None:
        """SIGSTOP."""
        if self.life is not None and not self.life.paused:
            self.cluster.note(self.host, "pause")
            self.life.pause()

    def resume(self) -> None:
        """SIGCONT."""
        if self.life is not None and self.life.paused:
            self.cluster.note(self.host, "resume")
            self.life.resume(self.cluster.loop)

    def stop(self) -> None:
        """Request a clean shutdown (SIGTERM). The process is not restarted automatically."""
        if self.stop_asked is not None:
            self.cluster.note(self.host, "stop")
            self.wanted = False
            self.stop_asked.set()

    async def _run(self, life: Life, rng: random.Random) -> None:
        stopping = self.stop_asked = asyncio.Event()
        process = _Process(self, rng)
        told, is_other_wal = "ended", False
        try:
            await process.start()
            self.ready = True
            self.cluster.note(self.host, "ready")
            told = await process.run(stopping)
        except TidelogError as error:
            told = f"ended: {type(error).__name__}: {error}"
            is_other_wal = isinstance(error, WalLost)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is a finding
            self.cluster.defect(f"{life.name} died of {error!r}", error)
            told = f"died: {error!r}"
        self.ready = False
        try:
            await process.stop()
        except Exception as error:  # noqa: BLE001
            self.cluster.defect(f"{life.name} could not stop: {error!r}", error)
        self.cluster.note(self.host, told)
        self._end(life)
        self.cluster.network.crash(self.host, silent=False)
        if is_other_wal and self.disks.mount(self.id).unmounted is not None:
            self.change_wal_directory(self.id)  # an operator does what the error's hint says
        if self.wanted:
            self.cluster.later(RESTART_S, self._start_again)

    def _start_again(self) -> None:
        if self.wanted and self.belongs and self.life is None:
            self.start()

    async def carry_out(self, work: Coroutine[Any, Any, T], name: str, timeout_s: float) -> T:
        """Return what `work` returns in this node's process. Raises `TimeoutError`, also when the process ends."""
        assert self.life is not None
        task = self.life.spawn(self.cluster.loop, work, name)
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done or task.cancelled():
            raise TimeoutError
        return task.result()

    def bind(self, cluster_id: str) -> None:
        """Bind the data directory. Raises `ConfigError` if it belongs to another cluster."""
        if self.cluster_id and self.cluster_id != cluster_id:
            raise ConfigError(f"the directory of {self.host} belongs to cluster {self.cluster_id}, not {cluster_id}")
        self.cluster_id = cluster_id


class _Process:
    """The counterpart of a `tidelog serve` process."""

    def __init__(self, node: SimNode, rng: random.Random) -> None:
        self._node = node
        self._cluster = cluster = node.cluster
        self._shape = cluster.shape
        self._rng = rng
        self._credentials = Credentials(SECRET, node.id)
        self._network = cluster.network.host(node.host)
        store = cluster.bucket.store(node.host, node.clock, rng)
        gate = PriorityGate(BUCKET_CONNECTIONS)
        self._store = GuardedObjectStore(store, gate, node.clock, proof=BucketProof(node.clock))
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._controller: ControllerNode | None = None
        self._broker: BrokerNode | None = None
        self._cleaner: ObjectCleaner | None = None
        self._orphans: OrphanCleaner | None = None

    async def start(self) -> None:
        """Start the roles in their order, as `tidelog.process.serve` does. Raises `TidelogError`."""
        await unless_failed(self._start_roles(), self._failed)

    async def _start_roles(self) -> None:
        if self._node.is_controller:
            await self._start_controller()
        if self._node.is_broker:
            await self._start_broker()

    async def run(self, stopping: asyncio.Event) -> str:
        """Serve until a stop request or a failure; return which."""
        failures = [self._failed] + ([self._broker.failed] if self._broker is not None else [])
        stop = asyncio.get_running_loop().create_task(stopping.wait())
        waiting: set[asyncio.Future[Any]] = {stop, *failures}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        for failed in failures:
            if failed.done():
                error = failed.exception()
                if isinstance(error, CommitRefused):
                    self._look_at_refusal(error)
                if isinstance(error, BucketSuperseded):
                    self._look_at_end(error)
                if isinstance(error, Exception) and not isinstance(error, TidelogError):
                    raise error
                return f"failed: {error}"
        return "stopped"

    def _look_at_refusal(self, error: CommitRefused) -> None:
        """A broker that ends because its commits are refused must have a successor: a newer master epoch."""
        assert self._broker is not None
        watch, broker_id = self._cluster.watch, self._node.id
        for replica_set, epoch in self._broker.parts.data.storages.terms().items():
            if watch.is_master(broker_id, replica_set, epoch):
                watch.found("needless-fence", f"broker {broker_id} ended in its own master epoch {epoch}: {error}")

    def _look_at_end(self, error: BucketSuperseded) -> None:
        """A controller ends for good because its log is older than the bucket: that must be so."""
        self._node.wanted = False  # exit code 9: a restart does not help
        if not self._cluster.raft_watch.is_forked:
            self._cluster.watch.found("needless-end", f"{self._node.host} ended with its own directory: {error}")

    async def stop(self) -> None:
        """Stop all started parts."""
        if self._broker is not None:
            await self._broker.stop(STOP_GRACE_S, returns=self._node.wanted)
        for disk in self._node.open_disks:
            await disk.close()
        if self._orphans is not None:
            await self._orphans.close()
        if self._controller is not None:
            await self._controller.close()
        await self._store.close()

    async def _start_controller(self) -> None:
        node, shape = self._node, self._shape
        consensus = node.consensus = SimConsensus(
            credentials=self._credentials,
            members=shape.members,
            shape=shape,
            host=RaftHost(
                node.raft_platters,
                self._network,
                node.clock,
                self._cluster.loop,
                random.Random(self._rng.getrandbits(64)),
            ),
            watch=self._cluster.raft_watch,
        )
        controller = self._controller = node.controller = ControllerNode(
            ControllerIdentity(node.id, None, self._credentials, serves_broker=shape.is_local(node.id)),
            ControllerSections(
                shape.controller,
                shape.balancer,
                shape.scale,
                shape.upload.delete_delay_ms,
                partitions_per_deletion=PARTITIONS_PER_DELETION,
                feed=shape.feed,
            ),
            ControllerWorld(
                self._network,
                node.clock,
                self._rng,
                delete_objects=self._delete_objects,
                state_store=self._store.for_purpose(Purpose.METADATA) if shape.writes_state else None,
                bucket_proof=self._store.proof,
                consensus=consensus,
            ),
            on_failed=self._controller_failed,
        )
        controller.feed.listen(self._cluster.watch.take)
        await controller.start()
        if shape.is_local(node.id):
            await controller.wait_active(shape.controller.command_timeout_ms / 1000)
        if node.is_broker:
            return  # for the orphan search
        self._orphans = OrphanCleaner(
            store=self._store.for_purpose(Purpose.CLEAN),
            cluster_id=lambda: controller.image.cluster_id,
            metadata=OrphanMetadata(
                controller.fence_objects,
                lambda object_id: object_id in controller.image.objects,
                controller.unknown_objects,
            ),
            clock=node.clock,
            rng=self._rng,
            settings=shape.clean,
            is_active=lambda: controller.is_active,
        )
        self._orphans.start()

    def _controller_failed(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _delete_objects(self, object_ids: Sequence[int]) -> None:
        assert self._controller is not None
        if self._cleaner is None:
            self._cleaner = ObjectCleaner(self._store.for_purpose(Purpose.CLEAN), self._controller.image.cluster_id)
        self._cluster.look_at_readers(object_ids)
        await self._cleaner.delete(object_ids)

    async def _start_broker(self) -> None:
        node, shape, controller = self._node, self._shape, self._controller
        broker = self._broker = node.broker = BrokerNode(
            identity=BrokerIdentity(
                node.id, f"check-{node.id}", not node.cluster_id, node.bind, f"directory-{node.id}", 4.0
            ),
            settings=shape.broker_settings(node.host, rack=shape.rack_of(node.id), is_controller=node.is_controller),
            controllers=ControllerAccess(
                [split_address(address) for address in shape.members.values()],
                shape.controller.heartbeat_interval_ms / 1000,
                credentials=self._credentials,
                local=controller.feed if controller is not None and shape.is_local(node.id) else None,
                searches_orphans=lambda: controller is not None and controller.is_active,
            ),
            wal=WalAccess(
                shape.wal,
                self._open_wal,
                self._bucket_wal,
                replicas=SimReplicaDisks(node.disks, self._open_disk, self._replica_wal)
                if shape.wal == "disk"
                else None,
                max_record_bytes=shape.wal_settings.max_record_bytes,
            ),
            world=BrokerWorld(self._network, node.clock, self._rng, self._store, IdleCpu()),
        )
        await broker.start()
        node.log_cleaner = broker.parts.partitions.log_cleaner
        partitions = broker.parts.partitions.manager
        for each in partitions.all():
            self._opened(each)
        partitions.on_opened(self._opened)

    def _opened(self, partition: PartitionLog) -> None:
        data_stream = partition.first_stream + DATA_STREAM
        end_offset = partition.log_end_offset
        assert self._broker is not None
        confirmed, single = self._cluster.watch.confirmed, self._broker.parts.data.single
        alone = single is not None and partition.wal is single.storage.confirm
        opens = confirmed.stream_goes_on if alone else confirmed.stream_opens
        opens(data_stream, partition.leader_epoch, end_offset)
        self._cluster.watch.producers.opens(data_stream, partition.leader_epoch, partition.producers())

    def _open_wal(self, cluster_id: str) -> Wal:
        node, settings = self._node, self._shape.wal_settings
        if settings.kind == "disk":
            wal = DiskWal(self._open_disk(node.id), settings, rng=self._rng)
            return watched(wal, self._cluster.watch, node.id)
        return self._bucket_wal(cluster_id, node.id)

    def _open_disk(self, replica_set_id: int) -> SimDisk:
        return self._node.open_disk(replica_set_id, self._rng)

    def _replica_wal(self, replica_set_id: int, disk: SimDisk) -> ReplicatedWal:
        wal = DiskWal(disk, self._shape.wal_settings, rng=self._rng)
        note = partial(self._cluster.note, self._node.host)
        has_wal = self._node.disks.mount(replica_set_id).has_wal
        replica = WatchedReplica(wal, self._cluster.watch, replica_set_id, self._node.id, has_wal, note)
        return cast(ReplicatedWal, replica)

    def _bucket_wal(self, cluster_id: str, replica_set_id: int) -> Wal:
        wal = S3Wal(
            self._store,
            self._shape.wal_settings,
            cluster_id=cluster_id,
            replica_set_id=replica_set_id,
            clock=self._node.clock,
            rng=self._rng,
        )
        return watched(wal, self._cluster.watch, replica_set_id)


class SimCluster:
    """All nodes, and their shared parts."""

    def __init__(
        self, loop: VirtualLoop, shape: Shape, rng: random.Random, note: Note, defect: Callable[[str, Exception], None]
    ) -> None:
        self.loop = loop
        self.shape = shape
        self.rng = rng
        self.note = note
        self.defect = defect
        self.network = SimNetwork(loop, random.Random(rng.getrandbits(64)))
        if shape.replicas > 1:
            self.network.pieces = random.Random(rng.getrandbits(64))
        self.clock = SimClock(loop)
        """The clock without skew, used by the bucket."""
        self.watch = Watch()
        self.rounds = CleaningRounds()
        """Of log compaction, of all brokers that have ended."""
        self.outside: dict[str, tuple[frozenset[int], float]] = {}
        """What readers outside the cluster may read by their leases: object ids, and until when."""
        self.raft_watch = RaftWatch()
        self.repairs = False
        """A controller is removed, or has lost its directory, and is not added again yet: no other one may be."""
        self.repair: asyncio.Task[None] | None = None
        """Who does that."""
        self.raising: asyncio.Task[None] | None = None
        """Who raises the feature level."""
        self.bucket = SimBucket(loop, self.network, self.clock, random.Random(rng.getrandbits(64)))
        self.nodes: dict[int, SimNode] = {}
        for node_id in dict.fromkeys([*shape.members, *range(1, shape.brokers + shape.spares + 1)]):
            self.nodes[node_id] = SimNode(self, node_id)
        for node_id in range(1, shape.brokers + 1):
            self.nodes[node_id].belongs = True
        self.network.odd.hosts = frozenset(node.host for node in self.nodes.values())

    @property
    def brokers(self) -> list[SimNode]:
        """Broker nodes by id."""
        return [node for node in self.nodes.values() if node.is_broker]

    @property
    def controllers(self) -> list[SimNode]:
        """Controller nodes by id."""
        return [node for node in self.nodes.values() if node.is_controller]

    @property
    def bootstrap(self) -> list[tuple[str, int]]:
        """Bootstrap addresses of clients."""
        return [(node.host, KAFKA_PORT) for node in self.brokers if node.belongs]

    @property
    def active_node(self) -> SimNode | None:
        """The node whose controller considers itself active, if any."""
        for node in self.controllers:
            if node.controller is not None and node.controller.is_active:
                return node
        return None

    @property
    def active(self) -> ControllerNode | None:
        """The controller that considers itself active, if any."""
        node = self.active_node
        return None if node is None else node.controller

    @property
    def level(self) -> int:
        """The feature level as the active controller knows it; without one the level at the beginning."""
        active = self.active
        row = active.image.cluster if active is not None else None
        return row.level if row is not None else self.shape.level

    def look_at_readers(self, object_ids: Sequence[int]) -> None:
        """Objects about to be deleted: no broker that may read from the bucket has metadata that names one (rule 6).

        Of what was destroyed at level 0 nobody knows when: it goes by time alone, as ever before.
        """
        known = self.active
        if known is not None:
            records = {one: known.image.objects.get(one) for one in object_ids}
            object_ids = [one for one, row in records.items() if row is None or row.destroyed_at]
        for node in self.brokers:
            if node.broker is None or not node.ready:
                continue
            reader = node.broker.controller
            try:
                reader.check_current()
            except Unavailable:
                continue
            rows = reader.image.objects
            named = [one for one in object_ids if one in rows and rows[one].state == ObjectState.COMMITTED]
            if named:
                self.watch.found("deleted-under-reader", f"{node.host} may read objects {named}, which are deleted now")
        for name, (planned, until_s) in self.outside.items():
            held = sorted(planned & {*object_ids})
            if held and self.loop.time() < until_s:
                self.watch.found("deleted-under-reader", f"{name} has a lease on objects {held}, which are deleted now")

    def controller_client(self, host: str, rng: random.Random, budget_s: float) -> ControllerClient:
        """Return a controller client on its own host, with a retry budget of `budget_s` seconds; not started."""
        endpoints = [split_address(address) for address in self.shape.members.values()]
        credentials = Credentials(SECRET, NO_NODE)
        return ControllerClient(
            endpoints, self.network.host(host), self.clock, rng, credentials=credentials, timing=ClientTiming(budget_s)
        )

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` later outside of any life."""
        self.loop.call_later(seconds, callback, context=self._world())

    @staticmethod
    def _world() -> contextvars.Context:
        return contextvars.Context()

    def start(self) -> None:
        """Start all processes."""
        for node in self.nodes.values():
            if node.belongs:
                node.start()
