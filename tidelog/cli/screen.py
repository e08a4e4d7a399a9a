"""What `--watch` writes: on a terminal a page in the place of the last one, elsewhere blocks one after the other.

A page overwrites the last one line by line, so that nothing flickers, and is cut to the height of the terminal: what
scrolled away could not be overwritten. A terminal that knows no control sequences (`TERM=dumb`) gets blocks, too.

Sans-IO. Entry: `page`, `block`.
"""

from __future__ import annotations

from collections.abc import Sequence

HOME = "\x1b[H"
TO_LINE_END = "\x1b[K"
TO_PAGE_END = "\x1b[J"
CLEAR = "\x1b[2J"


def block(text: str, time: str) -> str:
    """Return what is written to a pipe or a file, an empty line at its end."""
    return f"{time}\n\n{text}\n\n"


def page(text: str, time: str, *, columns: int, rows: int, is_first: bool) -> str:
    """Return what shows `text` on a terminal of this size: never more than it has lines."""
    lines = [f"{time}  Ctrl-C ends", "", *text.split("\n")]
    kept = _that_fit(lines, columns, rows - 1)  # the cursor waits on the last one
    if len(kept) < len(lines):
        kept = _that_fit(lines, columns, rows - 2)
        kept.append(f"… {len(lines) - len(kept)} lines more: a higher window shows them, a pipe all"[: columns - 1])
    body = "".join(f"{line}{TO_LINE_END}\n" for line in kept)
    return f"{CLEAR if is_first else ''}{HOME}{body}{TO_PAGE_END}"


def _that_fit(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    kept: list[str] = []
    for line in lines:
        rows -= max(1, -(-len(line) // columns))  # a line that is wider than the terminal takes several
        if rows < 0:
            break
        kept.append(line)
    return kept
