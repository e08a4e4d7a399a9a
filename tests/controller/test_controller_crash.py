"""kill -9 at any moment: what was acknowledged is in the metadata, and nothing else but what was in flight."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

CHILD = Path(__file__).with_name("crash_child.py")
IN_FLIGHT_KEYS = 4


class World:
    """What has been acknowledged over all rounds."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.end = 0
        self.keys: set[int] = set()

    def round(self, *, step: int = 0, seconds: float = 20.0) -> int:
        """One life of the process; returns how many answers it gave before it died."""
        child = subprocess.Popen(
            [sys.executable, str(CHILD), str(self.directory), "0", str(step)],
            bufsize=0,  # what readline does not take is left for communicate
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(CHILD.parent), str(CHILD.parents[2])))},
        )
        assert child.stdout is not None and child.stderr is not None
        first = child.stdout.readline().decode()
        if not first.startswith("state "):
            child.kill()
            raise AssertionError(first + child.communicate()[1].decode())
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()
        rest = child.communicate()[0].decode()
        self.check_state(first)
        answers = [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        for line in answers:
            kind, number = line.split()
            if kind == "ack":
                self.end = int(number)
            else:
                self.keys.add(int(number))
        return len(answers)

    def check_state(self, line: str) -> None:
        _, end, *names = line.split()
        assert self.end <= int(end) <= self.end + 1, "a commit was lost, or one appeared from nowhere"
        self.end = int(end)
        found = {int(name.removeprefix("key-")) for name in names[0].split(",")} if names else set()
        assert self.keys <= found, f"lost keys {sorted(self.keys - found)[:10]}"
        assert len(found - self.keys) <= IN_FLIGHT_KEYS
        self.keys = found


def test_nothing_acknowledged_is_lost_when_killed_at_random_moments(tmp_path: Path) -> None:
    world = World(tmp_path / "controller")
    rng = random.Random(7)
    rounds = acknowledged = 0
    while rounds < 10 or acknowledged <= 200:  # a slow machine gets more rounds
        acknowledged += world.round(seconds=rng.uniform(0.05, 0.5))
        rounds += 1
    world.round(seconds=0.1)


def test_nothing_acknowledged_is_lost_when_killed_around_each_step_of_a_compaction(tmp_path: Path) -> None:
    """40 entries make a snapshot; a compaction is about six durable steps. Every 3rd step over two compactions."""
    world = World(tmp_path / "controller")
    begin = time.monotonic()
    for step in range(1, 60, 3):
        world.round(step=step)
        assert time.monotonic() - begin < 400
    world.round(seconds=0.1)
