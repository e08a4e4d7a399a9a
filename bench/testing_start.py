"""How long a test waits for a broker of `tidelog.testing`: the first one of a process, the next ones, and children.

    python -m bench.testing_start [--runs N] [--children N]

The first start in a process imports the product, and the first child starts the process that all are forked from, which
does the same; so each run is a process of its own that starts a first broker and further ones. These processes write
and find compiled code, as that of an installed package is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

from bench._common import Spread, quick, row
from tidelog.testing import LocalBroker, LocalCluster

GOAL_HERE_MS, GOAL_CHILD_MS = 200, 1_500


def _ms(began: float) -> float:
    return 1_000 * (time.perf_counter() - began)


def started(brokers: LocalBroker | LocalCluster) -> tuple[float, float]:
    """Milliseconds until ready, and to the end."""
    began = time.perf_counter()
    with brokers:
        ready = _ms(began)
        began = time.perf_counter()
    return ready, _ms(began)


def one_run() -> dict[str, float]:
    """What one process measures."""
    began = time.perf_counter()
    import tidelog.process.serve  # noqa: F401

    imports = _ms(began)
    first, _ = started(LocalBroker())
    second, end = started(LocalBroker())
    with LocalBroker() as broker:
        began = time.perf_counter()
        broker.restart()
        restart = _ms(began)
    disk, _ = started(LocalBroker(storage="disk"))
    return {"imports": imports, "first": first, "second": second, "end": end, "restart": restart, "disk": disk}


def one_run_of_children() -> dict[str, float]:
    """The same with brokers in processes of their own."""
    first, _ = started(LocalBroker(child=True))
    second, end = started(LocalBroker(child=True))
    with LocalBroker(child=True) as broker:
        broker.kill()
        began = time.perf_counter()
        broker.restart()
        restart = _ms(began)
    cluster, _ = started(LocalCluster(3))
    return {"first": first, "second": second, "end": end, "restart": restart, "cluster": cluster}


RUNS = {"here": one_run, "children": one_run_of_children}


def in_processes(which: str, runs: int) -> dict[str, Spread]:
    """Run one of `RUNS` in as many processes, one after the other."""
    found: list[dict[str, float]] = []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(runs):
        command = [sys.executable, "-m", "bench.testing_start", "--one", which]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return {name: Spread.of(one[name] for one in found) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3 if quick() else 10)
    parser.add_argument("--children", type=int, default=2 if quick() else 7)
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(RUNS[args.one]()))
        return
    here = in_processes("here", args.runs)
    row("imports before the first broker", here["imports"].text("ms"))
    for name, what in (
        ("first", "broker in the process, ready: the first one, imports done"),
        ("second", "broker in the process, ready: the next ones"),
        ("disk", "the same with its files on a disk"),
    ):
        spread = here[name]
        holds = spread.median <= GOAL_HERE_MS
        row(what, spread.text("ms"), goal=f"≤ {GOAL_HERE_MS} ms", holds=holds)
    row("the same, restarted", here["restart"].text("ms"))
    row("the same, ended", here["end"].text("ms"))
    children = in_processes("children", args.children)
    for name, what in (
        ("first", "broker as a child, ready: the first one, all imports included"),
        ("second", "broker as a child, ready: the next ones"),
        ("restart", "the same, killed and restarted"),
    ):
        spread = children[name]
        row(what, spread.text("ms"), goal=f"≤ {GOAL_CHILD_MS:,} ms", holds=spread.median <= GOAL_CHILD_MS)
    row("cluster of three children, ready", children["cluster"].text("ms"))


if __name__ == "__main__":
    main()
