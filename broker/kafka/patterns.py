"""Regular expressions that clients send, matched by RE2: in time linear in the text, whatever the pattern is.

Entry: `compile_pattern`.
"""

from __future__ import annotations

from typing import Any

import re2

MAX_PATTERN_MEMORY = 1 << 20
"""Bytes that a compiled pattern may take; a larger one is refused as invalid."""


def compile_pattern(pattern: str) -> Any:
    """Return the compiled pattern, with the methods of those of module `re`. Raises `re2.error`."""
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY
    options.log_errors = False
    return re2.compile(pattern, options)
