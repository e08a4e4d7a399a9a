"""Internal checks of a running cluster of the chaos harness: the controllers' image and the bucket.

After each round the image is compared with itself and with the previous one, and at the end with every byte in the
bucket (`tidelog.simulation.checkers.cluster_state`).

Entry: `Inside`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.controller.rpc.secret import read_secret
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.network import TcpNetwork
from tidelog.simulation.checkers import Finding
from tidelog.simulation.checkers.cluster_state import ImageSnapshot, check_bucket, check_image, check_progress, snapshot
from tidelog.storage.bucket.open import open_store
from tidelog.storage.cleaning.orphan_scan import OrphanMetadata
from tidelog.storage.settings import S3Settings

BUDGET_S = 60.0


class Inside:
    """`members` are the controllers' own addresses; `s3` is the `[s3]` section, empty for the embedded store."""

    def __init__(self, members: dict[int, str], secret_file: Path, directory: Path, s3: dict[str, Any]) -> None:
        self._endpoints = [split_address(address) for address in members.values()]
        self._secret_file = secret_file
        self._directory = directory
        self._s3 = s3
        self._before: ImageSnapshot | None = None

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[tuple[ControllerClient, int]]:
        """Yield a client with a current image, and an object id greater than all in use."""
        client = ControllerClient(
            self._endpoints,
            TcpNetwork(),
            SystemClock(),
            random.Random(),
            timing=ClientTiming(BUDGET_S),
            credentials=Credentials(read_secret(self._secret_file), NO_NODE),
        )
        try:
            async with asyncio.timeout(BUDGET_S):
                await client.start()
                yield client, await client.prepare_objects(1, 1)
        finally:
            await client.close()

    def look(self) -> list[Finding]:
        """Return the findings in the image, by itself and since the last call. Raises `TimeoutError`, `Unavailable`."""
        return asyncio.run(self._look())

    async def _look(self) -> list[Finding]:
        async with self._client() as (client, _):
            found = check_image(client.image)
            if self._before is not None:
                found += check_progress(self._before, client.image)
            self._before = snapshot(client.image)
            return found

    def look_at_bucket(self) -> list[Finding]:
        """Check every committed object, and orphans after clean-up. Raises the errors of `look`."""
        return asyncio.run(self._look_at_bucket())

    async def _look_at_bucket(self) -> list[Finding]:
        clock = SystemClock()
        store = open_store(S3Settings(**self._s3), self._directory, clock, random.Random())
        try:
            async with self._client() as (client, newest):

                async def fence() -> int:
                    return newest

                image = client.image
                metadata = OrphanMetadata(fence, lambda object_id: object_id in image.objects, client.unknown_objects)
                return await check_bucket(image, store, orphans=metadata, now_ms=clock.time_ms())
        finally:
            await store.close()
