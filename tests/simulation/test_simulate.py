"""`tidelog simulate`: one seed gives one trace, seeds pass, and what is wrong is found and can be replayed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def simulate(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tidelog", "simulate", *arguments]
    environment = {"PYTHONHASHSEED": hash_seed, "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


@pytest.mark.gate_cases("17")
@pytest.mark.parametrize("seed", ["11", "17", "18"])
def test_one_seed_gives_one_trace(tmp_path: Path, seed: str) -> None:
    traces = []
    for hash_seed in ("0", "4711"):
        path = tmp_path / f"trace.{hash_seed}"
        done = simulate("--seed", seed, "--steps", "8", "--trace", str(path), hash_seed=hash_seed)
        assert done.returncode == 0, done.stdout + done.stderr
        traces.append(path.read_text().splitlines())
    assert len(traces[0]) > 300
    differing = [pair for pair in zip(*traces, strict=False) if pair[0] != pair[1]]
    assert not differing, differing[0]
    assert len(traces[0]) == len(traces[1])


@pytest.mark.long
@pytest.mark.slow
def test_seeds_pass_under_all_faults() -> None:
    done = simulate("--seed", "1000", "--seeds", "24")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is wrong" in done.stdout


def test_the_history_can_be_checked_again(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    assert simulate("--seed", "3", "--steps", "3", "--history", str(history)).returncode == 0
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "check", str(history)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is wrong" in done.stdout


def test_an_unknown_fault_is_named() -> None:
    done = simulate("--faults", "kill,flood")
    assert done.returncode == 2
    assert "flood" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_mutation_is_found_shrunk_and_replayed() -> None:
    """What a cluster does to clients that acknowledges before its bytes are durable."""
    arguments = ["--mutate", "ack-before-fsync", "--seed", "1", "--seeds", "12", "--shrink"]
    done = simulate(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    shown = re.search(r"^(\d+) faults, \d+ operations\nreplay: tidelog simulate (.*)$", done.stdout, re.MULTILINE)
    assert shown is not None, done.stdout
    assert int(shown[1]) <= 3
    again = simulate(*shown[2].removesuffix(" --trace trace.txt").split())
    assert again.returncode == 1
    assert done.stdout.splitlines()[:2] == again.stdout.splitlines()[:2]


def test_what_does_not_fit_the_time_is_left_out_and_said() -> None:
    done = simulate("--seed", "5", "--seeds", "500", "--steps", "1", "--faults", "none", "--for", "1s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("seeds 5 to 504,")
    said = re.search(r"ONLY (\d+) OF 500 SEEDS WERE RUN, up to (\d+)", done.stderr)
    assert said is not None, done.stderr
    assert int(said[2]) == int(said[1]) + 4


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    terms = ["--seed", "5", "--steps", "1", "--faults", "none", "--results", str(results)]
    first = simulate(*terms, "--seeds", "3")
    assert first.returncode == 0, first.stdout + first.stderr
    whole = simulate(*terms, "--seeds", "5")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert whole.stderr.splitlines()[0].endswith(f"; {results} has the results of 3")
    assert whole.stdout.splitlines()[-1].startswith("5 seeds, ")
    assert len(results.read_text().splitlines()) == 6
    nothing = simulate(*terms, "--seeds", "5")
    assert nothing.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]
    other = simulate(*terms, "--seeds", "5", "--steps", "2")
    assert other.returncode == 2
    assert "are of steps 1, and this run is of steps 2" in " ".join(other.stderr.split())
    away = simulate(*terms[:-1], str(tmp_path / "no" / "results"), "--seeds", "2")
    assert away.returncode == 2
    assert "No such file or directory" in away.stderr


def test_a_run_that_is_ended_tells_what_it_did() -> None:
    command = [sys.executable, "-m", "tidelog", "simulate", "--seed", "5", "--seeds", "5000", "--faults", "none"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("seeds 5 to 5004,")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    said = re.search(r"ENDED BY Ctrl-C after \d+ s: ONLY (\d+) OF 5000 SEEDS WERE RUN, up to (\d+)", err)
    assert said is not None, err
    assert int(said[2]) == int(said[1]) + 4
    assert process.returncode == 130


def test_every_seed_is_a_minute_at_least() -> None:
    done = simulate("--seed", "40", "--faults", "none")
    shown = re.search(r"\((\d+) at least each\)", done.stdout)
    assert shown is not None, done.stdout
    assert int(shown[1]) >= 60
