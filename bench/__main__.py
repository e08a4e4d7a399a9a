"""Runs every benchmark of this folder, one after the other, each in a process of its own, and prints one table.

    python -m bench [--quick] [NAME ...]

A program that fails or takes longer than `LIMIT_S` is named at the end, and makes the exit code 1. A goal that is not
held does not: this measures, it does not judge.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench._common import QUICK_VARIABLE, ROWS_VARIABLE, read_rows, table

HERE = Path(__file__).parent
LIMIT_S = 300.0
"""For one program; all of them take about a quarter of an hour together."""


def run(name: str, environment: dict[str, str]) -> str:
    """Run one program with its output here; why it failed, or nothing."""
    print(f"== {name}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", f"bench.{name}"]
    try:
        code = subprocess.run(command, cwd=HERE.parent, env=environment, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"{name} took longer than {LIMIT_S:.0f} s"
    print(f"   ({time.monotonic() - started:.0f} s)", flush=True)
    return f"{name} ended with {code}" if code else ""


def main() -> int:
    names = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one or more of: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="short runs: a look, not a measurement")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    with tempfile.NamedTemporaryFile(prefix="tidelog-bench-") as rows:
        environment = {**os.environ, ROWS_VARIABLE: rows.name}
        if args.quick:
            environment[QUICK_VARIABLE] = "1"
        failures = [failure for name in args.names or names if (failure := run(name, environment))]
        print(f"\n{table(read_rows(Path(rows.name)))}", flush=True)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
