"""Seeds that cannot end as they should are findings: whatever is raised, and processes that die."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

RAISES = """
from tidelog.simulation import run
from tidelog.simulation.seeds import Seeds
from tidelog.storage.objects.format import corrupt

async def raises(cluster):
    raise corrupt("objects/7", 12, "kind", 1, 3)  # cannot be unpickled: a pool would lose the seed

with Seeds(steps=0, faults=(), jobs=1) as one_by_one:
    run.check_record = raises
    with Seeds(steps=0, faults=(), jobs=1) as broken:
        for each in (one_by_one, broken):
            (outcome,) = each.run([13])
            print([(finding.rule, finding.message.splitlines()[-1]) for finding in outcome.findings])
"""
DIES = """
import os
from tidelog.simulation import seeds
from tidelog.simulation.run import SimulationOutcome

def dies(seed, **options):
    if seed == seeds.WARM_UP_SEED:
        return SimulationOutcome(seed)
    os._exit(9)

seeds.simulate, seeds.LONGEST_S = dies, 2.0
with seeds.Seeds(steps=0, faults=(), jobs=1) as one_by_one:
    (outcome,) = one_by_one.run([4])
print(outcome.seed, [(finding.rule, finding.message) for finding in outcome.findings])
"""
OUTLIVED = """
from tidelog.controller.active.balancer import Balancer
from tidelog.simulation import seeds
from tidelog.stream.partition_log import PartitionLog

simulate = seeds.simulate

def simulate_planted(seed, **options):
    calls = []

    def meets_a_defect(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyError("planted")
        return method(*arguments, **named)

    owners = {2: (PartitionLog, "read_hot"), 3: (Balancer, "run")}
    if seed in owners:
        owner, name = owners[seed]
        method = getattr(owner, name)
        setattr(owner, name, meets_a_defect)
    return simulate(seed, **options)

seeds.simulate = simulate_planted
with seeds.Seeds(steps=1, faults=(), jobs=1) as planted:
    for outcome in planted.run([2, 3]):
        print([(finding.rule, finding.message.splitlines()[0]) for finding in outcome.findings])
"""


AT_CONTROLLERS = """
from tidelog.controller.machine import objects
from tidelog.controller.raft.member import RaftMember
from tidelog.simulation import seeds

simulate = seeds.simulate

def simulate_planted(seed, **options):
    members = set()

    def meets_a_defect(*arguments, **named):
        if id(arguments[0]) not in members:
            members.add(id(arguments[0]))
            raise KeyError("planted")
        return method(*arguments, **named)

    owner, name = (RaftMember, "before_tick") if seed == 2 else (objects, "destroy")
    method = getattr(owner, name)
    setattr(owner, name, meets_a_defect)
    return simulate(seed, **options)

seeds.simulate = simulate_planted
with seeds.Seeds(steps=2, faults=(), jobs=1) as planted:
    for outcome in planted.run([2, 8, 10, 12, 19]):
        print([(finding.rule, finding.message.splitlines()[0]) for finding in outcome.findings])
"""

NEVER = """
from tidelog.broker.objects.manifest_writer import ManifestWriter
from tidelog.broker.partitions.snapshot_taker import SnapshotTaker
from tidelog.runtime.errors import Unavailable
from tidelog.simulation import seeds
from tidelog.simulation.actors import loader

simulate = seeds.simulate

async def fails(*arguments, **named):
    raise Unavailable("planted")

class Ends(loader.ImageFollower):
    async def run(self):
        raise KeyError("planted")

def simulate_planted(seed, **options):
    planted = {15: (SnapshotTaker, "take", fails), 5: (ManifestWriter, "write", fails)}
    planted[3] = (loader, "ImageFollower", Ends)
    if seed in planted:
        setattr(*planted[seed])
    return simulate(seed, **options)

seeds.simulate = simulate_planted
with seeds.Seeds(steps=1, faults=(), jobs=1) as planted:
    for outcome in planted.run([15, 5, 3]):
        print([(finding.rule, finding.message.splitlines()[0]) for finding in outcome.findings])
"""


def lines_of(script: str) -> list[str]:
    """Run a script in a process of its own: a simulation leaves what belonged to dead processes behind."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_a_check_raises_is_a_finding() -> None:
    clean, broken = lines_of(RAISES)
    assert clean == "[]"
    assert "('defect'," in broken
    assert "object objects/7 at byte 12: kind: expected 1, found 3" in broken


def test_a_seed_whose_process_dies_is_a_finding() -> None:
    (told,) = lines_of(DIES)
    assert told.startswith("4 [('defect', 'the process of the seed has died")


def test_a_defect_that_something_outlives_is_a_finding() -> None:
    """A request, whose client sends it again, and a loop, which is started again."""
    request, loop = lines_of(OUTLIVED)
    assert request.startswith("[('defect', \"unexpected in Kafka requests of b")
    assert loop.startswith("[('defect', \"unexpected in controller of c")
    assert request.count("KeyError('planted')") == loop.count("KeyError('planted')") == 1


def test_a_defect_that_a_controller_outlives_is_a_finding() -> None:
    """At each of them: a turn of the Raft thread, which the next one makes up for; the sweep beside a command."""
    turn, *sweeps = lines_of(AT_CONTROLLERS)
    assert turn.startswith("[('defect', \"unexpected in the Raft thread of c"), turn
    found = [each for each in sweeps if "(sweep of garbage) at index" in each]  # not each seed has garbage, ever
    assert found and all(each.startswith("[('defect', \"") for each in found), sweeps


def test_who_never_gets_what_all_do_without_is_a_finding() -> None:
    """Snapshots, manifests and images for those outside: each cluster comes to rest without a single one."""
    snapshots, manifests, images = lines_of(NEVER)
    for told, who in (snapshots, "brancher"), (manifests, "outside-reader"), (images, "loader"):
        assert "'liveness'" in told and f"{who} goes on" in told, told
    assert "the loader's follower ended: KeyError('planted')" in images
