"""pytest in a process of its own, on the files of a project that uses the plugin of `tidelog.testing`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300


def run_pytest(project: Path, *arguments: str, ini: str = "") -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin, whether or not this environment has its entry point."""
    (project / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:tidelog", "-p", "tidelog.testing.plugin", "-q", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def outcome(done: subprocess.CompletedProcess[str]) -> str:
    """`2 passed, 1 failed`, from the last line."""
    return re.sub(r" in .*", "", done.stdout.strip().splitlines()[-1]) if done.stdout.strip() else done.stderr
