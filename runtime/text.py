"""Bytes of records in JSON, as text where possible; text that others chose, on a line; paths as the kernel writes them.

Entry: `text_or_base64`, `printable`, `decoded_mount`.
"""

from __future__ import annotations

import base64
import re


def text_or_base64(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return `{name: text}`, or `{name_base64: …}` for bytes that are not UTF-8; None stays None."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def printable(text: str) -> str:
    """Escape what is not printable: names that clients choose must not command the terminal, nor end a line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def decoded_mount(name: str) -> str:
    r"""Return a path as the kernel writes it in its lists of mounts: `\040` is a space."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)
