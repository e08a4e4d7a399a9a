"""Results of many seeds, and the file in which a run of hours keeps them, so that it goes on where it was interrupted.

The file has a line of JSON for what is run (`Terms`), then one for each seed, in their order, written when the seed
ends. Invariants: the results of one file are of the same code, Python and faults, as its first line says; a run with
other terms does not add to it. A last line that is not whole, as after a power failure, is cut off: its seed is run
again.

Entry: `ResultsFile`, `SeedTotals`.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from tidelog.simulation.run import SimulationOutcome
from tidelog.simulation.world.rounds import CleaningRounds

_TIDELOG = Path(__file__).parent.parent
"""The package's folder: the path is not resolved, as this room may be there by a symbolic link."""


class ResultsRefused(Exception):
    """The file holds something else, or results of another run. The message names the file and what to do."""


class Terms(msgspec.Struct, frozen=True):
    """What seeds have in common whose results may be added up."""

    seed: int
    """The first."""
    steps: int
    faults: tuple[str, ...]
    mutation: str | None
    python: str
    """Its version: the same seed may draw other things in another Python."""
    code: str
    """`code_digest` of Tidelog, which requires one exact version of the Raft library."""

    @classmethod
    def of(cls, seed: int, steps: int, faults: tuple[str, ...], mutation: str | None) -> Terms:
        """Terms of a run with this code and this Python."""
        return cls(seed, steps, faults, mutation, platform.python_version(), code_digest(_TIDELOG))


class SeedResult(msgspec.Struct, frozen=True):
    """What is kept of one seed."""

    seed: int
    rules: tuple[str, ...]
    """That were violated."""
    simulated_s: float
    cpu_s: float
    took_s: float
    """Real time from the result before it, or from the beginning of the run."""
    acknowledged: int
    """Number of acknowledged records."""
    rounds: CleaningRounds | None
    """Of log compaction; None: there was no compacted topic."""

    @classmethod
    def of(cls, outcome: SimulationOutcome, took_s: float) -> SeedResult:
        """Result of a seed whose outcome came `took_s` after the one before it."""
        return cls(
            seed=outcome.seed,
            rules=tuple(sorted({finding.rule for finding in outcome.findings})),
            simulated_s=outcome.simulated_s,
            cpu_s=outcome.cpu_s,
            took_s=took_s,
            acknowledged=outcome.acknowledged,
            rounds=outcome.rounds,
        )


class SeedTotals:
    """Totals of the simulated seeds."""

    def __init__(self) -> None:
        self.seeds = 0
        self.failed: list[int] = []
        self.took_s = 0.0
        """Real time, of all runs."""
        self._simulated_s = self._cpu_s = 0.0
        self._shortest_s = float("inf")
        self._acknowledged = 0
        self._rounds: list[CleaningRounds] = []

    def add(self, result: SeedResult) -> None:
        """Add one seed."""
        self.seeds += 1
        if result.rules:
            self.failed.append(result.seed)
        self.took_s += result.took_s
        self._simulated_s += result.simulated_s
        self._shortest_s = min(self._shortest_s, result.simulated_s)
        self._cpu_s += result.cpu_s
        self._acknowledged += result.acknowledged
        if result.rounds is not None:
            self._rounds.append(result.rounds)

    def about_rounds(self) -> str:
        """How much log compaction there was; without a round nothing is shown about it."""
        tables = len(self._rounds)
        if not tables:
            return "NO LOG COMPACTION: no cluster had a compacted topic"
        whole, given_up = sum(one.whole for one in self._rounds), sum(one.given_up for one in self._rounds)
        cut_off, removed = sum(one.cut_off for one in self._rounds), sum(one.removed_bytes for one in self._rounds)
        compacted = sum(one.whole > 0 for one in self._rounds)
        return (
            f"log compaction in {compacted} of {tables} clusters with a compacted topic: {whole} rounds, {given_up}"
            f" given up, {cut_off} cut off by the end of their process, {removed} bytes removed"
        )

    def text(self) -> str:
        """The summary line, for at least one seed."""
        seeds, simulated_s = self.seeds, self._simulated_s
        verdict = f"{len(self.failed)} failed: {self.failed}" if self.failed else "nothing is wrong"
        return (
            f"{seeds} seed{'s' if seeds > 1 else ''}, {simulated_s:.0f} simulated seconds ({self._shortest_s:.0f} at"
            f" least each) in {self.took_s:.1f} s ({simulated_s / self.took_s:.0f} for each real second,"
            f" {self._cpu_s / seeds:.2f} s of CPU a seed), {self._acknowledged} records acknowledged: {verdict}"
        )


class ResultsFile:
    """The results of a run of many seeds, in a file that may be there from an earlier run with the same terms.

    `there` are the results that it had. Raises `ResultsRefused` for a file that is of other terms, no such file, or one
    that another process writes to, and `OSError` where it cannot be read or written.
    """

    def __init__(self, path: Path, terms: Terms) -> None:
        self.there: list[SeedResult] = []
        self._path = path
        self._file = path.open("a+b")
        try:
            self._read(terms)
        except BaseException:
            self._file.close()
            raise

    def _read(self, terms: Terms) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # one that the processes of seeds do not inherit
        except BlockingIOError:
            raise ResultsRefused(f"another run writes to {self._path} now; wait for it, or name another file") from None
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if lines:
            self._check_terms(lines[0], terms)
            self.there = list(self._results(lines[1:], terms.seed))
        elif content:
            raise ResultsRefused(f"{self._path} holds no results of seeds; name another file for them")
        self._file.truncate(len(whole))
        if not lines:
            self._write(terms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, result: SeedResult) -> None:
        """Write the result of the next seed."""
        self._write(result)

    def _write(self, line: Terms | SeedResult) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _check_terms(self, line: bytes, terms: Terms) -> None:
        try:
            written = msgspec.json.decode(line, type=Terms)
        except msgspec.MsgspecError:
            raise ResultsRefused(f"{self._path} holds no results of seeds; name another file for them") from None
        for field in Terms.__struct_fields__:
            had, wanted = getattr(written, field), getattr(terms, field)
            if had != wanted:
                raise ResultsRefused(
                    f"the results in {self._path} are of {field} {had}, and this run is of {field} {wanted}; go on as"
                    " that run began, or name another file"
                )

    def _results(self, lines: list[bytes], seed: int) -> Iterator[SeedResult]:
        for number, line in enumerate(lines):
            try:
                result = msgspec.json.decode(line, type=SeedResult)
            except msgspec.MsgspecError as error:
                raise ResultsRefused(
                    f"line {number + 2} of {self._path} is damaged ({error}); name another file"
                ) from None
            if result.seed != seed + number:
                raise ResultsRefused(
                    f"line {number + 2} of {self._path} has seed {result.seed}, not {seed + number}; name another file"
                )
            yield result


def code_digest(root: Path) -> str:
    """SHA-256 of the names and contents of the Python files below `root`, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(_sources(root)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir():  # a room may be a symbolic link, which rglob does not follow
            yield from _sources(path)
        elif path.suffix == ".py":
            yield path
