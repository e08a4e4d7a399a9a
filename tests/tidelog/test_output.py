"""Tables of the command line: one line a row for programs, and no wider than the terminal for people."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
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


def test_names_that_clients_choose_neither_command_the_terminal_nor_end_a_row() -> None:
    name = "readers\n\x1b]0;title\x07\x9b2J\udcff"
    shown = r"readers\n\x1b]0;title\x07\x9b2J\udcff"
    assert output.table(["GROUP", "STATE"], [[name, "empty"]]).splitlines()[1:] == [f"{shown}  empty"]
    assert output.pairs([("group", name), ("é", "日本")]) == f"group  {shown}\né      日本"


def test_a_cell_that_is_wider_than_the_terminal_is_not_cut() -> None:
    assert output.table(["A", "B", "C"], [["x", "y" * 50, "z"]], columns=20).splitlines() == [
        "A", "    B", "    C", "x", "    " + "y" * 50, "    z",
    ]  # fmt: skip


def test_columns_that_just_fit_stay_on_their_line() -> None:
    assert output.table(["AAA", "BBB"], [], columns=8) == "AAA  BBB"
    assert output.table(["AAA", "BBB"], [], columns=7) == "AAA\n    BBB"


def test_a_text_that_does_not_fit_goes_on_below_itself() -> None:
    why = "the bucket answers with 503 to everything that this broker asks it for"
    lines = output.table(["ID", "WHY"], [[7, why]], columns=40).splitlines()
    assert lines == [
        "ID",
        "    WHY",
        "7",
        "    the bucket answers with 503 to",
        "    everything that this broker asks it",
        "    for",
    ]
    assert output.pairs([("state", why), ("id", 7)], columns=40).splitlines() == [
        "state  the bucket answers with 503 to",
        "       everything that this broker asks",
        "       it for",
        "id     7",
    ]
    assert output.pairs([("state", why)]) == f"state  {why}"


WORDS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=76)
CELLS = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)
TABLES = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.lists(WORDS, min_size=count, max_size=count),
        st.lists(st.lists(CELLS, min_size=count, max_size=count), max_size=4),
    )
)


@given(TABLES)
@settings(max_examples=examples(200), deadline=None)
def test_every_table_fits_eighty_columns_if_its_words_do(table: tuple[list[str], list[list[str]]]) -> None:
    headers, rows = table
    text = output.table(headers, rows, columns=80)
    assert max(map(len, text.splitlines())) <= 80
    assert " ".join(text.split()) == " ".join([*headers, *(value for row in rows for value in row)])


def test_a_sentence_is_divided_at_its_blanks_and_none_is_lost() -> None:
    reason = "cpu is at 95% of the capacity of 1 brokers (target: 70%); 2 suffice now, but not yet for the last 15 s"
    lines = output.paragraph(reason).splitlines()
    assert len(lines) == 2 and max(map(len, lines)) <= output.PLAIN_COLUMNS
    assert " ".join(lines) == reason
