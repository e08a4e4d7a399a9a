"""Tables of the command line: one line a row for programs, and no wider than the terminal for people."""

from __future__ import annotations

import sys

import pytest

from tidelog.cli import output

HEADERS = ["TOPIC", "PARTITION", "LEADER", "EPOCH", "MOVES-TO", "SINCE", "PHASE", "ATTEMPTS", "PROBLEM"]
ROWS = [
    ["orders", 0, 1, 7, 2, "2026-07-30T12:00:00.000Z", "uploading", 1, None],
    ["payments-of-the-last-year", 11, 3, 1234, 1, "2026-07-30T12:00:00.000Z", "closing", 12, "the bucket is slow"],
]


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_a_table_fits_the_terminal_and_loses_nothing(columns: int) -> None:
    text = output.table(HEADERS, ROWS, right=["PARTITION", "EPOCH"], columns=columns)
    lines = text.splitlines()
    assert max(map(len, lines)) <= columns
    rows = len(lines) // 3
    assert lines[0].startswith("TOPIC") and all(line.startswith("    ") for line in lines[1:rows])
    wanted = " ".join([*HEADERS, *(output.cell(value) for row in ROWS for value in row)])
    assert " ".join(text.split()) == wanted


def test_a_row_is_one_line_where_no_terminal_reads_it() -> None:
    assert len(output.table(HEADERS, ROWS).splitlines()) == 3
    assert len(output.table(HEADERS, ROWS, columns=300).splitlines()) == 3


def test_a_cell_that_is_wider_than_the_terminal_is_not_cut() -> None:
    assert output.table(["A", "B", "C"], [["x", "y" * 50, "z"]], columns=20).splitlines() == [
        "A", "    B", "    C", "x", "    " + "y" * 50, "    z",
    ]  # fmt: skip


def test_columns_that_just_fit_stay_on_their_line() -> None:
    assert output.table(["AAA", "BBB"], [], columns=8) == "AAA  BBB"
    assert output.table(["AAA", "BBB"], [], columns=7) == "AAA\n    BBB"


@pytest.mark.parametrize("is_there", [True, False])
def test_progress_needs_no_rich(
    is_there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rich` is in the extra `console`; without it a long operation shows no bar, and goes on."""
    if not is_there:
        monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with output.Progress("copying", 100) as progress:
        progress.update(50)
    assert ("copying" in capsys.readouterr().err) == is_there
