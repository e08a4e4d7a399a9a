"""`TIDELOG_TESTS_FOR_S` (tests/conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seconds", "outcome"), [("0", "1 skipped"), ("3600", "1 passed")])
def test_what_the_time_does_not_suffice_for_is_named_and_not_begun(seconds: str, outcome: str) -> None:
    test = "tests/tools/test_second_try.py::test_a_run_that_passes_or_does_not_collect_is_not_repeated"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", test],
        cwd=ROOT,
        env=os.environ | {"TIDELOG_TESTS_FOR_S": seconds},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert outcome in done.stdout
    named = "not run: the time for tests was over" in done.stdout
    assert named == (seconds == "0")
    assert ("tests/tools/test_second_try.py (1 test)" in done.stdout) == named
