"""One `tidelog serve` process: the roles that the configuration names, over one data directory.

Entry: `NodeProcess.start`, then `run_until`, then `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from broker.bucket_health import WatchedObjectStore
from broker.node import BrokerIdentity, BrokerNode, BrokerSettings
from broker.settings import KafkaSettings
from controller.addresses import split_address
from controller.client import ControllerClient
from controller.handshake import Credentials, read_secret
from controller.node import ControllerNode
from controller.quorum_file import parse_members
from runtime.clock import SystemClock
from runtime.disk import FileDisk
from runtime.errors import ConfigError, StorageFailed
from runtime.network import AddressInUse, TcpNetwork
from runtime.open_files import connections_that_fit, raise_open_files
from runtime.ports import check_free, choose_port
from storage.object_cleaner import ObjectCleaner
from storage.object_store import ObjectStore
from storage.open_store import open_store
from storage.orphan_cleaner import OrphanCleaner
from storage.orphan_scan import OrphanMetadata
from storage.purpose import Purpose, for_purpose
from storage.wal import Wal
from storage.wal_disk import DiskWal
from storage.wal_memory import MemoryWal
from storage.wal_s3 import S3Wal
from tidelog.config import Config, Loaded
from tidelog.data_dir import LONE_NODE_ID, DataDirectory

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class NodeProcess:
    """A controller, a broker or both, started and stopped together."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = SystemClock()
        self._network = TcpNetwork()
        self._rng = random.Random(uuid.uuid4().int)
        self._directory: DataDirectory | None = None
        self._store: WatchedObjectStore | None = None
        self._controller: ControllerNode | None = None
        self._broker: BrokerNode | None = None
        self._disk: FileDisk | None = None
        self._cleaner: ObjectCleaner | None = None
        self._orphans: OrphanCleaner | None = None
        self._broker_stopped = False
        self._drained = False
        self._stopping_broker = asyncio.Lock()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ready_line(self) -> str:
        """`bootstrap=host:port` for clients, or `controller=host:port` of a process without a broker."""
        if self._broker is not None:
            return "bootstrap={}:{}".format(*self._broker.bootstrap)
        assert self._controller is not None
        return "controller={}:{}".format(*self._controller.address)

    @property
    def accounted_bytes(self) -> int:
        """What the broker's caches and buffers hold on purpose."""
        return self._broker.accounted_bytes if self._broker is not None else 0

    async def start(self) -> None:
        """Start the roles in their order. Raises the `TidelogError` that a person has to mend."""
        config = self._config
        kafka = config.kafka
        _fit_connections(kafka)
        credentials = _credentials(config)
        if "broker" in config.node.roles:
            kafka.port = reserve_port(kafka.host, kafka.port)
        path = Path(config.node.data_dir)
        directory = self._directory = DataDirectory.open(path, config.node.id, str(uuid.uuid4()))
        members = parse_members(config.controller.members)
        explicit = [split_address(text) for text in config.controller.endpoints]
        endpoints = explicit or [split_address(address) for address in members.values()]
        if directory.broker_id < 0:
            directory.assign(await self._find_id(directory.check_code, endpoints, credentials))
        config.node.id = directory.broker_id
        credentials = _credentials(config)
        store = self._store = WatchedObjectStore(open_store(config.s3, path, self._clock, self._rng), self._clock)
        local = not members and not explicit and "broker" in config.node.roles
        if "controller" in config.node.roles:
            self._controller = ControllerNode(
                node_id=config.node.id,
                settings=config.controller,
                balancer=config.balancer,
                scale=config.scale,
                directory=path / "controller",
                network=self._network,
                clock=self._clock,
                rng=self._rng,
                delete_delay_ms=config.upload.delete_delay_ms,
                delete_objects=self._delete_objects,
                on_failed=self._controller_failed,
                credentials=credentials,
                serves_broker=local,
            )
            await self._controller.start()
            if not members:
                await self._controller.wait_active(config.controller.command_timeout_ms / 1000)
            endpoints = endpoints or [self._controller.address]
            if "broker" not in config.node.roles:
                self._orphans = self._search_orphans(self._controller, store)
                self._orphans.start()
        if "broker" in config.node.roles:
            if not endpoints:
                raise ConfigError(
                    "a broker without a controller of its own must know where the controllers are",
                    hint='set controller.members (and controller.secret_file), or add "controller" to node.roles',
                )
            broker = self._broker = BrokerNode(
                identity=BrokerIdentity(
                    directory.broker_id,
                    directory.check_code,
                    not directory.cluster_id,
                    directory.belongs_to,
                    directory.fingerprint,
                    config.controller.session_timeout_ms / 1000 + 2 * config.controller.heartbeat_interval_ms / 1000,
                ),
                settings=_broker_settings(config),
                heartbeat_interval_s=config.controller.heartbeat_interval_ms / 1000,
                controllers=endpoints,
                credentials=credentials,
                follows_controllers=not explicit,
                local_controller=self._controller.feed if local and self._controller is not None else None,
                open_wal=self._wal_opener(path, store, directory.broker_id),
                open_bucket_wal=lambda cluster_id, of: self._bucket_wal(store, cluster_id, of),
                wal_kind=config.wal.kind,
                needs_conditional_create=config.wal.kind == "s3",
                store=store,
                network=self._network,
                clock=self._clock,
                rng=self._rng,
                searches_orphans=lambda: self._controller is not None and self._controller.is_active,
            )
            await broker.start()

    async def _find_id(self, check_code: str, endpoints: list[tuple[str, int]], credentials: Credentials | None) -> int:
        """The id of a process whose configuration and directory have none. Waits for the controllers."""
        if not endpoints:
            return LONE_NODE_ID
        if "controller" in self._config.node.roles:
            raise ConfigError("a controller of a quorum needs its id", hint="set node.id as in controller.members")
        client = ControllerClient(endpoints, self._network, self._clock, self._rng, credentials=credentials)
        try:
            await client.start()
            found = await client.apply_for_id(check_code)
        finally:
            await client.close()
        log.info("the controllers handed out a broker id", extra={"broker": found})
        return found

    def _search_orphans(self, controller: ControllerNode, store: ObjectStore) -> OrphanCleaner:
        """The search of a process without a broker; it rests while this controller is not the active one."""
        return OrphanCleaner(
            store=for_purpose(store, Purpose.CLEAN),
            cluster_id=lambda: controller.image.cluster_id,
            metadata=OrphanMetadata(controller.fence_objects, lambda object_id: object_id in controller.image.objects),
            clock=self._clock,
            rng=self._rng,
            settings=self._config.clean,
            is_active=lambda: controller.is_active,
        )

    def _wal_opener(self, path: Path, store: ObjectStore, replica_set_id: int) -> Callable[[str], Wal]:
        """What makes the WAL once the cluster id is known. Raises `ConfigError` if another kind of WAL is in use."""
        settings = self._config.wal
        if settings.kind == "disk":
            disk = self._disk = FileDisk(path / "wal")
            return lambda _cluster_id: DiskWal(disk, settings, rng=self._rng)
        if any((path / "wal").glob("*.wal")):
            raise ConfigError(
                f"wal.kind is {settings.kind}, but {path / 'wal'} holds a WAL on disk, perhaps with records that are"
                " nowhere else",
                hint="stop once with --wal disk, which uploads everything, then delete that directory",
            )
        if settings.kind == "memory":
            log.warning(
                "wal.kind is memory: what is acknowledged lives in the memory of this process alone until it is"
                " uploaded; if the process dies, it is lost",
                extra={"upload_age_ms": self._config.upload.age_ms},
            )
            return lambda _cluster_id: MemoryWal(settings)

        return lambda cluster_id: self._bucket_wal(store, cluster_id, replica_set_id)

    def _bucket_wal(self, store: ObjectStore, cluster_id: str, replica_set_id: int) -> Wal:
        """The WAL of a replica set in the bucket: this broker's, or a dead one's."""
        return S3Wal(
            store,
            self._config.wal,
            cluster_id=cluster_id,
            replica_set_id=replica_set_id,
            clock=self._clock,
            rng=self._rng,
        )

    async def run_until(self, stop: asyncio.Task[bool]) -> None:
        """Serve until `stop` is done. Raises `StorageFailed` when the broker has failed for good."""
        failures = [self._failed] + ([self._broker.failed] if self._broker is not None else [])
        waiting: set[asyncio.Future[Any]] = {stop, *failures}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                error = failure.exception()
                raise StorageFailed(f"this process cannot go on: {error}", hint="start it anew") from error

    def _controller_failed(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _delete_objects(self, object_ids: Sequence[int]) -> None:
        assert self._store is not None and self._controller is not None
        if self._cleaner is None:
            self._cleaner = ObjectCleaner(for_purpose(self._store, Purpose.CLEAN), self._controller.image.cluster_id)
        await self._cleaner.delete(object_ids)

    async def drain(self) -> None:
        """Let the broker give its partitions to others, at most for `node.drain_timeout_ms`. Can be cancelled."""
        if self._broker is not None and not self._broker_stopped:
            self._drained = True
            await self._broker.drain(self._config.node.drain_timeout_ms / 1000)

    async def stop_broker(self) -> None:
        """Stop the broker; a controller in this process goes on. Asked twice: wait for the first."""
        async with self._stopping_broker:
            if self._broker is not None and not self._broker_stopped:
                self._broker_stopped = True
                await self._broker.stop(self._config.node.shutdown_timeout_ms / 1000, returns=not self._drained)
            if self._disk is not None:
                await self._disk.close()
                self._disk = None

    async def stop(self) -> None:
        """Stop broker, controller, store and lock, in this order; whatever was started."""
        await self.stop_broker()
        if self._orphans is not None:
            await self._orphans.close()
        if self._controller is not None:
            await self._controller.close()
        if self._store is not None:
            await self._store.close()
        if self._directory is not None:
            self._directory.close()


def _fit_connections(kafka: KafkaSettings) -> None:
    """Raise the limit of open files, and keep the listener's connections under it."""
    open_files = raise_open_files()
    fitting = connections_that_fit(open_files, kafka.max_connections)
    if fitting < kafka.max_connections:
        log.warning(
            "kafka.max_connections lowered to fit the limit of open files (ulimit -n)",
            extra={"max_connections": fitting, "configured": kafka.max_connections, "open_files": open_files},
        )
        kafka.max_connections = fitting


def reserve_port(host: str, port: int) -> int:
    """The port itself if it is free (0: one that is), found out before anything is touched. Raises `AddressInUse`."""
    if port == 0:
        return choose_port(host)
    try:
        check_free(host, port, lingering=True)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint=f"`ss -tanp 'sport = :{port}'` shows who does; choose another with --kafka-port",
        ) from error
    return port


