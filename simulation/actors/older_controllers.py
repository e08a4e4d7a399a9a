"""A fault: a majority of the controllers come back with older copies of their directories, and the others are down.

It is what a restore of several machines from images of an earlier hour leaves, or a single controller from a backup.
Raft has no protection from that: the copies elect one of themselves. But the newest metadata state in the bucket shows
that the log is older (`tidelog.controller.active.state_keeper`), and the controller ends before it has changed
anything. When the fault ends an operator puts the right directories back, as the error's hint says.

Only where that holds: the bucket has a state which is newer than all that the copies' logs can have, and nothing keeps
the controllers from reading it. Rules:

- `rolled-back`: a controller with a copy becomes active, or writes to the log what was not there before;
- `needless-end`: a controller ends because of a newer state in the bucket, and its directory is the right one.

Entry: `OlderControllers`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from tidelog.controller.model.bucket_state import STATE_HEAD_BYTES, parse_state_key, version_in
from tidelog.simulation.world.cluster import SimCluster, SimNode
from tidelog.simulation.world.raft_files import RaftPlatters

ON_THEIR_WAY = 64
"""Commands that a copy's log may have beyond what the active controller has applied; each has a version."""
TAKEN_ANEW = 0.2
"""How often copies are replaced by newer ones."""


class _DirectoryCopies(NamedTuple):
    """Of all controllers, at one moment."""

    version: int
    """The metadata are no newer in any of them."""
    level: int
    platters: dict[int, RaftPlatters]
    """By node id."""


class OlderControllers:
    """Copies of the controllers' directories from earlier in the seed."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._copies: _DirectoryCopies | None = None

    def take(self, rng: random.Random) -> None:
        """Copy the directories of all controllers, if one is active."""
        cluster = self._cluster
        if not cluster.shape.writes_state or (self._copies is not None and rng.random() >= TAKEN_ANEW):
            return
        active = cluster.active
        if active is None or cluster.repairs:
            return
        platters = {node.id: node.raft_platters.copy() for node in cluster.controllers}
        self._copies = _DirectoryCopies(active.image.version + ON_THEIR_WAY, cluster.level, platters)

    def is_usable(self) -> bool:
        """Whether the bucket proves now that the copies are older."""
        cluster, copies = self._cluster, self._copies
        if copies is None or cluster.repairs or cluster.active is None or cluster.level != copies.level:
            return False
        return self._newest_state() > copies.version

    def mount(self, rng: random.Random) -> Callable[[], None]:
        """Crash all controllers, and start a majority of them, or all, with the copies. Returns what ends that."""
        cluster, copies = self._cluster, self._copies
        assert copies is not None
        self._copies = None
        cluster.bucket.heal()
        cluster.repairs = True
        controllers = cluster.controllers
        for node in controllers:
            node.crash(power=False)
        count = rng.choice((len(controllers) // 2 + 1, len(controllers)))
        chosen = rng.sample(controllers, k=count)
        cluster.raft_watch.forks([platters.contents() for platters in copies.platters.values()])
        originals = [self._exchange(node, copies.platters[node.id]) for node in chosen]

        def undo() -> None:
            active = cluster.active_node
            if active is not None:
                cluster.watch.found("rolled-back", f"{active.host} is active with an older copy of its directory")
            for node in chosen:
                node.crash(power=False)
            cluster.raft_watch.joins()
            for node, platters in zip(chosen, originals, strict=True):
                self._exchange(node, platters)
            for node in controllers:
                node.recover()
            cluster.repairs = False

        return undo

    def _newest_state(self) -> int:
        """Return the metadata version of the newest state in the bucket; -1 without one."""
        found = [
            (name, each.body)
            for key, each in self._cluster.bucket.objects.items()
            if (name := parse_state_key(key)) is not None
        ]
        if not found:
            return -1
        version = version_in(max(found)[1][:STATE_HEAD_BYTES])
        assert version is not None
        return version

    def _exchange(self, node: SimNode, platters: RaftPlatters) -> RaftPlatters:
        """Start a node, which does not run, with another directory; return the one that it had."""
        before, node.raft_platters = node.raft_platters, platters
        self._cluster.note(node.host, "finds another copy of its controller's directory")
        node.recover()
        return before
