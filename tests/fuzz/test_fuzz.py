"""Every target runs the same inputs each time, on every machine and after every change: together 100,000 and more.

`make fuzz` searches with the same targets, guided by coverage, from a new seed and for longer. What it finds is kept in
`regressions/` and run here.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import required
from tests.fuzz.__main__ import ROOT, fuzz, replay, run_fixed
from tests.fuzz.targets import TARGETS
from tests.support.s3_servers import Missing

pytestmark = pytest.mark.processes

REGRESSIONS = Path(__file__).parent / "regressions"
RUNS = {"requests": 45_000, "batches": 30_000, "files": 12_000, "handlers": 12_000, "rpc": 6_000}
LEAST_EDGES = {"requests": 285, "batches": 185, "files": 235, "handlers": 3_090, "rpc": 740}
"""Instrumented edges reached; about 85 % of what the run reaches, so that a target that lost its way is noticed."""
SEED = 20_261


def require_atheris() -> None:
    if importlib.util.find_spec("atheris") is not None:
        return
    missing = f"atheris (has it no wheel for {platform.system()} {platform.machine()}? pip install '.[fuzz]')"

    def provide() -> None:
        raise Missing(missing)

    required(provide)


def test_the_targets_run_a_hundred_thousand_inputs_together() -> None:
    assert set(RUNS) == set(LEAST_EDGES) == set(TARGETS)
    assert sum(RUNS.values()) >= 100_000


@pytest.mark.slow
@pytest.mark.gate_cases("batches", "files", "requests")
@pytest.mark.parametrize("target", sorted(RUNS))
def test_no_input_breaks(target: str, tmp_path: Path) -> None:
    require_atheris()
    outcome = run_fixed(target, tmp_path, runs=RUNS[target], seed=SEED)
    assert outcome.code == 0 and not outcome.crashes, outcome.output[-6000:]
    assert outcome.inputs == RUNS[target]
    assert outcome.coverage >= LEAST_EDGES[target], f"{outcome.coverage} edges: the target does not reach its code"


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*.bin")), ids=lambda path: path.stem)
def test_what_was_found_once_stays_mended(path: Path) -> None:
    replay(path.name.split("-")[0], path)


@pytest.mark.gate_cases("batches")
@pytest.mark.parametrize("target", sorted(RUNS))
def test_the_inputs_are_the_same_everywhere(target: str) -> None:
    program = (
        "import hashlib, sys\n"
        "from tests.fuzz.base import fixed_inputs\n"
        "from tests.fuzz.targets import TARGETS\n"
        "made = fixed_inputs(TARGETS[sys.argv[1]](), 1, 700)\n"
        "print(hashlib.sha256(b''.join(hashlib.sha256(data).digest() for data in made)).hexdigest())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program, target],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, check=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(runs[0].split()) == 1 and runs[0] == runs[1]


@pytest.mark.gate_cases("False")
@pytest.mark.parametrize("guided", [False, True])
def test_a_fault_would_be_seen(guided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_atheris()
    (tmp_path / "sitecustomize.py").write_text(
        "import tidelog.broker.kafka.wire.primitives as p\n"
        "def wrong(buffer, at):\n    return buffer[at], at + 1\n"
        "p.read_uvarint = wrong\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = (fuzz if guided else run_fixed)("requests", tmp_path / "place", runs=20_000, seed=SEED)
    assert outcome.code != 0 and outcome.crashes
