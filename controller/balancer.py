"""`Balancer`: what the active controller makes of the brokers' load reports (docs/design/0008-balancer.md).

Every member takes the reports, so that the next active controller knows them; only the active one looks, about once a
second. Nothing here is replicated: a new active controller plans anew from the image and the reports.

A plan is made of a quiet picture (the brokers have been the same for `STEADY_S`, nothing of the last plan moves any
more) and then carried out in batches, each one command: as many as fit under `balancer.max_moves_in_flight`. Brokers
that come or go void what is left of a plan, and the cool-down of what has moved. Whoever moves a partition, it rests
for `balancer.cooldown_ms`: the balancer does not take an operator's move back.

Entry: `Balancer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, get_args

from controller.balance_picture import Key, picture_of, takers
from controller.balance_plan import Plan, PlannedMove, make_plan
from controller.commands import MAX_MOVES_PER_COMMAND, AnyCommand, MovePartitions, PartitionMove
from controller.image import Delta, Image
from controller.load import HeartbeatReply, LoadTable
from controller.model import NO_REPLICA_SET
from controller.scale import BrokerReport, Scaler, Wanted
from controller.settings import BalancerMode, BalancerSettings, ScaleSettings
from runtime.clock import Clock
from runtime.errors import TidelogError

log = logging.getLogger(__name__)

LOOK_S = 1.0
STEADY_S = 2.0
"""How long the brokers must have been the same: several that come together are one change."""
STUCK_MS = 60_000
"""A move that has been going on for so long (its target is dead, say) is not waited for."""
MODE_KEY = "balancer/mode"
"""The key of the mode that an operator has set while the cluster runs; it wins over the configuration."""
MODES: tuple[str, ...] = get_args(BalancerMode)
MAX_SHOWN = 1_024
"""Moves of a plan in an answer."""


class Balancer:
    """See the module. All methods are for the event loop's thread. `propose` commits a command."""

    def __init__(
        self,
        settings: BalancerSettings,
        scale: ScaleSettings,
        *,
        image: Callable[[], Image],
        propose: Callable[[AnyCommand], Awaitable[None]],
        is_active: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._scale = scale
        self._image = image
        self._propose = propose
        self._is_active = is_active
        self._clock = clock
        self.loads = LoadTable()
        self._scaler = Scaler(scale)
        self._hurry = asyncio.Event()
        self._looked_s = 0.0
        self._queue: deque[PlannedMove] = deque()
        self._rested_s: dict[Key, float] = {}
        """When each partition was last seen to move."""
        self._brokers: dict[int, str] = {}
        self._steady_since_s = 0.0
        self._due_s = 0.0
        self._latest = Plan([], ["not looked yet"])
        self._latest_ms = 0
        self._begun = False
        """Whether the latest plan is (or was) carried out."""
        self._asked = False
        """Whether somebody asked for what is in the queue; else it is there by the mode `on`."""
        self._issued = 0
        self._issued_in_plan = 0

    # --- life ----------------------------------------------------------------------------------------------------

    def activated(self, now_s: float) -> None:
        """This controller became active."""
        self._scaler.activated(now_s)
        self._queue.clear()
        self._brokers = {}
        self._issued = 0
        self._latest = Plan([], ["not looked yet"])

    @property
    def mode(self) -> str:
        """As an operator has set it, else as configured."""
        told = (self._image().kv.get(MODE_KEY) or b"").decode()
        return told if told in MODES else self._settings.mode

    def hurry(self) -> None:
        """A move has ended: the next ones may begin."""
        if self._queue:
            self._hurry.set()

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass
            self._hurry.clear()
            if not self._is_active():
                continue
            try:
                await self.look(self._clock.monotonic())
            except TidelogError as error:
                log.warning("balancing is put off", extra={"error": str(error)})

    async def look(self, now_s: float) -> None:
        """What is due now. Raises what a command is refused with."""
        if now_s - self._looked_s >= LOOK_S / 2:
            self._looked_s = now_s
            self.loads.keep(self._image().brokers)
            self._look_at_scale(now_s)
        self._notice_brokers(now_s)
        mode = self.mode
        if self._queue and not self._asked and mode != "on":
            self._queue.clear()  # switched off in the midst of it
        if self._queue:
            await self._issue()
        elif mode != "off" and now_s >= self._due_s and self._is_quiet(now_s):
            self._due_s = now_s + self._settings.interval_ms / 1000
            known = len(self._latest.moves)
            plan = self._plan(now_s)
            if plan.moves and (mode == "on" or len(plan.moves) != known):  # advice is said once
                log.info("the balancer has a plan", extra={"moves": len(plan.moves), "mode": mode})
            if mode == "on":
                self._begin(plan)
                await self._issue()

    def note(self, delta: Delta) -> None:
        """Partitions that move now, by whoever's wish."""
        for _, key, record in delta.of("partitions"):
            if record is not None and record.target != NO_REPLICA_SET:
                self._rested_s[key] = self._clock.monotonic()

    def _notice_brokers(self, now_s: float) -> None:
        found = {each: master.rack for each, master in takers(self._image()).items()}
        if found != self._brokers:
            self._brokers = found
            self._steady_since_s = now_s
            self._due_s = now_s
            self._queue.clear()
            self._rested_s.clear()

    def _is_quiet(self, now_s: float) -> bool:
        stuck_before_ms = self._clock.time_ms() - STUCK_MS
        return now_s - self._steady_since_s >= STEADY_S and all(
            record.moving_since_ms < stuck_before_ms for record in self._image().moving()
        )

    def _plan(self, now_s: float) -> Plan:
        settings = self._settings
        rested = {key: at for key, at in self._rested_s.items() if now_s - at < settings.cooldown_ms / 1000}
        self._rested_s = rested
        picture = picture_of(self._image(), self.loads, now_s, rested)
        self._latest = make_plan(picture, settings, self._name)
        self._begun = False
        self._latest_ms = self._clock.time_ms()
        return self._latest

    def _name(self, key: Key) -> str:
        topic = self._image().topics.get(key[0])
        return f"{topic.name if topic is not None else key[0].hex()}-{key[1]}"

    def _begin(self, plan: Plan) -> None:
        self._queue = deque(plan.moves)
        self._begun = True
        self._asked = False
        self._issued_in_plan = 0

    async def _issue(self) -> None:
        """Commit the next moves, as many as may be in flight. What does not fit the image any more is dropped."""
        image, limit = self._image(), self._settings.max_moves_in_flight
        room = limit - len(image.index.moving)
        if room < min(len(self._queue), max(1, limit // 4)):
            return  # in batches: one command for each hand-over would be many
        open_ = takers(image)
        batch: list[PartitionMove] = []
        while self._queue and len(batch) < min(room, MAX_MOVES_PER_COMMAND):
            move = self._queue.popleft()
            record = image.partition(*move.key)
            if (
                record is not None
                and record.replica_set == move.source
                and record.target == NO_REPLICA_SET
                and move.target in open_
            ):
                batch.append(PartitionMove(*move.key, move.target))
        if batch:
            await self._propose(MovePartitions(tuple(batch)))
            self._issued += len(batch)
            self._issued_in_plan += len(batch)
        if not self._queue:
            self._due_s = self._clock.monotonic() + self._settings.interval_ms / 1000
            log.info("the balancer's plan is under way", extra={"moves": self._issued_in_plan})

    def weights(self) -> tuple[tuple[int, int], ...]:
        """What each replica set carries, as thousandths of a mean partition; empty: not known, or hardly anything."""
        now_s, masters = self._clock.monotonic(), takers(self._image())
        loads = {each: self.loads.get(master.id, now_s) for each, master in masters.items()}
        bytes_ = {each: load.bytes_in + load.bytes_out for each, load in loads.items() if load is not None}
        total = sum(bytes_.values())
        if len(bytes_) < len(masters) or not total or total < len(bytes_) * self._settings.min_bytes_per_s:
            return ()
        counts = self._image().index.partition_counts
        partitions = sum(counts.get(each, 0) for each in bytes_)
        return tuple((each, 1_000 * partitions * rate // total) for each, rate in sorted(bytes_.items()))

    # --- what operators ask --------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """How it stands: what the last look found, and what is still to be issued."""
        now_s = self._clock.monotonic()
        return {
            "mode": self.mode,
            "configured_mode": self._settings.mode,
            "findings": self._latest.findings,
            "planned_at_ms": self._latest_ms or None,
            "planned": len(self._latest.moves),
            "left": len(self._queue),
            "issued": self._issued,
            "in_flight": len(self._image().index.moving),
            "resting": sum(now_s - at < self._settings.cooldown_ms / 1000 for at in self._rested_s.values()),
            "brokers": [self._row(each, now_s) for each in sorted(self._image().brokers)],
        }

    def _row(self, broker_id: int, now_s: float) -> dict[str, Any]:
        record, load = self._image().brokers[broker_id], self.loads.get(broker_id, now_s)
        return {
            "id": broker_id,
            "rack": record.rack or None,
            "takes": broker_id in self._brokers,
            "partitions": self._image().index.partition_counts.get(broker_id, 0),
            "bytes_in": load.bytes_in if load is not None else None,
            "bytes_out": load.bytes_out if load is not None else None,
            "requests": load.requests / 1000 if load is not None else None,
            "cpu_percent": load.cpu / 10 if load is not None else None,
        }

    def plan(self) -> dict[str, Any]:
        """What would be done if it began now, with a reason for each move; nothing is done."""
        return self._shown(self._plan(self._clock.monotonic()))

    async def carry_out(self) -> dict[str, Any]:
        """Plan now and begin, whatever the mode; while a plan is being carried out, that one."""
        if self._queue:
            return self._shown(self._latest)
        self._notice_brokers(self._clock.monotonic())
        plan = self._plan(self._clock.monotonic())
        self._begin(plan)
        self._asked = True
        if plan.moves:
            await self._issue()
        return self._shown(plan)

    def _shown(self, plan: Plan) -> dict[str, Any]:
        return {
            "moves": [self._shown_move(move) for move in islice(plan.moves, MAX_SHOWN)],
            "total": len(plan.moves),
            "findings": plan.findings,
        }

    def _shown_move(self, move: PlannedMove) -> dict[str, Any]:
        topic = self._image().topics.get(move.key[0])
        return {
            "topic": topic.name if topic is not None else move.key[0].hex(),
            "partition": move.key[1],
            "from": move.source,
            "to": move.target,
            "goal": move.goal,
            "why": move.why,
        }

    # --- how many brokers ----------------------------------------------------------------------------------------

    def _look_at_scale(self, now_s: float) -> Wanted:
        reports = [
            BrokerReport(record.id, self.loads.get(record.id, now_s))
            for _, record in sorted(self._image().brokers.items())
            if record.alive and not record.draining
        ]
        return self._scaler.look(reports, now_s)

    def scale(self) -> dict[str, Any]:
        """For `/scale`."""
        latest = self._scaler.latest or self._look_at_scale(self._clock.monotonic())
        return latest.as_dict(self._scale)

    def told(self) -> HeartbeatReply | None:
        """What heartbeats are answered with."""
        latest = self._scaler.latest
        if latest is None:
            return None
        planned = len(self._queue) if self._begun else len(self._latest.moves)
        return HeartbeatReply(latest.wanted, latest.brokers, planned, self._issued)
