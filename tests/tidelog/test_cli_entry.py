"""Ctrl-C while the command line itself is imported."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tidelog.cli import entry

ROOT = Path(__file__).parents[2]
INTERRUPTED = """
import runpy, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupts())
runpy.run_module("tidelog", run_name="__main__", alter_sys=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("module", ["click", "tidelog.runtime.errors"])
def test_ctrl_c_ends_a_command_that_is_still_imported_without_a_traceback(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_command_that_is_installed_begins_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"tidelog": f"{entry.__name__}:{entry.main.__name__}"}
