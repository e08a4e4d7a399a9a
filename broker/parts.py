"""The composition root of a broker: creates every component from existing ones, and registers its reports.

`tidelog.broker.data_parts` creates the data components, `tidelog.broker.partition_parts` the partition components, and
this module the servers. Nothing runs yet when `build_parts` returns; `tidelog.broker.running` starts and stops the
components in a safe order.

Entry: `build_parts`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from tidelog.broker.admin.anatomy import AnatomyRoutes
from tidelog.broker.admin.balance import BalanceRoutes
from tidelog.broker.admin.brokers import BrokerRoutes
from tidelog.broker.admin.bucket_usage import BucketUsage, topic_of_stream
from tidelog.broker.admin.checkup import CheckupRoutes
from tidelog.broker.admin.controller_config import ControllerConfigRoutes
from tidelog.broker.admin.explain import ExplainParts, ExplainRoutes
from tidelog.broker.admin.history import HistoryRoutes
from tidelog.broker.admin.http import AdminHttp, AdminSources
from tidelog.broker.admin.levels import LevelRoutes
from tidelog.broker.admin.losses import LossRoutes
from tidelog.broker.admin.moves import MoveRoutes
from tidelog.broker.admin.object_jobs import ObjectJobs
from tidelog.broker.admin.outside_compaction import OutsideCompactionRoutes
from tidelog.broker.admin.quorum import QuorumView, known_members
from tidelog.broker.admin.reading import ReadingRoutes
from tidelog.broker.admin.replica_sets import ReplicaSetRoutes
from tidelog.broker.admin.restart import RestartRoutes
from tidelog.broker.admin.snapshots import SnapshotRoutes
from tidelog.broker.admin.storage_status import memory_section
from tidelog.broker.base import BrokerBase
from tidelog.broker.data_parts import DataParts, build_data_parts
from tidelog.broker.kafka.apis import all_apis
from tidelog.broker.kafka.client_subscriptions import ClientSubscriptions
from tidelog.broker.kafka.client_telemetry import ClientTelemetry
from tidelog.broker.kafka.election_waits import ElectionWaits
from tidelog.broker.kafka.fetch_sessions import FetchSessions
from tidelog.broker.kafka.producer_ids import ProducerIds
from tidelog.broker.kafka.server import KafkaServer
from tidelog.broker.kafka.services import Services
from tidelog.broker.observing import build_history, console_of, follow_timeline
from tidelog.broker.partition_parts import PartitionParts, build_partition_parts
from tidelog.broker.partitions.checkpoints import write_checkpoints
from tidelog.broker.partitions.manager import PartitionManager
from tidelog.broker.partitions.topic_config import log_config
from tidelog.broker.telemetry import figures
from tidelog.broker.telemetry.bucket_metrics import collect_accounts
from tidelog.broker.telemetry.disk_space import DiskSpaceMeter
from tidelog.broker.telemetry.health import health_families
from tidelog.broker.telemetry.load import PartitionLoadMeter
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.broker.telemetry.slow_requests import SlowRequests
from tidelog.controller.checkup import Checkup, CheckupWorld
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.records import TopicRecord
from tidelog.controller.rpc.secret import admin_token, read_token
from tidelog.runtime import lines
from tidelog.runtime.task_errors import ERRORS
from tidelog.storage.bucket.accounts import TopicNames
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.compaction.outside import OutsideCompaction
from tidelog.storage.wal.s3.removed import RemovedWal

if TYPE_CHECKING:
    from tidelog.broker.telemetry.tracing import Tracing


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The servers for clients and operators."""

    metrics: Metrics
    producer_ids: ProducerIds
    checkup: Checkup
    admin: AdminHttp
    kafka: KafkaServer
    disk_space: DiskSpaceMeter | None
    """None: nothing measures the disk."""


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """All components of one broker."""

    data: DataParts
    partitions: PartitionParts
    servers: ServerParts


