"""What is missing is listed, and no reason for a green gate where the project could have brought it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
NEEDS_GROFF = "tests/tidelog/test_man_pages.py"
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


def test_a_test_that_looks_for_a_program_of_the_system_says_that_it_is_missing() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--no-cov", NEEDS_GROFF, "-k", "groff"]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "CI": "true"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "groff (1 test not run)" in done.stdout


def test_no_test_is_skipped_for_want_of_something_without_a_list_of_it() -> None:
    """`tests.support.missing` lists it; skips for other reasons, such as an older kernel, are no such thing."""
    silent = re.compile(r"(skip|skipif|importorskip)\(.{0,200}?missing: |importorskip\(", re.DOTALL)
    found = [str(path) for path in (ROOT / "tests").rglob("*.py") if silent.search(path.read_text(encoding="utf-8"))]
    assert not found
