"""One running broker: the parts of this room tied to a WAL, a bucket and a controller, in the order that is safe.

Start: controller session and identity → election (a new master epoch) → WAL recovery → uploads → partitions → groups →
listeners. Until its listener is open the broker serves nothing (hot-tier.md C8). The bucket is not needed to start over
an existing data directory, unless the WAL lives there: what cannot be read from it yet is retried and shown (rule 11).

Stop: groups → listener closed and requests in flight finished → partitions closed cleanly → everything uploaded → WAL
closed. A failed WAL or a deposed master ends the process: its clients' connections are cut at once, `failed` is set,
and whoever runs the node starts it anew.

Entry: `BrokerNode.start`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from broker.admin_http import AdminHttp, AdminSources
from broker.apis import all_apis
from broker.balance_http import BalanceRoutes
from broker.broker_http import BrokerRoutes
from broker.bucket_health import WatchedObjectStore
from broker.bucket_usage import BucketUsage, topic_of_stream
from broker.compaction import ImageView, waiting_object
from broker.fetch_sessions import FetchSessions
from broker.groups.coordinator import GroupCoordinator
from broker.hints import HintBox, HintReply
from broker.load import LoadMeter as PartitionLoadMeter
from broker.loss_http import LossRoutes
from broker.metrics import Metrics, MetricSources
from broker.move_http import MoveRoutes
from broker.object_jobs import ObjectJobs
from broker.object_report import describe_damage
from broker.partitions import PartitionManager
from broker.peers import HintSender, PeerDoor
from broker.producer_ids import ProducerIds
from broker.quorum import QuorumView
from broker.salvage import OpenWal, Salvager, let_salvage_end
from broker.server import KafkaServer
from broker.services import Services
from broker.settings import AdminSettings, GroupSettings, KafkaSettings, LogSettings
from controller.client import ControllerClient
from controller.errors import DirectoryInUse, NoPlaceToDrain
from controller.feed import DeltaFeed
from controller.handshake import Credentials
from controller.image import Image
from controller.model import DrainMode, ObjectRecord, StreamState
from runtime.clock import Clock
from runtime.cpu_time import CpuMeter, SystemCpu
from runtime.errors import ConfigError, TidelogError, Unavailable
from runtime.memory import resident_bytes
from runtime.network import Network
from runtime.tasks import Backoff, TaskSet
from storage.cold_pace import ColdPace
from storage.compaction_pace import LoadMeter
from storage.compactor import Compactor
from storage.object_store import StoreCapabilities
from storage.orphan_cleaner import OrphanCleaner
from storage.orphan_scan import OrphanMetadata
from storage.purpose import Purpose, for_purpose
from storage.settings import CacheSettings, CleanSettings, CompactionSettings, UploadSettings
from storage.storage import Storage
from storage.wal import Wal

log = logging.getLogger(__name__)

MAX_DAMAGE_SHOWN = 20
"""Damaged places that `/status` names; of more it says how many."""
DRAIN_POLL_S = 0.25
REGISTER_POLL_S = 0.5
READY_TIMEOUT_S = 20.0
"""How long a start waits for its partitions to open before it serves those that did."""


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """Who this broker is, from its data directory."""

    broker_id: int
    check_code: str
    first_start: bool
    """The directory has not belonged to a cluster before."""
    bind: Callable[[str], None]
    """Binds the data directory to a cluster id; raises if it belongs to another."""
    directory: str = ""
    """Which directory on which machine: a copy has another one."""
    patience_s: float = 0.0
    """How long a start waits for the end of a process over another copy, which may be dead and not declared so yet."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The sections of the configuration that a broker reads."""

    kafka: KafkaSettings
    admin: AdminSettings
    log: LogSettings
    group: GroupSettings
    upload: UploadSettings
    cache: CacheSettings
    compaction: CompactionSettings
    clean: CleanSettings
    roles: Sequence[str]
    flat: Callable[[], dict[str, str]]
    """The effective configuration by dotted key, secrets hidden."""


