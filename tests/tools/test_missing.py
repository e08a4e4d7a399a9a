"""What a machine lacks is no reason for a green gate: its tests fail where nothing may be missing, and are listed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NEEDS_JAVA = "tests/pyspark_tidelog/test_spark_table_kills.py"


@pytest.mark.parametrize(
    ("environment", "code"), [({"TIDELOG_NOTHING_MISSING": "1"}, 1), ({}, 0)], ids=["in the gate", "elsewhere"]
)
def test_tests_of_spark_say_that_java_is_missing(environment: dict[str, str], code: int) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-cov", NEEDS_JAVA]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert "missing on this machine" in done.stdout
    assert "no `java` on PATH: Spark needs a Java runtime (" in done.stdout
