"""The gate holds confirmations back while the controllers take the WAL for wholly committed."""

from __future__ import annotations

from tidelog.storage.ack_gate import AckGate


def test_a_new_gate_is_open() -> None:
    assert AckGate().admit(100) == 100


def test_a_closed_gate_asks_once_and_holds_what_is_new() -> None:
    gate = AckGate()
    heard: list[str] = []
    gate.on_wanted = lambda: heard.append("wanted")
    gate.on_opened = lambda: heard.append("opened")
    gate.close(164)
    assert (gate.admit(164), gate.is_wanted) == (164, False)
    assert [gate.admit(200), gate.admit(300)] == [164, 164]
    assert gate.is_wanted is True
    gate.open()
    assert gate.admit(300) == 300
    gate.close(300)
    assert gate.admit(400) == 300
    assert heard == ["wanted", "opened", "wanted"]


def test_opening_an_open_gate_changes_nothing() -> None:
    gate = AckGate()
    heard: list[str] = []
    gate.on_opened = lambda: heard.append("opened")
    gate.open()
    assert heard == []
