"""The active controller's part in feature levels: who supports what, and raising the level.

Brokers tell their range with their registration. Controllers are asked when it matters, each directly: one that cannot
be asked does not support anything newer. While they are asked, and until the level is raised, none is added: it would
have been checked against the level before. `LevelRaise.run` may be repeated, also after its own outcome was unknown.

Entry: `LevelRaise`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from tidelog.controller.active.role import ActiveRole
from tidelog.controller.image.image import Image
from tidelog.controller.model.commands import SetLevel
from tidelog.controller.model.levels import (
    BEFORE_LEVELS,
    SUPPORTED,
    LevelRange,
    UnsupportedLevel,
    highest_common,
    level_key,
    range_in,
    require_all,
    unable,
)
from tidelog.runtime.errors import InvalidInput, TidelogError

AskStatus = Callable[[str], Awaitable[dict[str, Any]]]
"""Returns what the controller at an address (`host:port`) says of itself. Raises `TidelogError`."""


class ControllerLevels(NamedTuple):
    """What the controllers say, and which could not be asked, by node id."""

    ranges: dict[int, LevelRange]
    silent: dict[int, str]


def levels_in(status: Mapping[str, Any]) -> LevelRange:
    """Return the range in a controller's status; `BEFORE_LEVELS` for one that does not tell it."""
    found = status.get("levels")
    return LevelRange(int(found[0]), int(found[1])) if found else BEFORE_LEVELS


def broker_ranges(image: Image) -> dict[int, LevelRange]:
    """Return what each registered broker supports."""
    return {
        each.id: range_in(image.kv.get(level_key(each.id)), each.registration_epoch)
        for each in sorted(image.brokers.values(), key=lambda each: each.id)
    }


class LevelRaise:
    """Finds out who supports which level, and raises the level of the cluster."""

    def __init__(
        self,
        role: ActiveRole,
        node_id: int,
        members: Callable[[], dict[int, str]],
        ask: AskStatus,
        elapsed_ms: Callable[[], int],
        changing: asyncio.Lock,
    ) -> None:
        """`elapsed_ms`: the time since the present term began; `changing`: held while the quorum is changed."""
        self._role = role
        self._node_id = node_id
        self._members = members
        self._ask = ask
        self._elapsed_ms = elapsed_ms
        self._changing = changing

    async def run(self, level: int, *, dry_run: bool) -> dict[str, Any]:
        """Raise the level to `level`, or to the highest that all members support (-1). Returns what was found and done.

        A dry run only reports. The report names the metadata version that it is of. Raises `UnsupportedLevel`, naming
        the members that do not support the level.
        """
        if dry_run:
            return (await self._find(level))[0]
        async with self._changing:
            return await self._raise(level)

    async def _find(self, level: int) -> tuple[dict[str, Any], ControllerLevels]:
        """Return the report of a dry run, and what the controllers say."""
        controllers = await self._controllers()
        image = self._role.image()
        cluster = image.cluster
        assert cluster is not None  # an active controller has applied its `BecomeActive`
        ranges = self._named(controllers, image)
        target = max(cluster.level, highest_common(ranges.values())) if level < 0 else level
        report = {
            "level": cluster.level,
            "target": target,
            "newest": SUPPORTED.newest,
            "members": self._report(target, controllers, image),
            "unable": unable(target, ranges),
            "raised": False,
            "version": image.version,
        }
        return report, controllers

    async def _raise(self, level: int) -> dict[str, Any]:
        report, controllers = await self._find(level)
        in_force, target = report["level"], report["target"]
        if target < in_force:
            raise UnsupportedLevel(
                f"the cluster is at feature level {in_force}, which is not lowered to {target}",
                hint="commands of the higher level may be in the log, which an older version cannot read",
            )
        if in_force == (level if level >= 0 else SUPPORTED.newest):
            return report  # perhaps by an attempt whose answer was lost, with a controller that is silent now
        if controllers.silent:
            told = "; ".join(f"controller {each}: {why}" for each, why in sorted(controllers.silent.items()))
            raise UnsupportedLevel(
                f"these controllers did not say what they support: {told}",
                hint="start them, or remove them with `tidelog controller remove`",
            )
        require_all(target, self._named(controllers, self._role.image()))
        if target == in_force:
            return report
        told_by = tuple((each, one.oldest, one.newest) for each, one in sorted(controllers.ranges.items()))
        await self._role.propose(SetLevel(target, self._elapsed_ms(), told_by))
        return {**report, "level": target, "raised": True, "version": self._role.image().version}

    @staticmethod
    def _named(controllers: ControllerLevels, image: Image) -> dict[str, LevelRange]:
        named = {f"controller {each}": one for each, one in sorted(controllers.ranges.items())}
        return {**named, **{f"broker {each}": one for each, one in broker_ranges(image).items()}}

    @staticmethod
    def _report(target: int, controllers: ControllerLevels, image: Image) -> list[dict[str, Any]]:
        def entry(kind: str, member: int, supported: LevelRange, problem: str) -> dict[str, Any]:
            return {
                "kind": kind,
                "id": member,
                "oldest": supported.oldest,
                "newest": supported.newest,
                "supports_target": target in supported and not problem,
                "problem": problem,
            }

        found = [
            entry("controller", each, one, controllers.silent.get(each, ""))
            for each, one in sorted(controllers.ranges.items())
        ]
        return found + [entry("broker", each, one, "") for each, one in broker_ranges(image).items()]

    async def _controllers(self) -> ControllerLevels:
        members = self._members() or {self._node_id: ""}
        found = ControllerLevels({}, {})

        async def ask(node_id: int, address: str) -> None:
            try:
                told = await self._ask(address)
                if told.get("node") != node_id:
                    raise InvalidInput(f"controller {told.get('node')} answers at {address}")
                found.ranges[node_id] = levels_in(told)
            except TidelogError as error:
                found.ranges[node_id], found.silent[node_id] = BEFORE_LEVELS, error.message

        found.ranges[self._node_id] = SUPPORTED
        async with asyncio.TaskGroup() as group:
            for node_id, address in members.items():
                if node_id != self._node_id:
                    group.create_task(ask(node_id, address))
        return found