def _credentials(config: Config) -> Credentials | None:
    """What this process authenticates itself with, if anything. Raises `ConfigError` for what would be open to all."""
    settings = config.controller
    if settings.secret_file:
        return Credentials(read_secret(Path(settings.secret_file)), config.node.id)
    if settings.members:
        raise ConfigError(
            "controller.members needs controller.secret_file: members and brokers authenticate each other with it",
            hint="`openssl rand -hex 32 > FILE; chmod 600 FILE`, the same file on all nodes",
        )
    if "controller" in config.node.roles and settings.host not in LOOPBACK:
        raise ConfigError(
            f"controller.host {settings.host} can be reached from elsewhere, and there is no controller.secret_file",
            hint="set controller.secret_file, or let the controller listen on 127.0.0.1",
        )
    return None


def _broker_settings(config: Config) -> BrokerSettings:
    def flat() -> dict[str, str]:
        return {
            setting.key: setting.value if isinstance(setting.value, str) else str(setting.value).lower()
            for setting in Loaded(config, {}).settings()
        }

    return BrokerSettings(
        kafka=config.kafka,
        admin=config.admin,
        log=config.log,
        group=config.group,
        upload=config.upload,
        cache=config.cache,
        compaction=config.compaction,
        clean=config.clean,
        roles=config.node.roles,
        flat=flat,
    )
