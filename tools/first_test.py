"""How long a developer takes from an empty folder to the first green test with a broker, and what that installs.

    python -m tools.first_test [--commit COMMIT] [--python PYTHON]

Builds the wheel of a commit, and then does what docs/testing.md says: a virtual environment, `pip install` of the wheel
with its extra `testing` (with an empty cache of pip), its first test in a file, `pytest`, and that once more. Printed:
the seconds of each step, and the megabytes of the environment. The wheel's build is not part of it: users download it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.first_record import megabytes

ROOT = Path(__file__).resolve().parents[1]
EXTRA = "testing"
FIRST_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_A_USERS = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
"""Of the environment, what a developer with an empty folder does not have."""
STEP_S = 1_800.0
"""How long a step may take: a slow network and a small machine."""


def first_example(text: str) -> str:
    """Return the first Python block of a Markdown page. Raises ValueError if it is not a test."""
    found = FIRST_BLOCK.search(text)
    if found is None or "def test_" not in found.group(1):
        raise ValueError("docs/testing.md: the first block of Python is no test: put the shortest one first")
    return found.group(1)


def build_wheel(commit: str, python: str, scratch: Path) -> tuple[Path, str]:
    """Return the wheel of a commit, and the first test of its docs/testing.md."""
    clone, target = scratch / "clone", scratch / "wheel"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", commit], check=True)
    command = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(target), str(clone)]
    subprocess.run(command, check=True, timeout=STEP_S)
    (wheel,) = target.glob("*.whl")
    return wheel, first_example((clone / "docs" / "testing.md").read_text())


def measure(commit: str, python: str, scratch: Path) -> None:
    """Do it once below `scratch`, and print each step when it is done."""
    wheel, example = build_wheel(commit, python, scratch)
    folder = scratch / "project"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name not in NOT_A_USERS}
    environment["PIP_CACHE_DIR"] = str(scratch / "pip-cache")
    own = str(folder / ".venv" / "bin" / "python")
    (folder / "test_orders.py").write_text(example)
    steps = (
        ("a virtual environment", [python, "-m", "venv", ".venv"]),
        (f"pip install '{wheel.name}[{EXTRA}]'", [own, "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRA}]"]),
        ("pytest, the first time", [own, "-m", "pytest", "-q"]),
        ("pytest, once more", [own, "-m", "pytest", "-q"]),
    )
    total = time.monotonic()
    for name, command in steps:
        began = time.monotonic()
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=STEP_S)
        print(f"{time.monotonic() - began:7.1f} s  {name}", flush=True)
    print(f"{time.monotonic() - total:7.1f} s  in all")
    print(f"{megabytes(folder / '.venv'):7.0f} MB in .venv, pip included")


def main() -> int:
    """Measure once, with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD", help="what is built (default: HEAD)")
    parser.add_argument("--python", default="python3", help="makes the environment (default: python3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidelog-first-test-") as scratch:
        measure(args.commit, args.python, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
