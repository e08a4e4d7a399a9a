"""`ControllerRole`: a controller, and what it does in the bucket.

It deletes destroyed objects. In a process without a broker it also searches for orphans; otherwise the broker does.

Entry: `ControllerRole`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from tidelog.controller.directory_check import JOURNAL_FILE
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.node import ControllerNode
from tidelog.process.data_dir import CONTROLLER_FOLDER, WrongDataDirectory
from tidelog.process.node_base import NodeBase
from tidelog.storage.bucket.purpose import Purpose
from tidelog.storage.cleaning.deleter import ObjectCleaner
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata


class ControllerRole:
    """See `tidelog.process.role.NodeRole`."""

    accounted_bytes = 0

    def __init__(self, base: NodeBase, failed: asyncio.Future[None]) -> None:
        """`failed` is set to the error that ends the controller."""
        config, outside = base.config, base.outside
        self._config = config
        self._directory = base.directory
        self.failed = failed
        self._never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._bucket = base.store.for_purpose(Purpose.CLEAN)
        self.node = ControllerNode(
            ControllerIdentity(
                config.node.id,
                base.path / CONTROLLER_FOLDER,
                base.credentials,
                serves_broker=base.is_local,
                own=base.own,
            ),
            ControllerSections(config.controller, config.balancer, config.scale, config.upload.delete_delay_ms),
            ControllerWorld(
                outside.network,
                outside.clock,
                outside.rng,
                delete_objects=self._delete_objects,
                state_store=base.store.for_purpose(Purpose.METADATA),
                bucket_proof=base.store.proof,
            ),
            on_failed=self._fail,
        )
        self._searches = "broker" not in config.node.roles
        self._orphans = OrphanCleaner(
            store=self._bucket,
            cluster_id=lambda: self.node.image.cluster_id,
            metadata=OrphanMetadata(
                self.node.fence_objects,
                lambda object_id: object_id in self.node.image.objects,
                self.node.unknown_objects,
            ),
            clock=outside.clock,
            rng=outside.rng,
            settings=config.clean,
            is_active=lambda: self.node.is_active,
        )
        self.node.more_problems = self._problems

    @property
    def ready_line(self) -> str:
        """See `NodeRole.ready_line`."""
        return "controller={}:{}".format(*self.node.address)

    @property
    def restart_asked(self) -> asyncio.Future[None]:
        """See `NodeRole.restart_asked`: only brokers are asked."""
        return self._never

    async def start(self) -> None:
        """Start it; the only controller of a cluster is active then."""
        settings = self._config.controller
        timeout_s = settings.command_timeout_ms / 1000
        is_alone = len(settings.members) <= 1
        if is_alone:
            self._check_not_lost()
        await self.node.start()
        if not settings.members:
            await self.node.wait_active(timeout_s)
        if is_alone and "broker" not in self._config.node.roles:
            await self._bind(timeout_s)
        if self._searches:
            self._orphans.start()

    async def _bind(self, timeout_s: float) -> None:
        """Bind the data directory to the cluster, as the broker of a process does, if the cluster is known in time.

        It is not where the quorum has grown, and its other members are away. Raises `WrongDataDirectory`.
        """
        node = self.node
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not node.image.cluster_id:
                    await node.feed.wait_newer(node.image.version, timeout_s)
        if node.image.cluster_id:
            self._directory.belongs_to(node.image.cluster_id)

    def _check_not_lost(self) -> None:
        """Raise `WrongDataDirectory` if the directory was a cluster's, and its only controller's files are gone.

        Also of a quorum of one: it needs nobody to begin another cluster.
        """
        directory, folder = self._directory, self._directory.path / CONTROLLER_FOLDER
        if directory.cluster_id and not (folder / JOURNAL_FILE).exists():
            raise WrongDataDirectory(
                f"{folder} has no journal, but this is the only controller of cluster {directory.cluster_id}, to which"
                f" {directory.path} belongs: a start would make another cluster",
                hint="put the folder back, or see whether it is mounted; if the quorum has other members by now, name"
                " them in controller.members; if it is lost, `tidelog cluster rebuild` makes the metadata anew from the"
                " bucket, in a new data directory",
            )

    def _problems(self) -> list[str]:
        error = self._orphans.last_error
        return [f"fails to search for orphans: {error}"] if error else []

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    async def _delete_objects(self, object_ids: Sequence[int]) -> None:
        await ObjectCleaner(self._bucket, self.node.image.cluster_id).delete(object_ids)

    async def drain(self) -> None:
        """A controller hands its leadership over when it is closed."""

    async def stop_broker(self) -> None:
        """It serves until the process ends: the brokers commit their last uploads."""

    def give_up(self) -> None:
        """A controller waits for nobody when it is closed."""

    async def close(self) -> None:
        """See `NodeRole.close`."""
        await self._orphans.close()
        await self.node.close()
