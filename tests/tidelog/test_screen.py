"""What `--watch` writes: pages on a terminal, blocks elsewhere."""

from __future__ import annotations

import pytest

from tidelog.cli.screen import CLEAR, HOME, TO_LINE_END, TO_PAGE_END, block, page


def shown(text: str) -> list[str]:
    """The lines that a page leaves on a terminal."""
    assert text.endswith(TO_PAGE_END)
    body = text.removeprefix(CLEAR).removeprefix(HOME).removesuffix(TO_PAGE_END)
    return [line.removesuffix(TO_LINE_END) for line in body.split("\n")][:-1]


def test_a_page_takes_the_place_of_the_last_one() -> None:
    first = page("A\nB", "12:00:00", columns=80, rows=24, is_first=True)
    assert first.startswith(CLEAR + HOME) and shown(first) == ["12:00:00  Ctrl-C ends", "", "A", "B"]
    second = page("C", "12:00:02", columns=80, rows=24, is_first=False)
    assert second.startswith(HOME) and shown(second) == ["12:00:02  Ctrl-C ends", "", "C"]
    assert all(line.endswith(TO_LINE_END) for line in second.split("\n")[:-1])


@pytest.mark.parametrize("rows", [3, 6, 24])
@pytest.mark.parametrize("length", [1, 79, 80, 81, 500])
def test_a_page_never_scrolls(rows: int, length: int) -> None:
    lines = shown(page("\n".join(["x" * length] * 40), "12:00:00", columns=80, rows=rows, is_first=False))
    assert sum(max(1, -(-len(line) // 80)) for line in lines) < rows
    left = 42 - (len(lines) - 1)
    assert lines[-1].startswith(f"… {left} lines more")


def test_blocks_have_an_empty_line_between_them() -> None:
    assert block("A", "12:00:00") + block("B", "12:00:02") == "12:00:00\n\nA\n\n12:00:02\n\nB\n\n"
