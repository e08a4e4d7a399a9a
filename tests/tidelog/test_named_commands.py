"""Every command that a message or the documentation names is one that there is."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from tidelog.cli.main import cli

ROOT = Path(__file__).parents[2]
ROOMS = (
    "batch",
    "broker",
    "chaos",
    "console",
    "controller",
    "pyspark_tidelog",
    "runtime",
    "storage",
    "stream",
    "tidelog",
)
FILES = sorted(
    [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    + [*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.y*ml"), ROOT / "README.md"]
)
OTHERS = {"tidelog admin http token", "tidelog directory", "tidelog read token", "tidelog x"}
"""Quoted, and no commands: what keys are derived from, and the beginnings of files."""
NAMED = re.compile(r"`tidelog((?:\s+[a-z][a-z-]*)+)")


def unknown(words: list[str]) -> str | None:
    """The first word that is neither a command of the group before it nor an argument; None if all are known."""
    command: click.Command = cli
    for word in words:
        if not isinstance(command, click.Group):
            return None
        found = command.get_command(click.Context(command), word)
        if found is None:
            return word
        command = found
    return None


def wrong(text: str) -> list[str]:
    """The commands in a text that there are not."""
    named = (" ".join(each.split()) for each in NAMED.findall(text))
    return sorted({f"tidelog {each}" for each in named if unknown(each.split())} - OTHERS)


def test_every_command_that_is_named_exists() -> None:
    assert len(FILES) > 500
    found = {str(path.relative_to(ROOT)): wrong(path.read_text("utf-8")) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("run `tidelog upgrade` first", ["tidelog upgrade"]),
        ("run `tidelog cluster upgrade --dry-run`", []),
        ("`tidelog\nbroker drian 1`", ["tidelog broker drian"]),
        ("`tidelog` and `tidelog topic create orders`", []),
    ],
)
def test_a_command_that_there_is_not_is_found(text: str, names: list[str]) -> None:
    assert wrong(text) == names