class BrokerNode:
    """A broker. Everything it needs of the world is passed in.

    `open_wal` makes the WAL of the cluster with the id it gets; with `needs_conditional_create` that WAL lives in the
    bucket, which must then be there, and able to fence, before anything else happens. `searches_orphans` says
    whether this process is the one that looks for orphans by itself, now. `local_controller` is the feed of the only
    controller of the cluster, if that runs in this process.
    """

    def __init__(
        self,
        *,
        identity: BrokerIdentity,
        settings: BrokerSettings,
        controllers: list[tuple[str, int]],
        heartbeat_interval_s: float,
        open_wal: Callable[[str], Wal],
        open_bucket_wal: OpenWal,
        wal_kind: str,
        needs_conditional_create: bool = False,
        credentials: Credentials | None = None,
        follows_controllers: bool = True,
        local_controller: DeltaFeed | None = None,
        store: WatchedObjectStore,
        network: Network,
        clock: Clock,
        rng: random.Random,
        cpu: CpuMeter | None = None,
        searches_orphans: Callable[[], bool] = lambda: False,
    ) -> None:
        self._searches_orphans = searches_orphans
        cpu = cpu or SystemCpu()
        self._identity = identity
        self._settings = settings
        self._open_wal = open_wal
        self._open_bucket_wal = open_bucket_wal
        self._wal_kind = wal_kind
        self._needs_conditional_create = needs_conditional_create
        self._store = store
        self._network = network
        self._clock = clock
        self._rng = rng
        self._tasks = TaskSet("broker", self._fail)
        self._bucket_problems: tuple[str, ...] = ()
        self._quarantined: dict[int, str] = {}
        """Why, by stream. They may have been released since."""
        self._ready = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error that ended this broker for good."""
        self.controller = ControllerClient(
            controllers,
            network,
            clock,
            rng,
            heartbeat_interval_s=heartbeat_interval_s,
            credentials=credentials,
            follows_image=follows_controllers,
            local=local_controller,
        )
        self.controller.on_fenced(self._fail)
        self.metrics = Metrics(load=PartitionLoadMeter(clock.monotonic, lambda: cpu.times().process_s))
        self.controller.measure_load(self.metrics.load.sample)
        self._cold_pace = ColdPace(settings.cache.cold_busy_share, clock, cpu, self._wal_end)
        self._wal: Wal | None = None
        self._storage: Storage | None = None
        self._compactor: Compactor | None = None
        self._cleaner: OrphanCleaner | None = None
        self._partitions: PartitionManager | None = None
        self._registration_epoch = -1
        self._master_epoch = -1
        ids = random.Random(rng.getrandbits(64))
        self._fetch_sessions = FetchSessions(settings.kafka.fetch_session_partitions, ids)
        self._hints = HintBox(clock.monotonic)
        self._peers = PeerDoor(self._hints, network, clock, credentials, self._ready_for_partitions)
        self._hint_sender = HintSender(self._hints, self.controller, network, clock, credentials)
        self._producer_ids = ProducerIds(self.controller, identity.broker_id, lambda: self._registration_epoch)
        self._groups: GroupCoordinator | None = None
        self._salvager: Salvager | None = None
        self._server: KafkaServer | None = None
        self._admin: AdminHttp | None = None

    # --- start ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Come up and serve. Raises what a new start cannot mend; everything else is retried."""
        await self.controller.start()
        image = self.controller.image
        self._identity.bind(image.cluster_id)
        await self._meet_the_bucket()
        storage = self._make_storage(image.cluster_id)
        partitions = self._partitions = PartitionManager(
            node_id=self._identity.broker_id,
            controller=self.controller,
            storage=storage,
            clock=self._clock,
            kafka=self._settings.kafka,
            defaults=self._settings.log,
            rng=self._rng,
            hints=self._hints,
            send_hint=self._hint_sender.send,
        )
        partitions.on_closed(lambda one: self.metrics.load.forget(one.first_stream))
        self._groups = GroupCoordinator(partitions, self.controller, self._clock, self._settings.group, self._rng)
        compactor = self._compactor = self._make_compactor(storage, image.cluster_id)
        cleaner = self._cleaner = self._make_cleaner(image.cluster_id)
        self.metrics.sources.compaction = compactor.figures
        self.metrics.sources.orphans = cleaner.figures
        jobs = ObjectJobs(compactor=compactor, cleaner=cleaner, image=lambda: self.controller.image)
        quorum = QuorumView(self.controller)
        salvager = self._salvager = self._make_salvager()
        moves = MoveRoutes(controller=self.controller, partitions=partitions, bucket=self._store.stats.snapshot)
        scaling = BrokerRoutes(self.controller, for_purpose(self._store, Purpose.CLEAN))
        routes = [
            *jobs.routes(),
            *self._bucket_usage().routes(),
            *quorum.routes(),
            *LossRoutes(self.controller, for_purpose(self._store, Purpose.CLEAN), quorum.report).routes(),
            *moves.routes(),
            *scaling.routes(),
            *BalanceRoutes(self.controller).routes(),
        ]
        sources = self._admin_sources(storage, quorum)
        self._admin = AdminHttp(sources, self.metrics, self._network, self._settings.admin, routes)
        admin_url = await self._admin.start()
        self._server = KafkaServer(
            self._services(partitions, self._groups, admin_url), all_apis(), self._network, self._settings.kafka
        )
        await self._become_master(storage, admin_url)
        self.controller.tell_unsaved(lambda: max(0, storage.confirm.value - storage.committed_offset))
        salvager.start(self._master_epoch)
        await partitions.start()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await partitions.wait_settled()
        except TimeoutError:
            log.warning(
                "some partitions are still opening; serving the others", extra={"waiting": partitions.unsettled()}
            )
        storage.recovered_done()
        await self._groups.start()
        await self._server.start()
        compactor.start(self._master_epoch)
        cleaner.start()
        self._ready = True

    def _make_storage(self, cluster_id: str) -> Storage:
        wal = self._wal = self._open_wal(cluster_id)
        storage = self._storage = Storage(
            wal=wal,
            store=self._store,
            objects=self.controller,
            clock=self._clock,
            cluster_id=cluster_id,
            replica_set_id=self._identity.broker_id,
            upload=self._settings.upload,
            cache=self._settings.cache,
            rng=self._rng,
            owns_stream=self._owns_stream,
            stream_facts=self._stream_facts,
            on_fenced=self._fail,
            on_wal_failed=self._fail,
            on_quarantined=self._quarantined.__setitem__,
            pace=self._cold_pace,
        )
        self.metrics.sources = MetricSources(
            storage=storage.stats,
            object_store=self._store.stats.snapshot,
            partitions=lambda: self._partitions.counts() if self._partitions is not None else {},
            image_version=lambda: self.controller.image.version,
            moves=lambda: self._partitions.moves.counts if self._partitions is not None else {},
            balance=lambda: self.controller.balance,
            hints=lambda: self._hints.counts,
            groups=lambda: self._groups.stats()["groups"] if self._groups is not None else 0,
            fetch_sessions=self._fetch_sessions.figures,
        )
        return storage

    def _wal_end(self) -> int:
        return self._wal.end_offset if self._wal is not None else 0

    def _bucket_usage(self) -> BucketUsage:
        """Counts requests from here on by the topics that the image knows."""

        def image() -> Image:
            return self.controller.image

        def wal_bytes() -> int:
            wal = self._wal
            return wal.end_offset - wal.start_offset if wal is not None and self._needs_conditional_create else 0

        accounts = self._store.stats.accounts
        accounts.topic_of = lambda stream_id: topic_of_stream(image(), stream_id)
        accounts.exists = self.metrics.sources.topic_exists = lambda topic: topic in image().topic_ids
        self.metrics.sources.accounts = accounts
        return BucketUsage(
            node_id=self._identity.broker_id,
            url=self._store.url,
            accounts=accounts,
            image=image,
            produced=self.metrics.produced_bytes,
            wal_bytes=wal_bytes,
            clock=self._clock,
        )

    def _make_salvager(self) -> Salvager:
        salvager = Salvager(
            node_id=self._identity.broker_id,
            controller=self.controller,
            open_wal=self._open_bucket_wal,
            store=self._store,
            clock=self._clock,
            rng=self._rng,
            upload=self._settings.upload,
            cache=self._settings.cache,
            on_deposed=self._fail,
        )
        self.metrics.sources.salvages = lambda: salvager.counts
        self.metrics.sources.leaderless = salvager.waiting
        return salvager

    def _make_compactor(self, storage: Storage, cluster_id: str) -> Compactor:
        settings, wal = self._settings, self._wal
        assert wal is not None
        meter = LoadMeter(settings.compaction.busy_bytes_per_s, settings.upload.size_bytes)

        def busy() -> bool:
            waiting = storage.confirm.value - self.controller.committed_wal_offset(self._identity.broker_id)
            return meter.observe(self._clock.monotonic(), wal.end_offset, waiting)

        return Compactor(
            store=for_purpose(self._store, Purpose.COMPACTION),
            objects=self.controller,
            view=ImageView(lambda: self.controller.image, self._identity.broker_id),
            clock=self._clock,
            rng=self._rng,
            settings=settings.compaction,
            cluster_id=cluster_id,
            replica_set_id=self._identity.broker_id,
            block_bytes=settings.upload.block_bytes,
            prepare_ttl_ms=settings.upload.prepare_ttl_ms,
            busy=busy,
        )

    def _make_cleaner(self, cluster_id: str) -> OrphanCleaner:
        """For those who ask; by itself it searches where the active controller is."""

        def objects() -> Mapping[int, ObjectRecord]:
            return self.controller.image.objects

        return OrphanCleaner(
            store=for_purpose(self._store, Purpose.CLEAN),
            cluster_id=lambda: cluster_id,
            metadata=OrphanMetadata(
                fence=lambda: self.controller.prepare_objects(1, 1),
                knows=lambda object_id: object_id in objects(),
                waiting=lambda object_id: waiting_object(objects().get(object_id)),
            ),
            clock=self._clock,
            rng=self._rng,
            settings=self._settings.clean,
            is_active=self._searches_orphans,
        )

    def _owns_stream(self, stream_id: int) -> bool:
        record = self.controller.image.streams.get(stream_id)
        return record is not None and record.replica_set == self._identity.broker_id

    def _stream_facts(self, stream_id: int) -> tuple[int, int] | None:
        """Committed end and first epoch of ownership of a stream that is open here, for recovered records of it."""
        record = self.controller.image.streams.get(stream_id)
        if record is None or record.replica_set != self._identity.broker_id or record.state != StreamState.OPENED:
            return None
        return record.end_offset, record.owner_since_epoch

    async def _become_master(self, storage: Storage, admin_url: str) -> None:
        """Register, be elected master of the own replica set under a new epoch, and recover its WAL."""
        kafka = self._settings.kafka
        host = kafka.advertised_host or kafka.host
        peer_host, peer_port = kafka.peer_advertised_host or host, await self._peers.start(kafka.host, kafka.peer_port)
        incarnation = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        deadline = self._clock.monotonic() + self._identity.patience_s
        told = False
        while True:
            try:
                self._registration_epoch = await self.controller.register_broker(
                    broker_id=self._identity.broker_id,
                    check_code=self._identity.check_code,
                    incarnation=incarnation,
                    host=host,
                    port=kafka.advertised_port or kafka.port,
                    rack=kafka.rack,
                    admin_url=admin_url,
                    wal_kind=self._wal_kind,
                    peer_address=f"{peer_host}:{peer_port}" if peer_port else "",
                    directory=self._identity.directory,
                )
                break
            except DirectoryInUse as error:
                if self._clock.monotonic() >= deadline:
                    raise
                if not told:
                    log.warning("waiting for the end of another process", extra={"error": str(error)})
                told = True
                await self._clock.sleep(REGISTER_POLL_S)
        await let_salvage_end(self.controller, self._identity.broker_id)
        elected = await self.controller.elect(self._identity.broker_id, self._identity.broker_id)
        await storage.recover()
        await storage.start(elected.master_epoch)
        self._master_epoch = elected.master_epoch

    def _services(self, partitions: PartitionManager, groups: GroupCoordinator, admin_url: str) -> Services:
        return Services(
            node_id=self._identity.broker_id,
            clock=self._clock,
            kafka=self._settings.kafka,
            log=self._settings.log,
            group=self._settings.group,
            controller=self.controller,
            partitions=partitions,
            groups=groups,
            producer_ids=self._producer_ids,
            metrics=self.metrics,
            fetch_sessions=self._fetch_sessions,
            cold_pace=self._cold_pace,
            quorum=QuorumView(self.controller).report,
            broker_configs=lambda: {**self._settings.flat(), "tidelog.admin.url": admin_url},
        )

    # --- the bucket ----------------------------------------------------------------------------------------------

    async def _meet_the_bucket(self) -> None:
        """Probe the bucket. A new data directory waits for it (its address may be wrong); an old one serves already.

        With the WAL in it nothing can be served without it. Raises `ConfigError` if it cannot fence writers then.
        """
        if self._needs_conditional_create:
            found = await self._probe_until_it_answers(Unavailable)
            if not found.conditional_create:
                raise ConfigError(
                    f"wal.kind is s3, but {self._store.url} cannot keep two brokers from writing the same WAL: "
                    + "; ".join(found.problems),
                    hint="use a server with conditional creates (AWS S3, MinIO, LocalStack), or --wal disk",
                )
        elif self._identity.first_start:
            await self._probe_until_it_answers(Unavailable)
        else:
            self._tasks.spawn(self._probe_until_it_answers(TidelogError), "probe")

    async def _probe_until_it_answers(self, retried: type[TidelogError]) -> StoreCapabilities:
        """Errors of the kind `retried` are told and tried again; others (refused credentials) end a first start."""
        backoff = Backoff(0.5, 10.0, self._rng)
        while True:
            try:
                found = await self._store.probe()
            except retried as error:
                delay_s = backoff.next_delay_s()
                self._bucket_problems = (f"the bucket {self._store.url} does not answer: {error.message}",)
                log.error(
                    "the bucket does not answer; will try again",
                    extra={"bucket": self._store.url, "error": str(error), "retry_s": round(delay_s, 1)},
                )
                await self._clock.sleep(delay_s)
            else:
                self._bucket_problems = found.problems
                for problem in found.problems:
                    log.warning("the bucket's server lacks something", extra={"problem": problem})
                log.info("the bucket answers", extra={"bucket": self._store.url})
                return found

    # --- what operators see --------------------------------------------------------------------------------------

    def _problems(self) -> list[str]:
        found = list(self._bucket_problems)
        if self._storage is not None:
            found += [
                f"stream {stream_id} is quarantined: {reason} (`tidelog object quarantine list`)"
                for stream_id, reason in self._quarantined.items()
                if self._storage.is_quarantined(stream_id)
            ]
        if self._partitions is not None:
            found += self._partitions.problems()
        if self._salvager is not None:
            found += self._salvager.problems()
        if self._compactor is not None:
            found += self._compactor.problems()
        if self._cleaner is not None and self._cleaner.last_error:
            found.append(f"the search for orphans fails: {self._cleaner.last_error}")
        if self._storage is not None:
            found += describe_damage(self.controller.image, self._storage.damage, MAX_DAMAGE_SHOWN)
        health = self._store.health
        if health.failures_in_a_row and not self._bucket_problems:
            found.append(f"the bucket {health.url} fails: {health.last_error}")
        return found

    def _not_ready(self) -> list[str]:
        if not self._ready:
            return ["the broker is still starting"]
        assert self._partitions is not None
        counts = self._partitions.counts()
        opening = counts["led"] - counts["open"]
        return [f"{opening} of {counts['led']} partitions are not open"] if opening > 0 else []

    def _admin_sources(self, storage: Storage, quorum: QuorumView) -> AdminSources:
        wal = self._wal
        assert wal is not None

        def partitions() -> dict[str, int]:
            return self._partitions.counts() if self._partitions is not None else {}

        return AdminSources(
            node_id=self._identity.broker_id,
            roles=list(self._settings.roles),
            clock=self._clock,
            store=self._store,
            image=lambda: self.controller.image,
            not_ready=self._not_ready,
            partitions=partitions,
            wal=lambda: {
                "start_offset": wal.start_offset,
                "end_offset": wal.end_offset,
                "durable_offset": wal.durable_offset,
                "confirm_offset": storage.confirm.value,
                "master_epoch": wal.master_epoch,
            },
            upload=lambda: self._backlog(storage),
            memory=lambda: self._memory(storage),
            bucket=self._store.health.report,
            problems=self._problems,
            upload_now=storage.upload_now,
            controllers=quorum.report,
            failover=lambda: self._salvager.report() if self._salvager is not None else {},
            damage=storage.damage,
            on_sound=self._readmit,
        )

    def _readmit(self, object_id: int) -> None:
        if self._compactor is not None:
            self._compactor.readmit(object_id)

    @staticmethod
    def _backlog(storage: Storage) -> dict[str, int | float]:
        stats = storage.stats()
        return {
            "backlog_bytes": stats["log_cache_pending_bytes"],
            "in_flight": stats["uploads_in_flight"],
            "committed_offset": stats["committed_offset"],
            "retries": stats["upload_retries"],
        }

    def _memory(self, storage: Storage) -> dict[str, int]:
        """The accounts that bound this broker's memory: what is in each, and its bound."""
        stats, cache, kafka, server = storage.stats(), self._settings.cache, self._settings.kafka, self._server
        return {
            "resident_bytes": resident_bytes(),
            "log_cache_bytes": int(stats["log_cache_bytes"]),
            "log_cache_bound_bytes": cache.log_bytes,
            "block_cache_bytes": int(stats["block_cache_bytes"]),
            "block_cache_bound_bytes": cache.block_bytes,
            "cold_in_flight_bytes": int(stats["cold_in_flight_bytes"]),
            "cold_in_flight_bound_bytes": cache.cold_in_flight_bytes,
            "requests_bytes": server.in_flight_bytes if server is not None else 0,
            "requests_bound_bytes": kafka.max_in_flight_bytes,
            "responses_bytes": server.unread_bytes if server is not None else 0,
            "responses_bound_bytes": kafka.max_unread_bytes,
        }

    @property
    def accounted_bytes(self) -> int:
        """What caches and buffers hold on purpose, of all that has a bound."""
        storage, server = self._storage, self._server
        held = storage.held_bytes if storage is not None else 0
        return held + (server.in_flight_bytes + server.unread_bytes if server is not None else 0)

    # --- end -----------------------------------------------------------------------------------------------------

    @property
    def partitions(self) -> PartitionManager:
        """The partitions that this broker serves."""
        assert self._partitions is not None, "the broker has not been started"
        return self._partitions

    @property
    def bootstrap(self) -> tuple[str, int]:
        """Host and port that clients connect to."""
        assert self._server is not None, "the broker has not been started"
        return self._server.address

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            if self._server is not None:
                self._server.cut()  # it can acknowledge nothing any more; clients shall look for who can

    async def drain(self, budget_s: float) -> None:
        """Give the partitions to other living brokers before a stop, as far as `budget_s` goes. Never raises.

        The mark that this sets is lifted when the broker registers again.
        """
        if not self._ready or self.failed.done() or budget_s <= 0 or not self._has_others():
            return
        broker_id = self._identity.broker_id
        log.info("draining before the stop", extra={"partitions": self._owned(), "timeout_s": budget_s})
        try:
            async with asyncio.timeout(budget_s):
                await self.controller.drain_broker(broker_id, DrainMode.SHUTDOWN, self._registration_epoch)
                await self._drained()
        except (TimeoutError, TidelogError) as error:
            log.warning(
                "stopping with partitions that were not moved: they wait for this broker, or for a takeover",
                extra={"partitions": self._owned(), "error": str(error) or "time is up"},
            )

    def _ready_for_partitions(self) -> HintReply | None:
        """What a partition that comes here may rely on: this broker has started, and does not stop."""
        if not self._ready or self.failed.done():
            return None
        return HintReply(self._identity.broker_id, self._master_epoch)

    def _owned(self) -> int:
        return self.controller.image.index.partition_counts.get(self._identity.broker_id, 0)

    def _has_others(self) -> bool:
        mine = self._identity.broker_id
        return any(one.alive and not one.draining and one.id != mine for one in self.controller.image.brokers.values())

    async def _drained(self) -> None:
        """Return when nothing is owned any more; tells how far it is. Raises `NoPlaceToDrain`."""
        told = self._owned()
        while left := self._owned():
            if not self._has_others():
                raise NoPlaceToDrain("no other broker is alive, and not draining, any more")
            if left != told:
                log.info("draining", extra={"partitions_left": left})
                told = left
            await self._clock.sleep(DRAIN_POLL_S)
        log.info("drained: all partitions are with other brokers")

    async def stop(self, grace_s: float, *, returns: bool = False) -> None:
        """Finish what is in flight, close the partitions, upload, and let go. Works after a failed start, too.

        `returns`: the broker, perhaps the whole cluster, is to come back: others shall not take over from it at once.
        """
        self._ready = False
        if self._salvager is not None:
            await self._salvager.close()  # first: when all brokers stop, none takes over from another
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        if self._groups is not None:
            await self._groups.close()  # first: who waits in a JoinGroup would hold up the listener's end
        if self._server is not None:
            await self._server.close(grace_s / 4)
        if self._partitions is not None:
            await self._partitions.close()
        await self._hint_sender.close()
        await self._peers.close()
        for part in (self._compactor, self._cleaner):
            if part is not None:
                await part.close()
        if self._storage is not None:
            await self._close_storage(self._storage, max(1.0, deadline - loop.time()))
        if self._admin is not None:
            await self._admin.close()
        await self._tasks.close()
        await self._producer_ids.close()
        await self.controller.close(leaving=returns and not self.failed.done())
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()  # whoever runs the node has seen it, or did not wait for it

    async def _close_storage(self, storage: Storage, budget_s: float) -> None:
        try:
            async with asyncio.timeout(budget_s):
                await storage.close(upload=not self.failed.done())
        except (TimeoutError, TidelogError) as error:
            log.warning(
                "the last upload was not finished; what is missing stays in the WAL and goes at the next start",
                extra={"error": str(error) or "time is up"},
            )
            await storage.close(upload=False)
