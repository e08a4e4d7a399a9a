"""How long a broker's start waits for the end of a process with another copy of its directory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.broker.test_election_waits import StepClock
from tidelog.broker.inputs import BrokerIdentity
from tidelog.broker.membership import NOTICE_S, BrokerMembership
from tidelog.controller.model.errors import DirectoryInUse
from tidelog.controller.model.overrides import SESSION_TIMEOUT

CONFIGURED_S = 12.0


async def waited(overrides: dict[str, str], *, patience_s: float = CONFIGURED_S) -> float:
    """The other process never ends; return after how many seconds the start gave up."""
    clock = StepClock()
    began = clock.now_s

    async def register(_registration: object) -> int:
        raise DirectoryInUse("another copy")

    controller = SimpleNamespace(register_broker=register, image=SimpleNamespace(cluster_configs=overrides))
    identity = BrokerIdentity(1, "code", False, lambda _cluster: None, patience_s=patience_s)
    membership = BrokerMembership(identity, cast("Any", controller), clock, cast("Any", None), dict)
    with pytest.raises(DirectoryInUse):
        await membership.register(cast("Any", None))
    return clock.now_s - began


async def test_a_start_waits_for_the_session_timeout_that_is_in_force() -> None:
    assert await waited({}) == CONFIGURED_S
    assert await waited({SESSION_TIMEOUT: "30000"}) == 30.0 + NOTICE_S
    assert await waited({SESSION_TIMEOUT: "3000"}) == CONFIGURED_S, "the other one may have begun before the override"
    assert await waited({SESSION_TIMEOUT: "soon"}) == CONFIGURED_S
    assert await waited({SESSION_TIMEOUT: "30000"}, patience_s=0.0) == 0.0
