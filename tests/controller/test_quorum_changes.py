"""`QuorumChanges`: an addition is over when the new member has the log; a removal leaves a majority that answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.controller.controller_helpers import until
from tests.support.quorum_world import Member, QuorumWorld
from tidelog.controller.active.levels import LevelRaise
from tidelog.controller.active.members import QuorumChanges
from tidelog.controller.active.role import ActiveRole
from tidelog.controller.image.image import Image
from tidelog.controller.model import commands as c
from tidelog.controller.model.levels import NEWEST, OLDEST, UnsupportedLevel
from tidelog.controller.model.records import ClusterRecord
from tidelog.controller.raft.quorum import MembershipChange
from tidelog.controller.rpc.connection import ChangeParams
from tidelog.runtime.errors import TidelogError, Unavailable

MEMBERS = {1: "127.0.0.1:1", 2: "127.0.0.1:2", 3: "127.0.0.1:3"}


class Quorum:
    """Three controllers; the third has lost its directory, and has a new one."""

    def __init__(self) -> None:
        self.members = dict(MEMBERS)
        self.directories = {1: "a", 2: "b", 3: "lost"}
        self.changes: list[tuple[str, int]] = []
        self.image = Image()
        self.image.version = 100
        self.version = 0
        """That of the third one's metadata."""
        self.asked = asyncio.Event()
        self.answers = True

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        self.changes.append((change.operation, change.node_id))
        if change.operation == "rem":
            del self.members[change.node_id], self.directories[change.node_id]
        else:
            self.members[change.node_id] = change.address
            self.directories[change.node_id] = change.directory

    async def ask(self, address: str) -> dict[str, Any]:
        if address == MEMBERS[2]:
            return {"node": 2, "directory": "b"}
        assert address == MEMBERS[3]
        self.asked.set()
        if not self.answers and self.changes:
            raise Unavailable("refused")
        return {
            "node": 3,
            "cluster_id": "",
            "levels": [OLDEST, NEWEST],
            "directory": "new",
            "version": self.version,
        }

    def changer(self, timeout_s: float) -> QuorumChanges:
        return QuorumChanges(
            1, cast("Any", self), lambda: self.image, lambda: NEWEST, self.ask, cast("Any", TidelogError), timeout_s
        )

    async def add(self, timeout_s: float = 60.0) -> None:
        await self.changer(timeout_s).change(ChangeParams("add", 3, MEMBERS[3]))


async def test_an_addition_waits_until_the_member_has_caught_up() -> None:
    quorum = Quorum()
    adding = asyncio.create_task(quorum.add())
    async with asyncio.timeout(60):
        for version in (0, 50, 99):
            quorum.version = version
            quorum.asked.clear()
            await quorum.asked.wait()
            assert not adding.done()
        quorum.version = 100
        await adding
    assert quorum.changes == [("rem", 3), ("add", 3)]


@pytest.mark.parametrize("answers", [True, False])
async def test_one_that_does_not_catch_up_is_named_and_adding_it_again_only_waits(answers: bool) -> None:
    quorum = Quorum()
    quorum.answers = answers
    with pytest.raises(Unavailable, match="has not caught up" if answers else "does not answer") as caught:
        await quorum.add(0.2)
    assert caught.value.hint is not None
    quorum.version, quorum.answers = 100, True
    await quorum.add()
    assert quorum.changes == [("rem", 3), ("add", 3)], "nothing is changed again"


async def changes_of(world: QuorumWorld, leader: Member) -> QuorumChanges:
    """What the leader changes the quorum by; it asks the members that run."""
    ids = {await world.address(leader.node_id, each): each for each in (1, 2, 3)}

    async def ask(address: str) -> dict[str, Any]:
        member = world.members.get(ids[address])
        if member is None:
            raise Unavailable("nobody listens there")
        return {"node": member.node_id, "directory": member.raft.status()["directory"]}

    return QuorumChanges(leader.node_id, leader.raft, Image, lambda: NEWEST, ask, cast("Any", TidelogError), 2.0)


async def test_no_member_is_removed_whose_removal_would_leave_no_majority(tmp_path: Path) -> None:
    """With one of three dead the others are all of the majority; who removes the wrong one is told, not stranded."""
    world = QuorumWorld(tmp_path)
    try:
        for node_id in (1, 2, 3):
            await world.start(node_id)
        leader = await world.leader()
        await until(lambda: len(leader.raft.directories) == 3)
        dead, alive = (each for each in (1, 2, 3) if each != leader.node_id)
        await world.stop(dead)
        changes = await changes_of(world, leader)
        with pytest.raises(Unavailable, match=f"controller {dead}: nobody listens there"):
            await changes.change(ChangeParams("rem", alive, ""))
        await leader.raft.propose(b"1 ", 10.0)
        await changes.change(ChangeParams("rem", dead, ""))
        assert sorted(leader.raft.members) == sorted({leader.node_id, alive})
        await leader.raft.propose(b"2 ", 10.0)
    finally:
        await world.close()


