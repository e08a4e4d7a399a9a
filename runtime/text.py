"""Bytes of records in JSON: text where they are text. Entry: `text_or_base64`."""

from __future__ import annotations

import base64


def text_or_base64(name: str, data: bytes | None) -> dict[str, str | None]:
    """`{name: text}`, or `{name_base64: …}` for bytes that are not UTF-8; null stays null."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
