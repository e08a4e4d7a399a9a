"""`HandOverPreparation`: before the master of a replica set is to change, it writes checkpoints of its partitions.

An election ends a master's term where it is, and the next one scans what lies behind the checkpoints before it opens
the partitions (`tidelog.broker.partitions.checkpoints`). That an election will come is known before it in two cases,
and not to the master itself in either:

- An operator or a client wants another master, by an election, a drain or the removal of a member, and has asked any
  broker (`prepare`). That broker asks the master, by the method `prepare_hand_over` between brokers.
- The active controller will elect the preferred master. It tells the present one with its answers to heartbeats, for
  the last seconds before (`tidelog.controller.active.masters`).

It only shortens the next opening: it never fails, never holds an election up for more than `WAIT_S`, and a broker of an
earlier version that does not know it is passed over.

Entry: `HandOverPreparation.prepare`; `serve` for the other brokers and the controllers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from tidelog.broker.partitions.checkpoints import BUDGET_S
from tidelog.broker.partitions.peer_calls import PeerCalls
from tidelog.broker.partitions.peers import PeerListener
from tidelog.controller.client.client import ControllerClient
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.tasks import TaskSet

logger = logging.getLogger(__name__)

PREPARE = "prepare_hand_over"
WAIT_S = BUDGET_S + 1.0
"""How long the master may take, with the way there."""
AGAIN_S = 2.5
"""Checkpoints for an announced election are written again after so long, and then after twice as long each time: it
waits for those under way, of which one may have lost its quorum."""
MOST_S = 60.0
"""The longest of these times."""


class PrepareParams(msgspec.Struct, frozen=True, array_like=True):
    """Parameters of `prepare_hand_over`; the result is nil, when the checkpoints are written or time is up."""

    replica_set: int
    master_epoch: int
    """The term that is to end; another one has nothing to prepare."""


_params = msgspec.msgpack.Decoder(PrepareParams)
_DONE = msgspec.msgpack.encode(None)


class HandOverPreparation:
    """See the module. Used on the event loop's thread."""

    def __init__(
        self,
        broker_id: int,
        controller: ControllerClient,
        calls: PeerCalls,
        clock: Clock,
        write: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        """`write` has the logs of a replica set write checkpoints, as far as `BUDGET_S` allows, and never raises."""
        self._broker_id = broker_id
        self._controller = controller
        self._calls = calls
        self._clock = clock
        self._write_set = write
        self._writing: dict[int, asyncio.Task[None]] = {}
        """By replica set: the newest, which may have ended."""
        self._due: dict[int, tuple[float, float]] = {}
        """By announced replica set: when checkpoints are written next, in monotonic seconds, and the pause after it."""
        self._tasks = TaskSet("hand-overs")
        self._closed = False

    def serve(self, peers: PeerListener) -> None:
        """Prepare what other brokers and the controllers ask for."""
        peers.serve(PREPARE, self._asked)
        self._controller.on_hand_overs(self._announced)

    async def prepare(self, replica_set: int) -> None:
        """Have the master of a replica set write checkpoints, wherever it is. Never raises a `TidelogError`."""
        record = self._controller.image.replica_sets.get(replica_set)
        if record is None:
            return
        if record.master == self._broker_id:
            await self._write(replica_set)
        elif self._controller.image.master_of(replica_set) is not None:
            params = PrepareParams(replica_set, record.master_epoch)
            try:
                await self._calls.call(record.master, PREPARE, params, WAIT_S)
            except TidelogError as error:
                extra = {"replica_set": replica_set, "master": record.master, "error": str(error)}
                logger.info("an election is not prepared: the next master scans more", extra=extra)

    async def _asked(self, encoded: msgspec.Raw) -> bytes:
        params = _params.decode(encoded)
        if self._leads(params.replica_set, params.master_epoch):
            await self._write(params.replica_set)
        return _DONE

    def _leads(self, replica_set: int, master_epoch: int) -> bool:
        record = self._controller.image.replica_sets.get(replica_set)
        return record is not None and (record.master, record.master_epoch) == (self._broker_id, master_epoch)

    def _announced(self, replica_sets: Iterable[int]) -> None:
        """The active controller has told, with its answer to a heartbeat, all that will be handed over."""
        if self._closed:
            return
        now_s = self._clock.monotonic()
        self._due = {each: self._due.get(each, (now_s, AGAIN_S)) for each in replica_sets}
        for each, (at_s, pause_s) in self._due.items():
            if now_s >= at_s:
                self._due[each] = (now_s + pause_s, min(2 * pause_s, MOST_S))
                self._begin(each)

    async def _write(self, replica_set: int) -> None:
        if not self._closed:
            await asyncio.wait([self._begin(replica_set)])

    def _begin(self, replica_set: int) -> asyncio.Task[None]:
        """Return the task that writes, which may be one that was begun for another caller."""
        task = self._writing.get(replica_set)
        if task is None or task.done():
            extra = {"replica_set": replica_set}
            logger.info("checkpoints are written before another broker leads the replica set", extra=extra)
            task = self._writing[replica_set] = self._tasks.spawn(self._write_set(replica_set), "checkpoints")
        return task

    async def close(self) -> None:
        """Cancel what is being written, and begin nothing more."""
        self._closed = True
        await self._tasks.close()
