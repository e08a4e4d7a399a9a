"""State machine of the balancer: when to plan, which moves to issue next, and the reports for operators. No I/O: events
and times in, commands out (docs/design/0008-balancer.md).

    state    event                                                 next
    ──────   ───────────────────────────────────────────────────   ────────────────────────────────────────────────────
    idle     `look`: due, the picture is stable, mode `on`          executing the plan, if it has moves
             `look`: the same, mode `advise`                        idle; the plan is shown
             `begin_now`: on request                                executing the plan, whatever the mode
    exe-     `look`: a batch fits under `max_moves_in_flight`       executing the rest; idle when nothing is left
    cuting   `look`: brokers joined or left                         idle: the rest of the plan and cool-downs are void
             `look`: the mode is not `on`, plan not requested       idle: the rest of the plan is void
    any      `activated`: this controller became active             idle

A plan is made from a stable picture (the brokers have been the same for `STEADY_S`, no partition of the last plan is
still moving) and then executed in batches, each one command: as many moves as fit under `balancer.max_moves_in_flight`,
in which those that wait for a dead broker do not count.
A plan takes a while at 100,000 partitions, so it is made in steps (`tidelog.runtime.steps`): one whose begin was made
obsolete meanwhile, by other brokers, another plan, or another term, is dropped.
When brokers join or leave, the rest of the plan is dropped, and the cool-down of moved partitions ends. After any move,
by an operator too, a partition is not moved by the balancer for `balancer.cooldown_ms`.

Invariant: a batch names only partitions that are still placed as in the plan, that are not moving, and whose target
takes partitions.

Times are monotonic seconds (`now_s`) and milliseconds since the Unix epoch (`now_ms`). Entry: `BalanceSchedule`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Any, get_args

from tidelog.controller.active.balance_picture import picture_of
from tidelog.controller.active.balance_plan import Plan, PlannedMove, make_plan
from tidelog.controller.active.move_ages import MoveAges
from tidelog.controller.active.scale import BrokerReport, Scaler, Wanted
from tidelog.controller.image.image import Delta, Image
from tidelog.controller.image.leading import partitions_led, takers
from tidelog.controller.model.commands import MAX_MOVES_PER_COMMAND, MovePartitions, PartitionMove
from tidelog.controller.model.load import HeartbeatReply, LoadTable
from tidelog.controller.model.overrides import SettingsInForce
from tidelog.controller.model.records import NO_REPLICA_SET, PartitionKey
from tidelog.controller.model.settings import BalancerMode, BalancerSettings, ScaleSettings
from tidelog.runtime.steps import Steps

logger = logging.getLogger(__name__)

LOOK_S = 1.0
STEADY_S = 2.0
"""How long the brokers must have been the same: several that join together are one change."""
STUCK_MS = 60_000
"""A move that has been running for this long (e.g. its target is dead) is not waited for."""
MODE_KEY = "balancer/mode"
"""The key of the mode that an operator has set at run time; it overrides the configuration."""
MODES: tuple[str, ...] = get_args(BalancerMode)
MAX_SHOWN = 1_024
"""Limit of moves in the report of a plan."""


class BalanceSchedule:
    """The balancer's state; see the module."""

    def __init__(self, settings: BalancerSettings, scale: ScaleSettings, image: Callable[[], Image]) -> None:
        self._in_force = SettingsInForce("balancer", settings, lambda: image().cluster_configs)
        self._scale = scale
        self._image = image
        self.loads = LoadTable()
        self._scaler = Scaler(scale)
        self._looked_s = 0.0
        self._queue: deque[PlannedMove] = deque()
        self._round = 0
        """Grows with whatever makes a plan that is being made obsolete."""
        self._rested_s: dict[PartitionKey, float] = {}
        """When each partition was last seen moving."""
        self._brokers: dict[int, str] = {}
        self._move_ages = MoveAges()
        self._steady_since_s = 0.0
        self._due_s = 0.0
        self._latest = Plan([], ["not looked yet"])
        self._latest_ms = 0
        self._begun = False
        """Whether the latest plan is being or was executed."""
        self._asked = False
        """Whether the queued moves were requested; else they are due to the mode `on`."""
        self._issued = 0
        self._issued_in_plan = 0

    # --- life cycle ----------------------------------------------------------------------------------------------

    def activated(self, now_s: float) -> None:
        """Reset: this controller became active."""
        self._scaler.activated(now_s)
        self._round += 1
        self._queue.clear()
        self._brokers = {}
        self._issued = 0
        self._latest = Plan([], ["not looked yet"])

    @property
    def _settings(self) -> BalancerSettings:
        return self._in_force.now

    @property
    def mode(self) -> str:
        """Return the mode set by an operator, else the configured one."""
        told = (self._image().kv.get(MODE_KEY) or b"").decode()
        return told if told in MODES else self._settings.mode

    @property
    def has_more(self) -> bool:
        """Return whether moves of a plan are still to be issued."""
        return bool(self._queue)

    # --- decisions -----------------------------------------------------------------------------------------------

    def look(self, now_s: float, now_ms: int) -> Steps[MovePartitions | None]:
        """Return the command due now; the caller calls `issued` when it was accepted."""
        if now_s - self._looked_s >= LOOK_S / 2:
            self._looked_s = now_s
            self.loads.keep(self._image().brokers)
            self._look_at_scale(now_s)
        self._notice_brokers(now_s)
        mode = self.mode
        if self._queue and not self._asked and mode != "on":
            self._queue.clear()  # switched off during the execution
        if self._queue:
            return self._next_batch(now_s)
        if mode == "off" or now_s < self._due_s or not self._is_quiet(now_s):
            return None
        self._due_s = now_s + self._settings.interval_ms / 1000
        known = len(self._latest.moves)
        plan = yield from self._plan(now_s, now_ms)
        mode = self.mode
        if plan is None or mode == "off":
            return None
        if plan.moves and (mode == "on" or len(plan.moves) != known):  # advice is logged once
            logger.info("the balancer has a plan", extra={"moves": len(plan.moves), "mode": mode})
        if mode != "on":
            return None
        self._begin(plan)
        return self._next_batch(now_s)

    def begin_now(self, now_s: float, now_ms: int) -> Steps[MovePartitions | None]:
        """Plan and begin on request, whatever the mode. A plan that is being executed continues."""
        plan = None
        while plan is None:
            if self._queue:
                return None
            self._notice_brokers(now_s)
            plan = yield from self._plan(now_s, now_ms)
        self._begin(plan)
        self._asked = True
        return self._next_batch(now_s) if plan.moves else None

    def issued(self, command: MovePartitions, now_s: float) -> None:
        """Record that the controller accepted the command."""
        self._issued += len(command.moves)
        self._issued_in_plan += len(command.moves)
        self._batch_ended(now_s)

    def note(self, delta: Delta, now_s: float) -> None:
        """Record the partitions that a delta moves, whatever the cause."""
        for _, key, record in delta.of("partitions"):
            if record is not None and record.target != NO_REPLICA_SET:
                self._rested_s[key] = now_s

    def _notice_brokers(self, now_s: float) -> None:
        found = {each: master.rack for each, master in takers(self._image()).items()}
        if found != self._brokers:
            self._brokers = found
            self._round += 1
            self._steady_since_s = now_s
            self._due_s = now_s
            self._queue.clear()
            self._rested_s.clear()

    def _is_quiet(self, now_s: float) -> bool:
        ages = self._move_ages.look(self._image(), now_s)
        return now_s - self._steady_since_s >= STEADY_S and all(1000 * age_s > STUCK_MS for age_s in ages.values())

    def _plan(self, now_s: float, now_ms: int) -> Steps[Plan | None]:
        """Make a plan; None if it is obsolete already."""
        begun, settings = self._round, self._settings
        rested = {key: at for key, at in self._rested_s.items() if now_s - at < settings.cooldown_ms / 1000}
        self._rested_s = rested
        picture = yield from picture_of(self._image(), self.loads, now_s, rested)
        plan = yield from make_plan(picture, settings, self._name)
        self._notice_brokers(now_s)
        if self._round != begun:
            return None
        self._latest = plan
        self._begun = False
        self._latest_ms = now_ms
        return plan

    def _name(self, key: PartitionKey) -> str:
        topic = self._image().topics.get(key[0])
        return f"{topic.name if topic is not None else key[0].hex()}-{key[1]}"

    def _begin(self, plan: Plan) -> None:
        self._round += 1
        self._queue = deque(plan.moves)
        self._begun = True
        self._asked = False
        self._issued_in_plan = 0

    def _next_batch(self, now_s: float) -> MovePartitions | None:
        """Return the next moves, as many as may be in flight. Moves that no longer fit the image are dropped."""
        image, limit = self._image(), self._settings.max_moves_in_flight
        room = limit - self._going_on()
        if room < min(len(self._queue), max(1, limit // 4)):
            return None  # in batches: a command per hand-over would be too many
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
            return MovePartitions(tuple(batch))
        self._batch_ended(now_s)
        return None

    def _going_on(self) -> int:
        """Return how many moves there are but those that wait for a dead broker, and may do so for ever."""
        image = self._image()
        lives = {each for each in image.replica_sets if image.master_of(each) is not None}
        return sum(
            record is not None and record.replica_set in lives and record.target in lives
            for record in (image.partition(*key) for key in image.index.moving)
        )

    def _batch_ended(self, now_s: float) -> None:
        if not self._queue:
            self._due_s = now_s + self._settings.interval_ms / 1000
            logger.info("the balancer is executing its plan", extra={"moves": self._issued_in_plan})

    def weights(self, now_s: float) -> tuple[tuple[int, int], ...]:
        """Return the load of each replica set in thousandths of a mean partition; empty: unknown, or hardly any."""
        masters = takers(self._image())
        loads = {master.id: self.loads.get(master.id, now_s) for master in masters.values()}
        known = {each: load.bytes_in + load.bytes_out for each, load in loads.items() if load is not None}
        total = sum(known.values())
        if len(known) < len(loads) or not total or total < len(known) * self._settings.min_bytes_per_s:
            return ()
        counts = self._image().index.partition_counts
        partitions = sum(counts.get(each, 0) for each in masters)
        sets = Counter(master.id for master in masters.values())
        bytes_ = {each: known[master.id] // sets[master.id] for each, master in masters.items()}
        return tuple((each, 1_000 * partitions * rate // total) for each, rate in sorted(bytes_.items()))

    # --- reports -------------------------------------------------------------------------------------------------

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the state: findings of the last look, and the moves still to be issued."""
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
            "partitions": partitions_led(self._image(), broker_id),
            "bytes_in": load.bytes_in if load is not None else None,
            "bytes_out": load.bytes_out if load is not None else None,
            "requests": load.requests / 1000 if load is not None else None,
            "cpu_percent": load.cpu / 10 if load is not None else None,
        }

    def plan(self, now_s: float, now_ms: int) -> Steps[dict[str, Any]]:
        """Return the plan that would begin now, with a reason for each move, without executing it."""
        plan = None
        while plan is None:
            plan = yield from self._plan(now_s, now_ms)
        return self._shown(plan)

    def shown(self) -> dict[str, Any]:
        """Return the latest plan in the format of `plan`."""
        return self._shown(self._latest)

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

    # --- number of brokers ---------------------------------------------------------------------------------------

    def _look_at_scale(self, now_s: float) -> Wanted:
        reports = [
            BrokerReport(record.id, self.loads.get(record.id, now_s))
            for _, record in sorted(self._image().brokers.items())
            if record.alive and not record.draining
        ]
        return self._scaler.look(reports, now_s)

    def scale(self, now_s: float) -> dict[str, Any]:
        """Return the report for `/scale`."""
        latest = self._scaler.latest or self._look_at_scale(now_s)
        return latest.as_dict(self._scale)

    def told(self) -> HeartbeatReply | None:
        """Return the reply to heartbeats."""
        latest = self._scaler.latest
        if latest is None:
            return None
        planned = len(self._queue) if self._begun else len(self._latest.moves)
        return HeartbeatReply(latest.wanted, latest.brokers, planned, self._issued)
