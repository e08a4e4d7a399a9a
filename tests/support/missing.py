"""What a machine does not have: the tests that need it are skipped, or fail where nothing may be missing (the gate).

Entry: `missing`.
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
