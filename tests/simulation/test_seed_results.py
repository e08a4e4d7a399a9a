"""A run of many seeds goes on where its file of results ends, and adds up only what belongs together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tidelog.simulation.checkers.finding import Finding
from tidelog.simulation.results import ResultsFile, ResultsRefused, SeedResult, SeedTotals, Terms, code_digest
from tidelog.simulation.run import SimulationOutcome
from tidelog.simulation.world.rounds import CleaningRounds

TERMS = Terms.of(7, 12, ("kill", "cut"), None)


def result(seed: int, *rules: str) -> SeedResult:
    outcome = SimulationOutcome(seed, [Finding(rule=rule, message="") for rule in rules])
    outcome.simulated_s, outcome.cpu_s, outcome.acknowledged = 80.0, 3.0, 100
    outcome.rounds = CleaningRounds(whole=2) if seed % 2 else None
    return SeedResult.of(outcome, 1.5)


def test_results_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    written = [result(7), result(8, "lost-write", "liveness"), result(9)]
    with ResultsFile(path, TERMS) as file:
        for one in written[:2]:
            file.add(one)
    with ResultsFile(path, TERMS) as file:
        assert file.there == written[:2]
        file.add(written[2])
    with ResultsFile(path, TERMS) as file:
        assert file.there == written
    totals = SeedTotals()
    for one in written:
        totals.add(one)
    assert totals.text() == (
        "3 seeds, 240 simulated seconds (80 at least each) in 4.5 s (53 for each real second, 3.00 s of CPU a seed),"
        " 300 records acknowledged: 1 failed: [8]"
    )
    assert totals.about_rounds().startswith("log compaction in 2 of 2 clusters with a compacted topic: 4 rounds")


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_line_that_is_not_whole_is_cut_off(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, TERMS) as file:
        file.add(result(7))
    before = path.read_bytes()
    with ResultsFile(path, TERMS) as file:
        file.add(result(8))
    path.write_bytes(before + path.read_bytes()[len(before) :][:kept])
    with ResultsFile(path, TERMS) as file:
        assert [one.seed for one in file.there] == [7]
        assert path.read_bytes() == before
        file.add(result(8, "liveness"))
    with ResultsFile(path, TERMS) as file:
        assert [one.rules for one in file.there] == [(), ("liveness",)]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("seed", 8),
        ("steps", 6),
        ("faults", ("kill",)),
        ("mutation", "ack-before-fsync"),
        ("python", "3.14.0"),
        ("code", "0" * 64),
    ],
)
def test_other_terms_are_refused(tmp_path: Path, field: str, other: object) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, TERMS) as file:
        file.add(result(7))
    before = path.read_bytes()
    with pytest.raises(ResultsRefused, match=f"are of {field} .* name another file"):
        ResultsFile(path, msgspec.structs.replace(TERMS, **{field: other}))
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"notes", b"notes\n", b"{}\n", b"\0" * 40])
def test_a_file_of_something_else_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ResultsRefused, match=r"notes.txt holds no results of seeds; name another file"):
        ResultsFile(path, TERMS)
    assert path.read_bytes() == content


@pytest.mark.processes
def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    held = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", held, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ResultsRefused, match=r"another run writes to .* now"):
            ResultsFile(path, TERMS)
        other.communicate(b"\n", timeout=60)
    with ResultsFile(path, TERMS) as file:
        assert not file.there


def test_lines_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path, TERMS) as file:
        for seed in (7, 8, 9):
            file.add(result(seed))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[3:]]))
    with pytest.raises(ResultsRefused, match=r"line 3 of .* has seed 9, not 8"):
        ResultsFile(path, TERMS)
    path.write_bytes(b"".join([*lines[:2], b"{]\n", *lines[3:]]))
    with pytest.raises(ResultsRefused, match=r"line 3 of .* is damaged"):
        ResultsFile(path, TERMS)


def test_the_digest_covers_rooms_behind_symbolic_links(tmp_path: Path) -> None:
    room, root = tmp_path / "storage", tmp_path / "tidelog"
    room.mkdir()
    root.mkdir()
    (root / "storage").symlink_to(room)
    (root / "config.py").write_text("A = 1\n")
    (room / "wal.py").write_text("B = 1\n")
    digests = [code_digest(root)]
    (room / "wal.py").write_text("B = 2\n")
    digests.append(code_digest(root))
    (room / "wal.py").rename(room / "log.py")
    digests.append(code_digest(root))
    (room / "notes.txt").write_text("no code")
    assert code_digest(root) == digests[-1]
    assert len(set(digests)) == 3
