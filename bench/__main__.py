"""Run every benchmark of this folder sequentially, each in a separate process, and print one table.

    python -m bench [--quick] [NAME ...]

A program that fails or takes longer than its limit (`LIMIT_S`, `LIMITS_S`) is named at the end, and makes the exit code
1. A missed goal does not: the benchmarks only report. A stopped program leaves neither processes nor files
  (`bench._programs`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench import _programs
from bench._common import QUICK_VARIABLE, ROWS_VARIABLE, read_rows, table

HERE = Path(__file__).parent
LIMIT_S = 300.0
"""Time limit of one program; all of them together take less than half an hour."""
LIMITS_S = {
    "cold_read": 600.0,
    "peers": 900.0,
    "kafka_cluster": 900.0,
    "replicated_produce": 600.0,
    "transactions": 600.0,
    "log_compaction": 1_800.0,
    "topic_branch": 1_800.0,
    "spark_scan": 900.0,
}
"""Time limits of longer programs: two buckets are filled with 5 GB and read six times; many servers start."""


def run(name: str, environment: dict[str, str]) -> str:
    """Run one program with its output here; return the reason of a failure, or an empty text."""
    print(f"== {name}", flush=True)
    started = time.monotonic()
    command = [sys.executable, "-m", f"bench.{name}"]
    limit_s = LIMITS_S.get(name, LIMIT_S)
    code = _programs.run(command, cwd=HERE.parent, environment=environment, limit_s=limit_s)
    if code is None:
        return f"{name} took longer than {limit_s:.0f} s"
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended and cleared away
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
