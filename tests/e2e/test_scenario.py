"""`localstack/scenario.py`, in short, over MinIO and LocalStack; and that what it checks can fail."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.group_load import GroupFacts
from tests.support.s3_servers import ROOT, S3Server

SCRIPT = ROOT / "localstack" / "scenario.py"
SHORT = ("--seconds", "0.3", "--mb-per-s", "0.5", "--partitions", "8")
STEPS = (
    "AlterPartitionReassignments",
    "tidelog partition move",
    "brokers 3 → 5",
    "brokers 5 → 2",
    "kill -9 of broker",
    "kill -9 of the active controller",
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("minio", marks=[pytest.mark.servers("minio"), pytest.mark.long]),
        pytest.param("localstack", marks=pytest.mark.servers("localstack")),
    ],
)
def test_a_cluster_on_a_real_s3_server_lives_through_moves_scaling_and_kills(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server: S3Server = request.getfixturevalue(f"{kind}_server")
    command = [sys.executable, str(SCRIPT), "--bucket", kind, "--endpoint", server.endpoint, *SHORT]
    if kind == "minio":
        command.append("--follow-signal")
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()
    assert all(any(row.startswith(step) for row in rows) for step in STEPS), done.stdout
    assert ("2 wanted after" in done.stdout) == (kind == "minio")
    assert sum(row.startswith("ok ") for row in rows) == 7 and "FAILED" not in done.stdout, done.stdout


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tidelog_scenario", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


def test_a_check_that_fails_or_raises_is_told_and_counted() -> None:
    checks = script().Checks()
    checks.hold("one", [])
    checks.hold("two", ["it is wrong"])

    def raises() -> list[str]:
        raise AssertionError("not in time")

    checks.run("three", raises)
    assert checks.failed == 2
    assert checks.lines == [
        "ok      one",
        "FAILED  two",
        "        it is wrong",
        "FAILED  three",
        "        AssertionError: not in time",
    ]


def test_a_process_that_is_left_is_told_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = script()
    monkeypatch.setattr(module, "END_S", 0.2)
    spared = set(module.children())
    pid = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    (told,) = module.processes_left(spared)
    assert f"process {pid} is left" in told
    assert not Path(f"/proc/{pid}").exists()
    assert module.processes_left(spared) == []


def test_the_facts_of_a_group_that_keeps_its_promises() -> None:
    facts = GroupFacts(2)
    for offset in range(3):
        facts.delivered(0, offset, offset, offset or None)
    facts.commit_answered([(0, 2)])
    facts.looked([(0, 2), (1, 0)], [0, 0])
    facts.delivered(0, 2, 2, None)  # a new assignment, from the committed offset
    assert facts.problems == []
    assert (facts.records, facts.repeated, facts.seen(), facts.committed()) == (4, 1, [3, 0], [2, 0])


@pytest.mark.parametrize(
    ("offset", "number", "expected", "problem"),
    [
        (5, 5, None, "3 was never delivered"),
        (1, 1, None, "goes on at 1, and 2 was committed"),
        (4, 4, 3, "offset 4 follows 2"),
        (2, 2, 3, "offset 2 follows 2"),
        (3, 9, 3, "record 9 at offset 3"),
    ],
)
def test_a_record_that_is_missed_repeated_or_wrong_is_a_problem_of_the_group(
    offset: int, number: int, expected: int | None, problem: str
) -> None:
    facts = GroupFacts(1)
    for each in range(3):
        facts.delivered(0, each, each, each or None)
    facts.commit_answered([(0, 2)])
    facts.delivered(0, offset, number, expected)
    assert len(facts.problems) == 1 and problem in facts.problems[0], facts.problems


def test_a_committed_offset_that_goes_back_is_a_problem_of_the_group() -> None:
    facts = GroupFacts(1)
    facts.commit_answered([(0, 7)])
    facts.looked([(0, 6)], [0])  # asked before that commit was answered: nothing was promised
    assert facts.problems == []
    facts.looked([(0, 6)], facts.committed())
    assert facts.problems == ["group: partition 0: offset 6 is committed, it was 7"]