def build_parts(base: BrokerBase) -> BrokerParts:
    """Create the components of the broker, in the cluster that `base.controller` is connected to."""
    registry, controller = base.registry, base.controller
    registry.add_problems("bucket", base.probe.problems)
    registry.add_section("bucket", base.world.store.health.report)
    registry.add_figures("object store", base.world.store.stats.snapshot, figures.object_store_families)
    registry.add_figures("image", lambda: controller.image.version, figures.image_families)
    registry.add_figures("metadata state", base.controllers.bucket_state, figures.bucket_state_families)
    registry.add_figures("balance", lambda: controller.balance, figures.balance_families)
    registry.add_problems("controller", controller.problems)
    base.health.add(controller.health)
    base.health.sample("metadata copy", lambda: controller.told_version, lambda: controller.image.version)
    registry.add_problems("health", base.health.problems)
    registry.add_section("health", base.health.report)
    registry.add_figures("health", base.health.figures, health_families)
    registry.add_problems("tasks", ERRORS.problems)
    registry.add_problems("log", lines.problems)
    registry.add_figures("task errors", ERRORS.counts, figures.task_error_families)
    data = build_data_parts(base)
    partitions = build_partition_parts(base, data)
    if base.tracing is not None:
        _trace(base.tracing, registry, partitions)
    return BrokerParts(data, partitions, _servers(base, data, partitions))


def _trace(tracing: Tracing, registry: PartRegistry, partitions: PartitionParts) -> None:
    """Let the traces hear of partitions, and report on themselves."""
    partitions.manager.on_traced, partitions.manager.moves.on_ended = tracing.partition, tracing.moved
    registry.add_section("tracing", tracing.report)
    registry.add_problems("tracing", tracing.problems)
    registry.add_figures("tracing", tracing.report, figures.tracing_families)


def _servers(base: BrokerBase, data: DataParts, partitions: PartitionParts) -> ServerParts:
    metrics = _metrics(base, partitions)
    quorum = QuorumView(base.controller)
    brokers = BrokerRoutes(
        base.controller, lambda replica_set: _removed_wal(base, replica_set), partitions.hand_overs.prepare
    )
    kept = base.settings.kafka.slow_requests
    slow = SlowRequests(kept) if kept else None
    explain = ExplainRoutes(_explained(base, partitions, slow))
    checkup = _checkup(base)
    admin = _admin(base, data, partitions, metrics, quorum, brokers, checkup, explain)
    membership = partitions.membership
    producer_ids = ProducerIds(base.controller, base.broker_id, lambda: membership.registration_epoch)
    services = _services(base, data, partitions, metrics, producer_ids, quorum, admin)
    services.remove_broker, services.slow_requests, services.tracing = brokers.remove, slow, base.tracing
    kafka = _kafka(base, data, services)
    explain.running = kafka.running
    return ServerParts(metrics, producer_ids, checkup, admin, kafka, _host_figures(base))


def _explained(base: BrokerBase, partitions: PartitionParts, slow: SlowRequests | None) -> ExplainParts:
    world = base.world
    return ExplainParts(
        node_id=base.broker_id,
        clock=world.clock,
        image=base.image,
        store=world.store,
        partitions=partitions.manager,
        groups=partitions.groups,
        slow=slow,
    )


def _host_figures(base: BrokerBase) -> DiskSpaceMeter | None:
    """Register what is measured of this host: its clock, its certificate, its disk."""
    world, registry = base.world, base.registry
    registry.add_figures("clock", world.clock.time_ms, figures.clock_families)
    if world.tls is not None:
        registry.add_figures("certificate", world.tls.tls.certificate_left_s, figures.certificate_families)
    if world.disk_space is None:
        return None
    meter = DiskSpaceMeter(world.clock, world.disk_space)
    registry.add_figures("disk space", meter.latest, figures.disk_families)
    return meter


def _metrics(base: BrokerBase, partitions: PartitionParts) -> Metrics:
    """Return the broker's own counters. From here on bucket requests are counted by topic."""

    def topic_exists(topic: str) -> bool:
        return topic in base.image().topic_ids

    def topic_of(stream_id: int) -> str | None:
        return topic_of_stream(base.image(), stream_id)

    def process_s() -> float:
        return base.world.cpu.times().process_s

    load = PartitionLoadMeter(base.world.clock.monotonic, process_s)
    base.controller.measure_load(load.sample)
    partitions.manager.on_closed(lambda one: load.forget(one.first_stream))
    accounts = base.world.store.stats.accounts
    accounts.divide_by(TopicNames(topic_of, topic_exists))
    base.registry.add_figures("bucket accounts", lambda: accounts, collect_accounts)
    return Metrics(base.registry, load=load, topic_exists=topic_exists)


