"""What a machine does not have, which the end of the run lists.

Entry: `missing` for what the project names as needed or installs by itself, without which the gate fails; `lacking` for
what a machine has or has not: a right, a program of the system.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

PREFIX = "missing: "
"""What the reasons begin with; the end of the run lists them."""


def missing(what: str) -> NoReturn:
    """Skip the running test for want of `what`; fail it where `CI` or `TIDELOG_NOTHING_MISSING` is set."""
    reason = f"{PREFIX}{what}"
    if any(os.environ.get(name, "").lower() in ("1", "true") for name in ("CI", "TIDELOG_NOTHING_MISSING")):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def lacking(what: str) -> NoReturn:
    """Skip the running test for want of `what`, which no installation of the project could bring."""
    pytest.skip(f"{PREFIX}{what}")