async def test_a_removal_says_whether_there_was_such_a_member() -> None:
    quorum = Quorum()
    changes = quorum.changer(60.0)
    assert not await changes.change(ChangeParams("rem", 7, "")) and not quorum.changes
    assert await changes.change(ChangeParams("rem", 3, ""))
    assert not await changes.change(ChangeParams("rem", 3, ""))
    assert quorum.changes == [("rem", 3)]


async def test_a_stranger_in_the_place_of_a_member_is_no_part_of_the_majority() -> None:
    """The third one answers, over another directory: it has no vote."""
    quorum = Quorum()
    with pytest.raises(Unavailable, match="controller 3: its directory is another one"):
        await quorum.changer(60.0).change(ChangeParams("rem", 2, ""))
    assert quorum.changes == []


class FourControllers:
    """Four controllers, of which one is dead; a change takes some rounds of the event loop, as it does with Raft."""

    def __init__(self) -> None:
        self.members = {**MEMBERS, 4: "127.0.0.1:4"}
        self.directories = {1: "a", 2: "b", 3: "c", 4: "d"}

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        del self.members[change.node_id], self.directories[change.node_id]

    async def ask(self, address: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        node_id = int(address.rpartition(":")[2])
        if node_id == 4:
            raise Unavailable("refused")
        return {"node": node_id, "directory": self.directories[node_id]}


class Upgraded:
    """A controller that is alone at the level before the newest, and one that knows no other; both take their time."""

    def __init__(self) -> None:
        self.members = {1: MEMBERS[1]}
        self.directories = {1: "a"}
        self.level = NEWEST - 1
        self.changes = QuorumChanges(
            1, cast("Any", self), lambda: self.image, lambda: self.level, self.ask, cast("Any", TidelogError), 60.0
        )
        role = ActiveRole(lambda: self.image, self.propose, lambda: True, lambda: 0)
        self.raising = LevelRaise(role, 1, lambda: self.members, self.ask, lambda: 0, self.changes.changing)

    @property
    def image(self) -> Image:
        cluster = ClusterRecord("c", 1, 1, 0, tuple(self.members.items()), 0, self.level)
        return cast("Image", SimpleNamespace(cluster=cluster, cluster_id="c", version=100, brokers={}, kv={}))

    async def change_membership(self, change: MembershipChange, timeout_s: float) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.members[change.node_id], self.directories[change.node_id] = change.address, change.directory

    async def ask(self, address: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        levels = [OLDEST, NEWEST - 1]
        return {"node": 3, "cluster_id": "c", "levels": levels, "directory": "c", "version": self.image.version}

    async def propose(self, command: c.AnyCommand) -> None:
        assert isinstance(command, c.SetLevel)
        for _ in range(5):
            await asyncio.sleep(0)
        self.level = command.level


@pytest.mark.parametrize("addition_first", [True, False])
@pytest.mark.parametrize("rounds", range(6))
async def test_no_controller_is_added_that_does_not_support_the_level_that_is_being_raised(
    addition_first: bool, rounds: int
) -> None:
    """It would count in the quorum, and end as soon as it reads of the level."""
    quorum = Upgraded()

    async def addition() -> str:
        try:
            await quorum.changes.change(ChangeParams("add", 3, MEMBERS[3]))
        except UnsupportedLevel as error:
            return error.message
        return ""

    async def raising() -> str:
        try:
            await quorum.raising.run(NEWEST, dry_run=False)
        except UnsupportedLevel as error:
            return error.message
        return ""

    first = asyncio.create_task(addition() if addition_first else raising())
    for _ in range(rounds):
        await asyncio.sleep(0)
    second = asyncio.create_task(raising() if addition_first else addition())
    said = await first, await second
    assert (quorum.level == NEWEST) != (3 in quorum.members), said
    supports = f"levels {OLDEST} to {NEWEST - 1}"
    told = f"the cluster is at feature level {NEWEST}; controller 3 supports {OLDEST} to {NEWEST - 1}"
    assert sorted(said)[0] == "" and (told in said or any(f"controller 3 ({supports})" in one for one in said)), said


async def test_of_two_removals_at_once_the_second_is_checked_against_what_the_first_left() -> None:
    """Each of them would leave two of three that answer; both together leave one of two, and no quorum."""
    quorum = FourControllers()
    changes = QuorumChanges(
        1, cast("Any", quorum), Image, lambda: NEWEST, quorum.ask, cast("Any", TidelogError), timeout_s=60.0
    )
    removals = (changes.change(ChangeParams("rem", each, "")) for each in (2, 3))
    first, second = await asyncio.gather(*removals, return_exceptions=True)
    assert first is True and isinstance(second, Unavailable)
    assert sorted(quorum.members) == [1, 3, 4]
