"""Run pytest, and what failed once more, alone: `python -m tools.second_try [pytest's options]`.

The gate runs clusters of real processes two at a time on two cores, in real time. A test that fails there and passes
alone has shown that it, or the product, depends on the speed of the machine. It is named at the end as "unsteady", to
be corrected with the next change, and does not fail the gate. At most `MOST` tests get a second try: more failures are
no chance. What fails twice fails, as does what is skipped the second time; so does a run that ended
otherwise than by failed tests (an error in collecting, a crash of pytest).

The exit code is pytest's, of the second run if there is one that skips nothing. Entry: `main`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

TESTS_FAILED = 1
"""pytest's exit code when all ran and some failed; with pytest-xdist also when a module could not be collected."""
MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""Where pytest keeps the names of failed tests, as the keys of an object, from the root of the repository."""


def main(options: Sequence[str]) -> int:
    """Run both; see the module docstring."""
    pytest = [sys.executable, "-m", "pytest"]
    first = subprocess.run([*pytest, "--cache-clear", *options], check=False).returncode
    if first != TESTS_FAILED:
        return first
    failed = sorted({without_group(name) for name in json.loads(FAILED.read_text())})
    if modules := [name for name in failed if "::" not in name]:
        print(f"not collected, and not tried again: {' '.join(modules)}")
        return first
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed; at most {MOST} are tried again")
        return first
    print(f"{len(failed)} tests are tried again, alone", flush=True)
    with tempfile.TemporaryDirectory(prefix="tidelog-second-try-") as place:
        report = Path(place) / "report.xml"
        command = [*pytest, "-n", "0", "--no-cov", f"--junitxml={report}", *failed]
        second = subprocess.run(command, check=False).returncode
        skipped = len(list(ElementTree.parse(report).iter("skipped"))) if second == 0 else 0
    if skipped:
        print(f"{skipped} tests failed, and were skipped alone")
        return first
    if second == 0:
        for name in failed:
            print(f"unsteady: {name} failed, and passed alone")
    return second


def without_group(name: str) -> str:
    """A test's name without the group that pytest-xdist's `--dist loadgroup` appends: `…::test_it[a@b]@group`."""
    head, separator, group = name.rpartition("@")
    return head if separator and "]" not in group and "/" not in group else name


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
