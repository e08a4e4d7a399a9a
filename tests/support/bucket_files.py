"""The files of an embedded bucket while a broker writes to it.

`Path.rglob` and `Path.glob` raise when a directory goes between the listing and its reading, and the embedded object
store deletes a directory with its last object. Entry: `bucket_files`.
"""

from __future__ import annotations

import os
from pathlib import Path


def bucket_files(directory: Path) -> list[Path]:
    """Every file below a directory, in no order. What goes meanwhile may be missing."""
    return [Path(place, name) for place, _, names in os.walk(directory) for name in names]
