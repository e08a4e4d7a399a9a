"""An impatient loader: a follower that loads images of one controller again and again, with short time-outs.

Its requests time out between the chunks of an image, and it starts over on the same connection. Each image that it has
loaded is compared with a controller's at the same version (`metadata-diverged`; docs/rules.md, rule 15).

Entry: `Loader.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

from tidelog.controller.image.follower import ImageFollower
from tidelog.controller.image.image import Image
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.simulation.actors.workload import Workload
from tidelog.simulation.world.settings import SECRET

HOST = "loader"
CHUNK_TIMEOUTS_S = (0.001, 0.002, 0.1, 1.0)
"""The first two are about as long as a healthy controller takes to answer."""
LOAD_S = 4.0
COMPARE_EVERY_S = 0.05
MAX_NAMED = 5


class Loader:
    """One loader."""

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        self._w = workload
        self._rng = rng

    async def run(self) -> None:
        """Run until the end."""
        while not self._w.closing:
            await asyncio.sleep(self._rng.uniform(0.5, 3.0))
            await self._load_once(self._rng.choice(CHUNK_TIMEOUTS_S))
        while not await self._load_once(CHUNK_TIMEOUTS_S[-1]):  # noqa: ASYNC110  # where all is well an image must load
            await asyncio.sleep(COMPARE_EVERY_S)

    async def _load_once(self, timeout_s: float) -> bool:
        """Load an image, within `LOAD_S`, and compare it; return whether it could be."""
        cluster = self._w.cluster
        endpoint = split_address(self._rng.choice(list(cluster.shape.members.values())))
        channel = RpcChannel([endpoint], cluster.network.host(HOST), Credentials(SECRET, NO_NODE))
        follower = ImageFollower(
            channel, cluster.clock, random.Random(self._rng.getrandbits(64)), chunk_timeout_s=timeout_s
        )
        compared = False
        following = asyncio.get_running_loop().create_task(follower.run())
        try:
            with contextlib.suppress(TimeoutError):  # the controller is away, or the time-out too short for its host
                async with asyncio.timeout(LOAD_S):
                    await follower.wait_loaded()
                    while not self._compare(follower.image):  # noqa: ASYNC110  # no event tells it
                        await asyncio.sleep(COMPARE_EVERY_S)
                    compared = True
        finally:
            following.cancel()
            (ended,) = await asyncio.gather(following, return_exceptions=True)
            await channel.close()
        if isinstance(ended, Exception):
            self._w.found("defect", f"the loader's follower ended: {ended!r}")
        return compared

    def _compare(self, loaded: Image) -> bool:
        """Compare with a controller's image, if one has the same version."""
        for node in self._w.cluster.controllers:
            if node.controller is not None and node.controller.image.version == loaded.version:
                rows = [f"{one.table} {one.key!r}" for one in node.controller.image.difference(loaded)]
                if rows:
                    named = ", ".join(rows[:MAX_NAMED])
                    message = f"an image loaded at version {loaded.version} has {len(rows)} other rows: {named}"
                    self._w.found("metadata-diverged", message)
                return True
        return False