def _admin(
    base: BrokerBase,
    data: DataParts,
    partitions: PartitionParts,
    metrics: Metrics,
    quorum: QuorumView,
    brokers: BrokerRoutes,
    checkup: Checkup,
    explain: ExplainRoutes,
) -> AdminHttp:
    world, settings, credentials = base.world, base.settings, base.controllers.credentials

    sources = AdminSources(
        node_id=base.broker_id,
        roles=list(settings.roles),
        clock=world.clock,
        store=world.store,
        image=base.image,
        not_ready=partitions.not_ready,
        upload_now=data.upload_now,
        controllers=quorum.report,
        damage=data.reports.damage,
        check=lambda: base.probe.check(f"probe/health-{base.broker_id}"),
        catch_up=base.controller.catch_up,
        token=admin_token(credentials.secret) if credentials is not None else "",
        read_token=read_token(credentials.secret) if credentials is not None else "",
        suspects=lambda: {*data.compactor.excluded, *(one.object_id for one in data.reports.damage.all())},
        on_sound=data.compactor.readmit,
    )
    manager = partitions.manager
    jobs = ObjectJobs(compactor=data.compactor, cleaner=data.cleaner, image=base.image)
    outside = OutsideCompaction(data.compactor.data, world.clock, world.rng)
    outside_routes = OutsideCompactionRoutes(compactor=data.compactor, outside=outside, image=base.image)
    reading = ReadingRoutes(base.controller, data.manifests)
    snapshots = SnapshotRoutes(base.controller, partitions.snapshots)
    base.registry.add_section("snapshots", snapshots.status)
    base.registry.add_figures("snapshots", snapshots.status, figures.snapshot_families)
    base.registry.add_section("leases", reading.status)
    base.registry.add_figures("leases", reading.status, figures.lease_families)
    routes = [
        *jobs.routes(),
        *outside_routes.routes(),
        *reading.routes(),
        *snapshots.routes(),
        *_bucket_usage(base, data, metrics).routes(),
        *quorum.routes(),
        *ControllerConfigRoutes(base.controller, base.settings.flat).routes(),
        *LevelRoutes(base.controller).routes(),
        *ReplicaSetRoutes(base.controller, partitions.hand_overs.prepare, data.led).routes(),
        *_placement_routes(base, partitions, quorum),
        *brokers.routes(),
        *CheckupRoutes(checkup, base.controller, lambda: known_members(base.controller)).routes(),
        *_restart_routes(base, manager, quorum),
        *AnatomyRoutes(base.controller, manager).routes(),
        *HistoryRoutes(base.broker_id, build_history(base, data, partitions, metrics), follow_timeline(base)).routes(),
        *explain.routes(),
    ]
    console = console_of(base, lambda: admin.url)
    admin = AdminHttp(sources, base.registry, metrics, world.network, settings.admin, routes, console)
    return admin


def _checkup(base: BrokerBase) -> Checkup:
    controller, world = base.controller, base.world
    return Checkup(
        CheckupWorld(
            node=base.broker_id,
            roles=list(base.settings.roles),
            network=world.network,
            clock=world.clock,
            image=base.image,
            controllers=lambda: known_members(controller),
            ask_status=lambda address: controller.status_of(split_address(address)),
            own=base.identity.own,
            try_rights=world.store.for_purpose(Purpose.OTHER).try_rights,
            between_brokers=world.between_brokers,
        )
    )


def _restart_routes(base: BrokerBase, manager: PartitionManager, quorum: QuorumView) -> Sequence[web.RouteDef]:
    settings = base.settings

    def min_in_sync(topic: TopicRecord) -> int:
        configs = base.image().configs
        cluster, broker = configs.get(("cluster", ""), {}), configs.get(("broker", str(base.broker_id)), {})
        found = log_config(topic.configs, settings.kafka, settings.log, cluster=cluster, broker=broker)
        return found.min_insync_replicas

    routes = RestartRoutes(
        base.controller,
        base.broker_id,
        base.ask_restart,
        is_controller="controller" in settings.roles,
        quorum=quorum.report,
        min_in_sync=min_in_sync,
        prepare=lambda: write_checkpoints(manager.all()),
    )
    return routes.routes()


