"""The active controller's part in the quorum: adding and removing members, and transferring the leadership.

Raft itself takes one change at a time and checks it (`tidelog.controller.raft`). What is checked here is that a change
costs no availability: a new member answers, is who it should be and supports the feature level; of the members that a
removal leaves, a majority answers; and after the change enough members were heard from to elect a leader. An addition
is over when the new member has the log: until then it counts, but who stops or replaces another member could stop the
quorum, or lose what only the other one has.

Entry: `QuorumChanges`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tidelog.controller.active.levels import AskStatus, levels_in
from tidelog.controller.image.image import Image
from tidelog.controller.model.errors import NotController
from tidelog.controller.model.levels import DIRECTORIES_LEVEL, UnsupportedLevel
from tidelog.controller.raft.consensus import Consensus
from tidelog.controller.raft.quorum import MAX_MEMBERS, MembershipChange, Quorum, parse_member
from tidelog.controller.rpc.connection import ChangeParams
from tidelog.runtime.errors import InvalidInput, TidelogError, Unavailable

CATCH_UP_LOOK_S = 0.1


class QuorumChanges:
    """Changes the quorum that this controller leads."""

    def __init__(
        self,
        node_id: int,
        consensus: Consensus,
        image: Callable[[], Image],
        level: Callable[[], int],
        ask: AskStatus,
        not_active: Callable[[str], NotController],
        timeout_s: float,
    ) -> None:
        """`level` is the feature level; `not_active` returns the error that sends a client on."""
        self._node_id = node_id
        self._consensus = consensus
        self._image = image
        self._level = level
        self._ask = ask
        self._not_active = not_active
        self._timeout_s = timeout_s
        self.changing = asyncio.Lock()
        """One change at a time, with its checks: they are of the members that the one before it left, and of the
        feature level. Who raises that holds it, too."""

    async def transfer(self, node_id: int | None) -> None:
        """Transfer the leadership to a member, or to any (None). Raises `InvalidInput` if it is no member."""
        members = self._members()
        if node_id is not None and node_id not in members:
            raise InvalidInput(f"node {node_id} is not a member of the quorum {sorted(members)}")
        if node_id != self._node_id:
            await self._consensus.transfer(node_id)

    async def change(self, params: ChangeParams) -> bool:
        """Add or remove a member. Doing it again is harmless. Returns false if there is no such member to remove.

        Raises `InvalidInput`, `UnsupportedLevel`, `Unavailable`. If this controller is the one to be removed, it
        transfers its leadership and raises `NotController`.
        """
        async with self.changing:
            members = self._members()
            if params.operation == "add":
                node_id, address = parse_member(f"{params.node_id}@{params.address}")
                await self._add(members, node_id, address)
            elif params.operation == "rem":
                return await self._remove(members, params.node_id)
            else:
                raise InvalidInput(f"there is no operation {params.operation[:20]!r}")
        return True

    def _members(self) -> dict[int, str]:
        members = self._consensus.members
        if not members:
            raise InvalidInput(
                "this cluster has a single controller without a quorum",
                hint="start it with controller.members and controller.secret_file; `tidelog up --brokers 3` does",
            )
        return members

    async def _remove(self, members: dict[int, str], node_id: int) -> bool:
        if node_id not in members:
            return False
        if len(members) == 1:
            raise InvalidInput("the last controller cannot be removed")
        if node_id == self._node_id:
            await self._consensus.transfer(None)
            raise self._not_active(f"controller {self._node_id} transferred its leadership before its removal; retry")
        await self._take_out(members, node_id)
        return True

    async def _take_out(self, members: dict[int, str], node_id: int) -> None:
        """Remove a member, if the others can go on. Raises `Unavailable`.

        A removal counts from the moment it is in the log: without a majority of the others it would never be committed,
        nor taken back, nor would anything else be.
        """
        others = {each: address for each, address in members.items() if each not in (node_id, self._node_id)}
        answers = await asyncio.gather(*(self._why_silent(each, address) for each, address in others.items()))
        silent = [f"controller {each}: {why}" for each, why in zip(others, answers, strict=True) if why]
        if 2 * (len(members) - 1 - len(silent)) <= len(members) - 1:
            raise Unavailable(
                f"without controller {node_id} the quorum would have no majority: {'; '.join(silent)}",
                hint="start these controllers, or remove them first",
            )
        await self._commit(MembershipChange("rem", node_id, members[node_id]))

    async def _why_silent(self, node_id: int, address: str) -> str:
        """Return why a member cannot be counted on; empty if it answers, and may vote."""
        try:
            found = await self._ask(address)
        except TidelogError as error:
            return error.message
        if found.get("node") != node_id:
            return f"node {found.get('node')} answers at {address}"
        known, told = self._consensus.directories.get(node_id), found.get("directory")
        return "its directory is another one than it was added with" if known and told and known != told else ""

    async def _add(self, members: dict[int, str], node_id: int, address: str) -> None:
        """A new one, or one that has lost its directory: that is removed first, so that its old votes are over."""
        if members.get(node_id) == address:
            known = self._consensus.directories.get(node_id)
            if known is None or node_id == self._node_id:
                return
            directory = await self._meet(node_id, address)
            if directory == "":
                return
            if directory == known:
                await self._caught_up(node_id, address)
                return
            await self._take_out(members, node_id)
        else:
            _check_newcomer(members, node_id, address)
            directory = await self._meet(node_id, address)
        await self._commit(MembershipChange("add", node_id, address, directory))
        await self._caught_up(node_id, address)

    async def _caught_up(self, node_id: int, address: str) -> None:
        """Wait until a member has applied what is applied here now. Raises `Unavailable`."""
        wanted, found = self._image().version, ""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    try:
                        version = (await self._ask(address)).get("version", wanted)
                    except TidelogError as error:
                        found = f"it does not answer: {error.message}"
                    else:
                        if version >= wanted:
                            return
                        found = f"its metadata is of version {version}, not {wanted}"
                    await asyncio.sleep(CATCH_UP_LOOK_S)
        except TimeoutError:
            raise Unavailable(
                f"controller {node_id} is a member now, and has not caught up within {self._timeout_s:g} s: {found}",
                hint="add it again, which only waits for that; stop or replace no other controller before it is done",
            ) from None

    async def _commit(self, change: MembershipChange) -> None:
        quorum = Quorum(self._consensus.members, self._consensus.directories)
        unheard = quorum.with_change(change).unheard() if self._level() >= DIRECTORIES_LEVEL else []
        if unheard:
            raise Unavailable(
                f"after this change the quorum might elect nobody: too few of its members were heard from since this"
                f" cluster began (not yet: {', '.join(map(str, unheard))})",
                hint="start these controllers, or remove them first",
            )
        await self._consensus.change_membership(change, self._timeout_s)

    async def _meet(self, node_id: int, address: str) -> str:
        """The new member must answer, and be who it should be: adding one that does not costs availability.

        Returns the id of its directory; empty if it has none.
        """
        try:
            found = await self._ask(address)
        except TidelogError as error:
            raise InvalidInput(
                f"controller {node_id} does not answer at {address}: {error.message}",
                hint="start its process first, with this quorum and itself in controller.members",
            ) from error
        if found["node"] != node_id:
            raise InvalidInput(f"node {found['node']} answers at {address}, not {node_id}")
        if found["cluster_id"] not in ("", self._image().cluster_id):
            raise InvalidInput(f"controller {node_id} belongs to another cluster, {found['cluster_id']}")
        if self._level() not in levels_in(found):
            raise UnsupportedLevel(
                f"the cluster is at feature level {self._level()}; controller {node_id} supports {levels_in(found)}",
                hint="start this controller in a version that supports the level",
            )
        return str(found.get("directory", ""))


def _check_newcomer(members: dict[int, str], node_id: int, address: str) -> None:
    if node_id in members:
        raise InvalidInput(
            f"controller {node_id} is a member at {members[node_id]}",
            hint="remove it first; to change its address, change controller.members and restart the nodes",
        )
    if address in members.values():
        raise InvalidInput(f"another controller has the address {address}")
    if len(members) >= MAX_MEMBERS:
        raise InvalidInput(f"a quorum has at most {MAX_MEMBERS} members")
