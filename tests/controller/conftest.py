"""Fixtures for the tests of the controller."""

from __future__ import annotations

import pytest

from tidelog.controller.active import lifecycle, state_keeper

ROUND_S = 0.05


@pytest.fixture
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> float:
    """The periodic work of controllers is done every `ROUND_S` seconds, which it returns, and not once a second."""
    monkeypatch.setattr(lifecycle, "INTERVAL_S", ROUND_S)
    monkeypatch.setattr(state_keeper, "LOOK_S", ROUND_S)
    return ROUND_S
