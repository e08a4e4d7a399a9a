"""The exit codes: docs/cli.md has one table, and it says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import tidelog.process.serve  # noqa: F401 — imports every class of errors
from tidelog.cli.main import EXIT_CODES
from tidelog.cli.subcommands.produce import INTERRUPTED
from tidelog.cli.subcommands.status import SOMETHING_WRONG
from tidelog.process.supervisor import RESTART_EXIT_CODE, RESTARTED_EXIT_CODES
from tidelog.runtime.errors import TidelogError

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def errors(kind: type[TidelogError]) -> set[type[TidelogError]]:
    return {kind}.union(*map(errors, kind.__subclasses__()))


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("| exit code | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    assert {int(code): text for code, text in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)} == EXIT_CODES
    assert len(table.splitlines()) == len(EXIT_CODES)


def test_every_code_that_is_used_is_in_the_table() -> None:
    used = {kind.exit_code for kind in errors(TidelogError)} | {0, INTERRUPTED, SOMETHING_WRONG, RESTART_EXIT_CODE}
    assert used == set(EXIT_CODES)
    assert set(EXIT_CODES) >= RESTARTED_EXIT_CODES
