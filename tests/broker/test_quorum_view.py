"""What the quorum's members tell of themselves, as `/status` shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tidelog.broker.admin.quorum import QuorumView

FIGURES = {"active": False, "pid": 7, "leader": "1", "term": 3, "problem": ""}


def view(**members: dict[str, Any]) -> QuorumView:
    """Of members by port."""
    cluster = SimpleNamespace(controllers=[(int(port[1:]), f"host:{port[1:]}") for port in members], active_node=1)

    async def status_of(endpoint: tuple[str, int]) -> dict[str, Any]:
        return {**FIGURES, **members[f"p{endpoint[1]}"]}

    client = SimpleNamespace(image=SimpleNamespace(cluster=cluster, brokers={}), status_of=status_of)
    return QuorumView(cast("Any", client))


async def test_only_the_controller_of_the_newest_term_is_active() -> None:
    report = await view(p1={"active": True, "term": 3}, p2={"active": True, "term": 4}, p3={}).report()
    assert [one["state"] for one in report["members"]] == ["deposed", "active", "follower"]
    assert report["problems"] == ["controller 1 at host:1 takes itself for the active one, and is not"]


async def test_what_a_member_tells_of_its_log_is_a_problem() -> None:
    stalled = "cannot write its log, and waits: no space left on device"
    report = await view(p1={"active": True}, p2={"problem": stalled}, p3={}).report()
    assert report["problems"] == [f"controller 2 at host:2 {stalled}"]


async def test_work_in_which_the_active_controller_fails_is_a_problem() -> None:
    failing = ["has failed at its work (liveness) for 12 s: refused"]
    report = await view(p1={"active": True, "failing": failing}, p2={"failing": failing}, p3={}).report()
    assert report["problems"] == [f"the active controller 1 {failing[0]}"]
