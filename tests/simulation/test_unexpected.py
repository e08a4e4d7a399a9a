"""Which exceptions a simulation takes for defects, and which it has raised itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidelog.controller.model import commands as c
from tidelog.controller.model.errors import CommandFailed, to_wire
from tidelog.runtime.errors import Unavailable
from tidelog.simulation.world.consensus import RaftWatch
from tidelog.simulation.world.odd import OddErrors, is_odd


@pytest.mark.parametrize(("error", "rules"), [(CommandFailed("no"), ["defect"]), (Unavailable("no"), [])])
def test_a_command_that_fails_unexpectedly_is_found(error: Any, rules: list[str]) -> None:
    watch = RaftWatch()
    blob = c.encode_envelope(c.Envelope(c.FORMAT_VERSION, 1, 0, "", 0, 0, c.PrepareObjects(1, 1)), 0)
    watch.refused(7, blob, c.encode(c.Result(6, msgspec.Raw(b"\xc0"), to_wire(error))))
    assert [finding.rule for finding in watch.findings] == rules


def test_what_the_simulator_raises_and_what_comes_of_it_is_known() -> None:
    odd = OddErrors()
    odd.hosts, odd.places, odd.probability = frozenset(("b1",)), frozenset(("disk",)), 1.0
    with pytest.raises(Exception) as raised:  # of any type
        odd.strike("disk", "b1")
    later = RuntimeError("cannot go on")
    later.__context__ = raised.value
    assert is_odd(raised.value)
    assert is_odd(later)
    assert is_odd(ExceptionGroup("both", [ValueError("no"), later]))
    assert not is_odd(RuntimeError("a defect"))