def _placement_routes(base: BrokerBase, partitions: PartitionParts, quorum: QuorumView) -> list[web.RouteDef]:
    controller, store = base.controller, base.world.store
    cleaned = store.for_purpose(Purpose.CLEAN)
    moves = MoveRoutes(controller=controller, partitions=partitions.manager, bucket=store.stats.snapshot)

    losses = LossRoutes(controller, cleaned, quorum.report, lambda replica_set: _removed_wal(base, replica_set))
    return [
        *losses.routes(),
        *moves.routes(),
        *BalanceRoutes(controller).routes(),
    ]


def _removed_wal(base: BrokerBase, replica_set: int) -> RemovedWal:
    """Return the WAL that a broker has or had in the bucket."""
    world = base.world
    return RemovedWal(world.store, base.controller.image.cluster_id, replica_set, world.clock, world.rng)


def _bucket_usage(base: BrokerBase, data: DataParts, metrics: Metrics) -> BucketUsage:
    def wal_bytes() -> int:
        if data.single is None or not base.wal.is_in_bucket:
            return 0
        return data.single.wal.end_offset - data.single.wal.start_offset

    return BucketUsage(
        node_id=base.broker_id,
        url=base.world.store.url,
        accounts=base.world.store.stats.accounts,
        image=base.image,
        produced=metrics.produced_bytes,
        wal_bytes=wal_bytes,
        clock=base.world.clock,
    )


def _services(
    base: BrokerBase,
    data: DataParts,
    partitions: PartitionParts,
    metrics: Metrics,
    producer_ids: ProducerIds,
    quorum: QuorumView,
    admin: AdminHttp,
) -> Services:
    settings = base.settings
    fetch_sessions = FetchSessions(
        settings.kafka.fetch_session_partitions, random.Random(base.world.rng.getrandbits(64))
    )
    base.registry.add_figures("fetch sessions", fetch_sessions.figures, figures.fetch_session_families)
    telemetry = ClientTelemetry(
        settings.kafka.telemetry_max_bytes,
        random.Random(base.world.rng.getrandbits(64)),
        ClientSubscriptions(base.image).current,
        settings.kafka.telemetry_series,
    )
    base.registry.add_figures("clients' metrics", base.world.clock.monotonic, telemetry.families)
    return Services(
        node_id=base.broker_id,
        clock=base.world.clock,
        kafka=settings.kafka,
        log=settings.log,
        group=settings.group,
        controller=base.controller,
        partitions=partitions.manager,
        groups=partitions.groups,
        txn=partitions.txn.coordinator,
        txn_requests=partitions.txn.requests,
        marker_writer=partitions.txn.writer,
        transactions=partitions.txn.admission,
        producer_ids=producer_ids,
        metrics=metrics,
        fetch_sessions=fetch_sessions,
        telemetry=telemetry,
        elections=ElectionWaits(base.image, base.world.clock, data.hot_sets.suspects),
        prepare_hand_over=partitions.hand_overs.prepare,
        read_replicas=data.read_replicas,
        cold_throttle=data.throttle,
        quorum=quorum.report,
        broker_configs=lambda: {
            **settings.flat(),
            "tidelog.admin.url": admin.url,
            "tidelog.bucket.url": base.world.store.url,
        },
    )


def _kafka(base: BrokerBase, data: DataParts, services: Services) -> KafkaServer:
    kafka, cache = base.settings.kafka, base.settings.cache
    apis = all_apis(telemetry=kafka.telemetry_max_bytes > 0)
    server = KafkaServer(services, apis, base.world.network, kafka)
    base.failure.listen(server.cut)  # it can acknowledge nothing any more; clients must find the new leader
    base.registry.add_figures("listener", lambda: server.held_bytes, figures.listener_families)
    base.registry.add_figures("connection bound", lambda: kafka.max_connections, figures.connection_bound_families)
    base.registry.add_section("memory", lambda: memory_section(data.reports.stats(), cache, kafka, server.held_bytes))
    return server
