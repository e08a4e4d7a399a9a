"""The version of Tidelog, for every package. pyproject.toml has the same (tests/test_structure.py compares them)."""

from __future__ import annotations

VERSION = "0.1.0"
