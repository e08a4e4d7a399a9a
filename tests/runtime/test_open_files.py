"""The listener leaves open files for the rest of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidelog.runtime.open_files import RESERVED, connections_that_fit


def test_connections_fit_under_the_limit_of_open_files() -> None:
    assert connections_that_fit(1 << 20, 4096) == 4096
    assert connections_that_fit(4096, 4096) == 4096 - RESERVED
    assert connections_that_fit(100, 4096) == 16


@pytest.mark.processes
def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300));"
        "from tidelog.runtime.open_files import raise_open_files;"
        "print(raise_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["300", "300", "300"]
