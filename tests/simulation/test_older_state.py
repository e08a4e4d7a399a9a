"""At feature level 0 this version's state machine does what the previous release's does, whatever clusters ask of it.

The commands are those of simulated clusters under faults; the other state machine is the real one, in a process of the
previous release.
"""

from __future__ import annotations

import multiprocessing
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model import commands as c
from tidelog.simulation.actors.faults import FAULTS
from tidelog.simulation.run import simulate
from tidelog.simulation.world.consensus import RaftWatch

pytestmark = [pytest.mark.servers("previous_release"), pytest.mark.slow]

SCRIPT = Path(__file__).with_name("older_state.py")
SEEDS = (2, 8, 14, 21, 27, 44)
"""Clusters that begin at level 0, and have no past."""
BUT_RAISING = tuple(name for name in FAULTS if name != "level")

Log = list[tuple[int, bytes]]
Outcome = tuple[int, Any, str | None]


def commands_of(seed: int) -> Log:
    """The log of a simulated cluster, whose level is not raised. A process simulates only once: it leaves its loop."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_simulated, (seed,))


def _simulated(seed: int) -> Log:
    watch = RaftWatch()
    outcome = simulate(seed, steps=6, faults=BUT_RAISING, raft_watch=watch)
    assert outcome.ok, outcome.findings
    return sorted(watch.applied.items())


def without_texts(value: Any) -> Any:
    """A value with the texts of errors left out: `[name, message, hint, fields]`."""
    if isinstance(value, list):
        if len(value) == 4 and isinstance(value[0], str) and isinstance(value[1], str):
            return [value[0], sorted(value[3])]
        return [without_texts(each) for each in value]
    return value


def told(raw: bytes) -> Any:
    return without_texts(msgspec.msgpack.decode(raw))


def replayed(log: Log) -> tuple[list[Outcome], bytes]:
    state = ControllerState()
    results: list[Outcome] = []
    for index, blob in log:
        result = c.decode_result(state.apply(c.decode_envelope(blob), index).result)
        results.append((result.version, told(result.value), result.error.name if result.error else None))
    assert state.level == 0
    return results, state.dump()


def replayed_by(python: str, log: Log) -> tuple[list[Outcome], bytes]:
    done = subprocess.run(
        [python, "-P", SCRIPT], input=msgspec.msgpack.encode(log), capture_output=True, timeout=120, env={}, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    found = msgspec.msgpack.decode(done.stdout, type=tuple[list[tuple[int, bytes, str | None]], bytes])
    return [(version, told(raw), error) for version, raw, error in found[0]], found[1]


def rows(state: bytes) -> dict[str, Any]:
    """The state by its parts; of stored results what does not depend on texts."""
    _, version, applied, now_ms, tables, counters, dedupe = msgspec.msgpack.decode(state, type=list[Any])
    found = {
        "head": [version, applied, now_ms],
        "counters": counters,
        "dedupe": [[client, floor, last, [number for number, _ in kept]] for client, floor, last, kept in dedupe],
    }
    return {**found, **dict(tables)}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_of_level_0_is_applied_alike_by_both_versions(seed: int, previous_release: str) -> None:
    log = commands_of(seed)
    assert log[0][0] == 2, "a cluster without a past: its log is whole, after a no-op"
    assert {c.decode_envelope(blob).format_version for _, blob in log} == {1}
    ours, theirs = replayed(log), replayed_by(previous_release, log)
    for (index, blob), mine, other in zip(log, ours[0], theirs[0], strict=True):
        assert mine == other, (index, c.decode_envelope(blob))
    loaded = ControllerState()
    loaded.load(theirs[1])  # with the fields that came later, which are empty at level 0
    our_rows, their_rows = rows(ours[1]), rows(loaded.dump())
    for name in our_rows:
        assert our_rows[name] == their_rows[name], name
