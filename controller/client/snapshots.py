"""`SnapshotClient`: named snapshots of topics, and branches (docs/design/0031-snapshots-and-branches.md).

Each request is one command, sent as `ControllerClient` sends all of them: effective at most once, and in the local
image when it returns. All raise `UnsupportedLevel` below feature level 5, and `OutcomeUnknown`.

Entry: `SnapshotClient`, as `ControllerClient.snapshots`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tidelog.controller.client.replica_sets import SendCommand
from tidelog.controller.model.errors import TopicIdTaken
from tidelog.controller.model.records import TopicRecord
from tidelog.controller.model.snapshots import CreateBranch, CreateSnapshot, DeleteSnapshot, TopicCut


class SnapshotClient:
    """Requests about snapshots; see the module docstring."""

    def __init__(self, send: SendCommand, rng: random.Random) -> None:
        self._send = send
        self._rng = rng

    async def create(self, name: str, topics: Sequence[TopicCut]) -> int:
        """Hold topics up to a cut; see `CreateSnapshot`. Returns the version at which it was taken.

        Raises `InvalidInput`, `SnapshotExists`, `Overloaded`, `UnknownTopicId`, `CutRefused`.
        """
        version: int = await self._send(CreateSnapshot(name, tuple(topics)), int)
        return version

    async def branch(self, snapshot: str, source: str, name: str, changes: dict[str, str | None]) -> TopicRecord:
        """Create a topic that begins with what a snapshot holds of topic `source`; see `CreateBranch`.

        Raises `UnknownSnapshot`, `TopicExists`, `InvalidTopic`, `InvalidInput`, `Overloaded` and the placement errors.
        """
        while True:
            topic_id = self._rng.randbytes(16)
            try:
                found: TopicRecord = await self._send(
                    CreateBranch(snapshot, source, topic_id, name, changes), TopicRecord
                )
                return found
            except TopicIdTaken:
                continue

    async def delete(self, name: str) -> None:
        """Hold a snapshot's topics no longer. Raises `UnknownSnapshot`."""
        await self._send(DeleteSnapshot(name), None)
