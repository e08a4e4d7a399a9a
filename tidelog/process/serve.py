"""One `tidelog serve` process: the configured roles on one data directory.

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

from tidelog.broker.inputs import BrokerIdentity, BrokerSettings, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.node import BrokerNode
from tidelog.broker.settings import AdminSettings, KafkaSettings
from tidelog.config import Config, Loaded
from tidelog.controller.active.state_keeper import BucketSuperseded
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model.addresses import split_address
from tidelog.controller.node import ControllerNode
from tidelog.controller.raft.quorum import parse_members
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.secret import read_secret
from tidelog.process.accepted_loss import forget, read_accepted, use_lost_bucket
from tidelog.process.data_dir import LONE_NODE_ID, DataDirectory
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import ConfigError, StorageFailed
from tidelog.runtime.network import AddressInUse, TcpNetwork
from tidelog.runtime.open_files import connections_that_fit, raise_open_files
from tidelog.runtime.ports import check_free, choose_port
from tidelog.runtime.tasks import unless_failed
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.proof import BucketProof, WrongBucket
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.bucket.store import ObjectStore
from tidelog.storage.cleaning.deleter import ObjectCleaner
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata
from tidelog.storage.wal.base import Wal
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.memory import MemoryWal
from tidelog.storage.wal.s3.wal import S3Wal

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("0.0.0.0", "::")


class NodeProcess:
    """A controller, a broker or both, started and stopped together."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = SystemClock()
        self._network = TcpNetwork()
        self._rng = random.Random(uuid.uuid4().int)
        self._directory: DataDirectory | None = None
        self._store: GuardedObjectStore | None = None
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
        """Bytes that the broker's caches and buffers account for."""
        return self._broker.accounted_bytes if self._broker is not None else 0

    async def start(self) -> None:
        """Start the roles in order.

        Raises a `TidelogError` if the operator must correct something, and the controller's failure: the quorum that
        the broker waits for may need this member.
        """
        await unless_failed(self._start_roles(), self._failed)

    async def _start_roles(self) -> None:
        config = self._config
        _fit_connections(config.kafka)
        credentials = credentials_of(config)
        if "broker" in config.node.roles:
            config.kafka.port = reserve_port(config.kafka.host, config.kafka.port)
            warn_of_admin_address(config.kafka, config.admin)
        path = Path(config.node.data_dir)
        directory = self._directory = DataDirectory.open(path, config.node.id, str(uuid.uuid4()))
        endpoints = self._known_endpoints()
        if directory.broker_id < 0:
            directory.assign(await self._find_id(directory.check_code, endpoints, credentials))
        config.node.id = directory.broker_id
        credentials = credentials_of(config)
        proof = BucketProof(self._clock, accepted=lambda cluster_id: use_lost_bucket(path, cluster_id), place=str(path))
        store = self._store = open_store(config.s3, path, self._clock, self._rng, proof)
        if "controller" in config.node.roles:
            controller = await self._start_controller(path / "controller", credentials)
            endpoints = endpoints or [controller.address]
            if "broker" not in config.node.roles:
                self._orphans = self._search_orphans(controller, store)
                self._orphans.start()
        if "broker" in config.node.roles:
            broker = self._broker = self._make_broker(path, directory, endpoints, credentials, store)
            await broker.start()

    def _known_endpoints(self) -> list[tuple[str, int]]:
        """Where the configuration says that controllers are."""
        settings = self._config.controller
        members = parse_members(settings.members)
        return [split_address(text) for text in settings.endpoints or members.values()]

    @property
    def _is_local(self) -> bool:
        """Whether this process's broker has this process's controller, and no other."""
        settings = self._config.controller
        return not settings.members and not settings.endpoints and "broker" in self._config.node.roles

    async def _start_controller(self, directory: Path, credentials: Credentials | None) -> ControllerNode:
        config = self._config
        controller = self._controller = ControllerNode(
            ControllerIdentity(config.node.id, directory, credentials, serves_broker=self._is_local),
            ControllerSections(config.controller, config.balancer, config.scale, config.upload.delete_delay_ms),
            ControllerWorld(
                self._network,
                self._clock,
                self._rng,
                delete_objects=self._delete_objects,
                state_store=self._store.for_purpose(Purpose.METADATA) if self._store is not None else None,
                bucket_proof=self._store.proof if self._store is not None else None,
            ),
            on_failed=self._controller_failed,
        )
        await controller.start()
        if not config.controller.members:
            await controller.wait_active(config.controller.command_timeout_ms / 1000)
        return controller

    def _make_broker(
        self,
        path: Path,
        directory: DataDirectory,
        endpoints: list[tuple[str, int]],
        credentials: Credentials | None,
        store: GuardedObjectStore,
    ) -> BrokerNode:
        config, controller = self._config, self._controller
        if not endpoints:
            raise ConfigError(
                "a broker without a controller of its own must know where the controllers are",
                hint='set controller.members (and controller.secret_file), or add "controller" to node.roles',
            )
        heartbeat_s = config.controller.heartbeat_interval_ms / 1000
        return BrokerNode(
            identity=BrokerIdentity(
                directory.broker_id,
                directory.check_code,
                not directory.cluster_id,
                directory.belongs_to,
                directory.fingerprint,
                config.controller.session_timeout_ms / 1000 + 2 * heartbeat_s,
            ),
            settings=_broker_settings(config),
            controllers=ControllerAccess(
                endpoints,
                heartbeat_s,
                credentials=credentials,
                follows_controllers=not config.controller.endpoints,
                local=controller.feed if self._is_local and controller is not None else None,
                searches_orphans=lambda: controller is not None and controller.is_active,
                bucket_state=lambda: controller.bucket_state() if controller is not None else None,
            ),
            wal=WalAccess(
                config.wal.kind,
                self._wal_opener(path, store, directory.broker_id),
                lambda cluster_id, of: self._bucket_wal(store, cluster_id, of),
                place="embedded" if config.s3.is_embedded else f"s3://{config.s3.bucket}/{config.s3.prefix}",
                may_lose_tail=config.wal.flush != "sync",
                directory=str(path),
                accepted_loss=read_accepted(path),
                forget_accepted_loss=lambda: forget(path),
            ),
            world=BrokerWorld(self._network, self._clock, self._rng, store),
        )

    async def _find_id(self, check_code: str, endpoints: list[tuple[str, int]], credentials: Credentials | None) -> int:
        """Obtain an id if neither configuration nor directory has one. Waits for the controllers."""
        if not endpoints:
            return LONE_NODE_ID
        if "controller" in self._config.node.roles:
            raise ConfigError("a controller of a quorum needs a node id", hint="set node.id as in controller.members")
        client = ControllerClient(
            endpoints,
            self._network,
            self._clock,
            self._rng,
            credentials=credentials,
            follows_image=not self._config.controller.endpoints,
        )
        try:
            await client.start()
            found = await client.apply_for_id(check_code)
        finally:
            await client.close()
        logger.info("the controllers allocated a broker id", extra={"broker": found})
        return found

    def _search_orphans(self, controller: ControllerNode, store: ObjectStore) -> OrphanCleaner:
        """The orphan search of a process without a broker; paused while this controller is not the active one."""
        return OrphanCleaner(
            store=store.for_purpose(Purpose.CLEAN),
            cluster_id=lambda: controller.image.cluster_id,
            metadata=OrphanMetadata(
                controller.fence_objects,
                lambda object_id: object_id in controller.image.objects,
                controller.unknown_objects,
            ),
            clock=self._clock,
            rng=self._rng,
            settings=self._config.clean,
            is_active=lambda: controller.is_active,
        )

    def _wal_opener(self, path: Path, store: ObjectStore, replica_set_id: int) -> Callable[[str], Wal]:
        """Return the factory of the WAL, by cluster id. Raises `ConfigError` if another kind of WAL is in use."""
        settings = self._config.wal
        if settings.kind == "disk":
            disk = self._disk = FileDisk(path / "wal")
            return lambda _cluster_id: DiskWal(disk, settings, rng=self._rng)
        if any((path / "wal").glob("*.wal")):
            raise ConfigError(
                f"wal.kind is {settings.kind}, but {path / 'wal'} holds a WAL on disk, which may hold records that are"
                " not uploaded",
                hint="stop once with --wal disk, which uploads everything, then delete that directory",
            )
        if settings.kind == "memory":
            logger.warning(
                "wal.kind is memory: acknowledged records are only in the memory of this process until they are"
                " uploaded; if the process dies, they are lost",
                extra={"upload_age_ms": self._config.upload.age_ms},
            )
            return lambda _cluster_id: MemoryWal(settings)

        return lambda cluster_id: self._bucket_wal(store, cluster_id, replica_set_id)

    def _bucket_wal(self, store: ObjectStore, cluster_id: str, replica_set_id: int) -> Wal:
        """The WAL of a replica set in the bucket: that of this broker or of a dead broker."""
        return S3Wal(
            store,
            self._config.wal,
            cluster_id=cluster_id,
            replica_set_id=replica_set_id,
            clock=self._clock,
            rng=self._rng,
        )

    async def run_until(self, stop: asyncio.Task[bool]) -> None:
        """Serve until `stop` has completed.

        Raises `StorageFailed` when the broker has failed permanently; `BucketSuperseded`, `WrongBucket`.
        """
        failures = [self._failed] + ([self._broker.failed] if self._broker is not None else [])
        waiting: set[asyncio.Future[Any]] = {stop, *failures}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done():
                error = failure.exception()
                if isinstance(error, BucketSuperseded | WrongBucket):
                    raise error
                raise StorageFailed(f"this process cannot continue: {error}", hint="restart it") from error

    def _controller_failed(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _delete_objects(self, object_ids: Sequence[int]) -> None:
        assert self._store is not None and self._controller is not None
        if self._cleaner is None:
            self._cleaner = ObjectCleaner(self._store.for_purpose(Purpose.CLEAN), self._controller.image.cluster_id)
        await self._cleaner.delete(object_ids)

    async def drain(self) -> None:
        """Move the broker's partitions to other brokers, within `node.drain_timeout_ms`. May be cancelled."""
        if self._broker is not None and not self._broker_stopped:
            self._drained = True
            await self._broker.drain(self._config.node.drain_timeout_ms / 1000)

    async def stop_broker(self) -> None:
        """Stop the broker but not the controller in this process. A second call waits for the first."""
        async with self._stopping_broker:
            if self._broker is not None and not self._broker_stopped:
                self._broker_stopped = True
                await self._broker.stop(self._config.node.shutdown_timeout_ms / 1000, returns=not self._drained)
            if self._disk is not None:
                await self._disk.close()
                self._disk = None

    async def stop(self) -> None:
        """Stop the started parts in this order: broker, controller, store, lock."""
        await self.stop_broker()
        if self._orphans is not None:
            await self._orphans.close()
        if self._controller is not None:
            await self._controller.close()
        if self._store is not None:
            await self._store.close()
        if self._directory is not None:
            self._directory.close()
        logger.info("stopped", extra={"node": self._config.node.id})


def _fit_connections(kafka: KafkaSettings) -> None:
    """Raise the limit of open files, and bound the listener's connections by it."""
    open_files = raise_open_files()
    fitting = connections_that_fit(open_files, kafka.max_connections)
    if fitting < kafka.max_connections:
        logger.warning(
            "kafka.max_connections lowered to fit the limit of open files (ulimit -n)",
            extra={"max_connections": fitting, "configured": kafka.max_connections, "open_files": open_files},
        )
        kafka.max_connections = fitting


def warn_of_admin_address(kafka: KafkaSettings, admin: AdminSettings) -> None:
    """Warn if clients on other hosts are told an address of the broker, but none of its admin HTTP."""
    told = admin.advertised_host or admin.host
    if (kafka.advertised_host or kafka.host) not in LOOPBACK and told in LOOPBACK + ANY_ADDRESS:
        logger.warning(
            "other hosts cannot use this broker's admin address: set admin.host, or admin.advertised_host",
            extra={"admin": told, "kafka": kafka.advertised_host or kafka.host},
        )


def reserve_port(host: str, port: int) -> int:
    """Return the port if it is free (for 0, any free port), before any state is changed. Raises `AddressInUse`."""
    if port == 0:
        return choose_port(host)
    try:
        check_free(host, port, lingering=True)
    except OSError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: {error.strerror}",
            hint=f"`ss -tanp 'sport = :{port}'` shows the process that does; choose another port with --kafka-port",
        ) from error
    return port


def credentials_of(config: Config) -> Credentials | None:
    """Return the identity and cluster secret, if one is configured. Raises `ConfigError` for a listener that accepts
    remote connections without one.
    """
    settings = config.controller
    if settings.secret_file:
        return Credentials(read_secret(Path(settings.secret_file)), config.node.id)
    if settings.members:
        raise ConfigError(
            "controller.members needs controller.secret_file: members and brokers use it to authenticate each other",
            hint="`openssl rand -hex 32 > FILE; chmod 600 FILE`, the same file on all nodes",
        )
    if "controller" in config.node.roles and settings.host not in LOOPBACK:
        raise ConfigError(
            f"controller.host {settings.host} accepts remote connections, but controller.secret_file is not set",
            hint="set controller.secret_file, or let the controller listen on 127.0.0.1",
        )
    if "broker" in config.node.roles and config.admin.host not in LOOPBACK:
        raise ConfigError(
            f"admin.host {config.admin.host} accepts remote connections, which could give up acknowledged data, but"
            " controller.secret_file is not set",
            hint="set controller.secret_file (`openssl rand -hex 32 > FILE; chmod 600 FILE`), or let the admin HTTP"
            " listen on 127.0.0.1",
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
