"""Every rule and every fault is explained where people look for it."""

from __future__ import annotations

from pathlib import Path

from tidelog.chaos.faults import FAULTS, USUAL
from tidelog.simulation import checkers
from tidelog.simulation.checkers import cluster_state

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_rule_is_defined_in_words() -> None:
    text = (DOCS / "checkers.md").read_text()
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert rows >= {*checkers.RULES, *cluster_state.RULES}


def test_every_fault_is_described() -> None:
    text = (DOCS / "cli.md").read_text()
    section = text[text.index("## chaos") :]
    assert [name for name in FAULTS if f"`{name}`" not in section] == []
    assert set(USUAL) <= FAULTS.keys()
