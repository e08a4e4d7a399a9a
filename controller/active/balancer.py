"""`Balancer`: plans and proposes moves from the brokers' load reports (docs/design/0008-balancer.md).

Every controller collects the reports, so that the next active one has them; only the active one plans, about once a
second. Nothing here is replicated: a new active controller plans from the image and the reports. `BalanceSchedule`
decides when to plan and what to command; this module proposes its commands.

Entry: `Balancer`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tidelog.controller.active.balance_schedule import LOOK_S, BalanceSchedule
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.model.commands import MovePartitions
from tidelog.controller.model.settings import BalancerSettings, ScaleSettings
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.steps import in_turns

logger = logging.getLogger(__name__)


class Balancer:
    """The balancer's task; see the module. All methods are called on the event loop's thread."""

    def __init__(
        self,
        settings: BalancerSettings,
        scale: ScaleSettings,
        role: ActiveRole,
        clock: Clock,
    ) -> None:
        self._propose = role.propose
        self._is_active = role.is_active
        self._clock = clock
        self._wake = asyncio.Event()
        self.schedule = BalanceSchedule(settings, scale, role.image)
        """Decides what to do, and reports to operators."""

    def wake(self) -> None:
        """Check for the next moves now: a move has ended."""
        if self.schedule.has_more:
            self._wake.set()

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not self._is_active():
                continue
            try:
                await self.look(self._clock.monotonic())
            except TidelogError as error:
                logger.warning("balancing postponed", extra={"error": str(error)})

    async def look(self, now_s: float) -> None:
        """Propose what is due now. Raises the error of a refused command."""
        await self._issue(await in_turns(self.schedule.look(now_s, self._clock.time_ms())))

    async def carry_out(self) -> dict[str, Any]:
        """Plan now and begin, whatever the mode; if a plan is being executed, continue with it. Return the plan."""
        await self._issue(await in_turns(self.schedule.begin_now(self._clock.monotonic(), self._clock.time_ms())))
        return self.schedule.shown()

    async def _issue(self, command: MovePartitions | None) -> None:
        if command is not None:
            await self._propose(command)
            self.schedule.issued(command, self._clock.monotonic())
