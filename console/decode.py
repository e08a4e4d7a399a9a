"""Bytes of records as JSON that a page can show: text, JSON, or hexadecimal. Sans-I/O.

Invariants: what is returned holds at most `limit` bytes of the value; nothing is guessed about what was cut off, so a
cut value is never called JSON.

Entry: `shown`.
"""

from __future__ import annotations

import codecs
import json
import unicodedata
from typing import Any, Final

VALUE_LIMIT: Final = 4 << 10
"""Bytes of a value in a list of records."""
FULL_LIMIT: Final = 512 << 10
"""Bytes of a value that is asked for alone."""
MAX_DEPTH: Final = 40
_PLAIN_CONTROLS: Final = frozenset("\t\n\r")


def shown(data: bytes | None, limit: int = VALUE_LIMIT) -> dict[str, Any]:
    """Return `kind` (`null`, `text`, `json` or `bytes`), `text`, `size_bytes`, and whether it is `cut`."""
    if data is None:
        return {"kind": "null", "text": "", "size_bytes": 0, "cut": False}
    cut = len(data) > limit
    head = data[:limit]
    text = _text(head, cut=cut)
    about = {"size_bytes": len(data), "cut": cut}
    if text is None:
        return {"kind": "bytes", "text": head[: limit // 2].hex(" "), **about, "cut": len(data) > limit // 2}
    pretty = None if cut else _pretty(text)
    if pretty is not None:
        return {"kind": "json", "text": pretty, **about}
    return {"kind": "text", "text": text, **about}


def _text(head: bytes, *, cut: bool) -> str | None:
    """The text, without a character that the cut went through; None if it is not text."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head, final=not cut)
    except UnicodeDecodeError:
        return None
    if any(unicodedata.category(each) == "Cc" and each not in _PLAIN_CONTROLS for each in text):
        return None
    return text


def _pretty(text: str) -> str | None:
    """The document with indentation; None if it is no JSON object or array, or too deep to be read so."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return _indented(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _indented(text: str) -> str | None:
    """White space between the tokens of a valid document, and nothing else changed: numbers stay as they were written.

    None if it is deeper than `MAX_DEPTH`: indentation would be most of it.
    """
    parts: list[str] = []
    depth, quoted, escaped = 0, False, False
    for each in text:
        if quoted:
            parts.append(each)
            quoted = escaped or each != '"'
            escaped = each == "\\" and not escaped
        elif each in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                return None
            parts += each, "\n" + "  " * depth
        elif each in "}]":
            depth -= 1
            is_empty = parts[-2] in ("{", "[") and parts[-1].isspace()
            parts[-1:] = [each] if is_empty else [parts[-1], "\n" + "  " * depth, each]
        elif each == ",":
            parts += each, "\n" + "  " * depth
        elif each == ":":
            parts += each, " "
        elif not each.isspace():
            parts.append(each)
            quoted = each == '"'
    return "".join(parts)
