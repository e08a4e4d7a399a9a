"""`tools.second_try` over small test modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]

ONCE = """
from pathlib import Path

def test_only_the_first_time():
    mark = Path("mark")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""


def run(place: Path, text: str, *options: str) -> tuple[int, str]:
    (place / "test_these.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tools.second_try", *options, "test_these.py"]
    done = subprocess.run(
        command,
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_passes_alone_is_named_and_does_not_fail_the_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, ONCE + "\ndef test_another():\n    pass\n")
    assert code == 0
    assert "unsteady: test_these.py::test_only_the_first_time failed, and passed alone" in output
    assert "1 failed, 1 passed" in output


GROUPED = """
import pytest
from pathlib import Path

@pytest.mark.xdist_group("servers")
@pytest.mark.parametrize("case", ["plain", "with@sign"])
def test_only_the_first_time(case):
    mark = Path(f"mark-{case}")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""


def test_tests_of_a_group_of_workers_are_found_again(tmp_path: Path) -> None:
    code, output = run(tmp_path, GROUPED, "-n", "2", "--dist", "loadgroup")
    assert code == 0, output
    for case in ("plain", "with@sign"):
        assert f"unsteady: test_these.py::test_only_the_first_time[{case}] failed, and passed alone" in output


def test_what_is_skipped_alone_has_not_passed(tmp_path: Path) -> None:
    skips = ONCE.replace("    assert was_there", "    assert was_there\n    pytest.skip('no room')")
    code, output = run(tmp_path, "import pytest\n" + skips)
    assert code == 1, output
    assert "1 tests failed, and were skipped alone" in output
    assert "unsteady" not in output


def test_what_fails_twice_fails(tmp_path: Path) -> None:
    code, output = run(tmp_path, ONCE + "\ndef test_never():\n    raise AssertionError\n")
    assert code == 1
    assert "unsteady" not in output


def test_many_failures_get_no_second_try(tmp_path: Path) -> None:
    code, output = run(tmp_path, ONCE + "".join(f"\ndef test_{n}():\n    raise AssertionError\n" for n in range(3)))
    assert code == 1
    assert "4 tests failed; at most 3 are tried again" in output


def test_a_run_that_passes_or_does_not_collect_is_not_repeated(tmp_path: Path) -> None:
    assert run(tmp_path, "def test_it():\n    pass\n")[0] == 0
    code, output = run(tmp_path, "import a_module_that_is_nowhere\n")
    assert code == 2
    assert "tried again" not in output


ALONE = """
import os

if "PYTEST_XDIST_WORKER" in os.environ:
    raise RuntimeError("only beside others")

def test_it():
    pass
"""


def test_a_module_that_the_workers_cannot_collect_gets_no_second_try(tmp_path: Path) -> None:
    """With workers, as in the gate, pytest's exit code is that of failed tests."""
    (tmp_path / "test_others.py").write_text("def test_it():\n    pass\n", encoding="utf-8")
    code, output = run(tmp_path, ALONE, "-n", "2", "test_others.py")
    assert code == 1, output
    assert "not collected, and not tried again: test_these.py" in output
    assert "unsteady" not in output
