"""Bytes of records in JSON, as text where possible. Entry: `text_or_base64`."""

from __future__ import annotations

import base64


def text_or_base64(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return `{name: text}`, or `{name_base64: …}` for bytes that are not UTF-8; None stays None."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
