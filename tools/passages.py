"""Prose of the repository: markdown, docstrings and comments, split into passages.

A passage of a module is one docstring (also of an assignment) or one block of comments; of a page, the whole page. The
changelog is excluded, because it contains former names.

Entry: `passages`, `links`, `anchors`, `spans`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.source import Repository, Source

_LEFT_OUT = "CHANGELOG.md"
_FENCE = re.compile(r"^ *(```+|~~~+).*?(?:^ *\1[`~]* *$|\Z)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)((?:(?!\n[ \t]*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)|^ {0,3}\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
_SET_ANCHOR = re.compile(r"<a\s+(?:id|name)=[\"']([^\"']+)")
_LINKED_TEXT = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Passage:
    """A piece of prose and its position."""

    path: str
    line: int
    text: str

    @property
    def is_page(self) -> bool:
        """Whether it is a markdown page."""
        return self.path.endswith(".md")

    def place(self, position: int) -> str:
        """Return the `path:line` of a position in the text."""
        return f"{self.path}:{self.line + self.text.count(chr(10), 0, position)}"


def passages(repository: Repository) -> Iterator[Passage]:
    """Iterate over all passages of the repository."""
    for path in repository.files:
        if path.endswith(".md") and path != _LEFT_OUT:
            yield Passage(path, 1, (repository.root / path).read_text(encoding="utf-8"))
    for source in repository.sources:
        yield from _docstrings(source)
        yield from _comments(source)


def _docstrings(source: Source) -> Iterator[Passage]:
    for node in source.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Passage(source.path, node.lineno, node.value.value)


def _comments(source: Source) -> Iterator[Passage]:
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield Passage(source.path, first, "\n".join(lines))
                lines = []
            first = first if lines else token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield Passage(source.path, first, "\n".join(lines))


def spans(text: str) -> Iterator[tuple[int, str]]:
    """Iterate over position and text of everything in backticks."""
    text = _FENCE.sub(_blank, text)
    return ((match.start(2), match[2].strip()) for match in _CODE.finditer(text))


def links(text: str) -> Iterator[tuple[int, str]]:
    """Iterate over position and target of every markdown link outside code."""
    text = _CODE.sub(_blank, _FENCE.sub(_blank, text))
    return ((match.start(), match[1] or match[2]) for match in _LINK.finditer(text))


def without_links(text: str) -> str:
    """Return `text` with the targets of its links blanked."""
    return _LINK.sub(_blank, text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a markdown page: its headings, as GitHub writes them, and anchors in HTML."""
    text = _FENCE.sub(_blank, page.read_text(encoding="utf-8"))
    found = set(_SET_ANCHOR.findall(text))
    seen: Counter[str] = Counter()
    for heading in _HEADING.findall(text):
        slug = _slug(heading)
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def _slug(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", _LINKED_TEXT.sub(r"\1", heading).lower())
    return words.replace(" ", "-")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])
