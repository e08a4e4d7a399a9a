"""`BrokerRole`: a broker with the WAL of the configured kind.

Entry: `BrokerRole`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from tidelog.broker.inputs import BrokerIdentity, BrokerSettings, BrokerWorld, ControllerAccess, WalAccess
from tidelog.broker.node import BrokerNode
from tidelog.broker.telemetry.disk_space import DiskSpace
from tidelog.config import Config, Loaded
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.tls_network import TlsNetwork
from tidelog.process.accepted_loss import forget, read_accepted
from tidelog.process.node_base import NodeBase
from tidelog.process.replica_disks import DirectoryReplicaDisks
from tidelog.runtime.clock import Clock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.tls import MutualTls, TlsFiles
from tidelog.storage.wal.base import Wal
from tidelog.storage.wal.disk.wal import DiskWal
from tidelog.storage.wal.memory import MemoryWal
from tidelog.storage.wal.s3.wal import S3Wal

logger = logging.getLogger(__name__)


def remote_controllers(base: NodeBase) -> ControllerAccess:
    """Return the way to controllers in other processes. Raises `ConfigError` if none is known."""
    if not base.endpoints:
        raise ConfigError(
            "a broker without a controller of its own must know where the controllers are",
            hint='set controller.members (and controller.secret_file), or add "controller" to node.roles',
        )
    settings = base.config.controller
    return ControllerAccess(
        base.endpoints,
        settings.heartbeat_interval_ms / 1000,
        credentials=base.credentials,
        follows_controllers=not settings.endpoints,
    )


def controllers_beside(base: NodeBase, controller: ControllerNode) -> ControllerAccess:
    """Return the way to the controllers if one of them runs in this process, and is started."""
    settings = base.config.controller
    return ControllerAccess(
        base.endpoints or [controller.address],
        settings.heartbeat_interval_ms / 1000,
        credentials=base.credentials,
        follows_controllers=not settings.endpoints,
        local=controller.feed if base.is_local else None,
        searches_orphans=lambda: controller.is_active,
        bucket_state=controller.bucket_state,
    )


def tls_between_brokers(config: Config, clock: Clock) -> TlsNetwork | None:
    """Return the network between brokers if it has TLS. Raises `ConfigError` if its files cannot be used."""
    settings = config.replication
    files = TlsFiles.of(
        "replication",
        settings.tls_cert_file,
        settings.tls_key_file,
        settings.tls_ca_file,
        check_host_names=settings.tls_check_host_names,
    )
    return TlsNetwork(MutualTls(files, clock), clock) if files is not None else None


class BrokerRole:
    """See `tidelog.process.role.NodeRole`."""

    def __init__(self, base: NodeBase, controllers: ControllerAccess, tls: TlsNetwork | None) -> None:
        """Raises `ConfigError` if another kind of WAL is in use, `StorageFailed`."""
        config, outside, directory = base.config, base.outside, base.directory
        self._settings = config.node
        self._disks: list[FileDisk] = []
        """That of the own WAL, if it is not replicated."""
        self._stopped = False
        self._drained = False
        self._grace_s = config.node.shutdown_timeout_ms / 1000
        self._stopping = asyncio.Lock()
        self._node = BrokerNode(
            identity=BrokerIdentity(
                directory.broker_id,
                directory.check_code,
                not directory.cluster_id,
                directory.belongs_to,
                directory.fingerprint,
                config.controller.session_timeout_ms / 1000 + 2 * controllers.heartbeat_interval_s,
                base.own,
            ),
            settings=_broker_settings(config),
            controllers=controllers,
            wal=_wal_access(base, self._disks),
            world=BrokerWorld(
                outside.network,
                outside.clock,
                outside.rng,
                base.store,
                tls=tls,
                disk_space=lambda: _space_of(base.path),
            ),
        )

    @property
    def ready_line(self) -> str:
        """See `NodeRole.ready_line`: where clients begin."""
        return "bootstrap={}:{}".format(*self._node.bootstrap)

    @property
    def accounted_bytes(self) -> int:
        """See `NodeRole.accounted_bytes`."""
        return self._node.accounted_bytes

    @property
    def failed(self) -> asyncio.Future[None]:
        """See `NodeRole.failed`."""
        return self._node.failed

    @property
    def restart_asked(self) -> asyncio.Future[None]:
        """See `NodeRole.restart_asked`."""
        return self._node.restart_asked

    async def start(self) -> None:
        """See `NodeRole.start`. Waits for the controllers."""
        await self._node.start()

    async def drain(self) -> None:
        """Move the partitions to other brokers, within `node.drain_timeout_ms`. May be cancelled."""
        if not self._stopped:
            self._drained = True
            await self._node.drain(self._settings.drain_timeout_ms / 1000)

    async def stop_broker(self) -> None:
        """See `NodeRole.stop_broker`."""
        async with self._stopping:
            if not self._stopped:
                self._stopped = True
                await self._node.stop(self._grace_s, returns=not self._drained)
            for disk in self._disks:
                await disk.close()

    def give_up(self) -> None:
        """See `NodeRole.give_up`."""
        self._grace_s = 0.0

    async def close(self) -> None:
        """See `NodeRole.close`."""
        await self.stop_broker()


async def _space_of(path: Path) -> DiskSpace:
    found = await asyncio.to_thread(os.statvfs, path)
    return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def _wal_access(base: NodeBase, disks: list[FileDisk]) -> WalAccess:
    config, path = base.config, base.path

    def bucket_wal(cluster_id: str, replica_set_id: int) -> Wal:
        """The WAL of a replica set in the bucket: that of this broker or of a dead broker."""
        outside = base.outside
        return S3Wal(
            base.store,
            config.wal,
            cluster_id=cluster_id,
            replica_set_id=replica_set_id,
            clock=outside.clock,
            rng=outside.rng,
        )

    return WalAccess(
        config.wal.kind,
        _wal_opener(base, disks, bucket_wal),
        bucket_wal,
        place="embedded" if config.s3.is_embedded else f"s3://{config.s3.bucket}/{config.s3.prefix}",
        may_lose_tail=config.wal.flush != "sync",
        directory=str(path),
        accepted_loss=read_accepted(path),
        forget_accepted_loss=lambda: forget(path),
        replicas=DirectoryReplicaDisks(path, base.directory.broker_id, config.wal, base.outside.rng),
        max_record_bytes=config.wal.max_record_bytes,
    )


def _wal_opener(base: NodeBase, disks: list[FileDisk], bucket_wal: Callable[[str, int], Wal]) -> Callable[[str], Wal]:
    """Return the factory of the WAL, by cluster id; it adds the disk under it to `disks`.

    Raises `ConfigError` if another kind of WAL is in use.
    """
    config, path = base.config, base.path / "wal"
    settings = config.wal
    if settings.kind == "disk":

        def disk_wal(_cluster_id: str) -> Wal:
            disks.append(FileDisk(path))
            return DiskWal(disks[-1], settings, rng=base.outside.rng)

        return disk_wal
    if any(path.glob("*.wal")):
        raise ConfigError(
            f"wal.kind is {settings.kind}, but {path} holds a WAL on disk, which may hold records that are not"
            " uploaded",
            hint="stop once with --wal disk, which uploads everything, then delete that directory",
        )
    if settings.kind == "memory":
        logger.warning(
            "wal.kind is memory: acknowledged records are only in the memory of this process until they are"
            " uploaded; if the process dies, they are lost",
            extra={"upload_age_ms": config.upload.age_ms},
        )
        return lambda _cluster_id: MemoryWal(settings)
    return lambda cluster_id: bucket_wal(cluster_id, base.directory.broker_id)


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
        replication=config.replication,
        tracing=config.tracing,
    )
