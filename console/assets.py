"""The files of the pages, read once from the package, so that no path of a request ever reaches the file system.

Entry: `load_assets`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Suffix → media type; other files are not served."""


class Asset(NamedTuple):
    """One file."""

    body: bytes
    content_type: str
    etag: str


def load_assets() -> dict[str, Asset]:
    """Return the files by their paths below `/console/`."""
    found = {}
    for path, file in _walk(resources.files("tidelog.console") / "static", ""):
        suffix = path[path.rfind(".") :]
        if suffix in TYPES:
            body = file.read_bytes()
            found[path] = Asset(body, TYPES[suffix], hashlib.sha256(body).hexdigest()[:32])
    return found


def _walk(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _walk(each, f"{prefix}{each.name}/")
        else:
            yield f"{prefix}{each.name}", each
