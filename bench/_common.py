"""Shared code of the benchmarks: medians and spread, CPU time of a process, a broker to measure, and the table.

A program measures in *runs* that alternate with the runs of its limit (`interleaved`), because this machine's disk has
bursts and its cores are shared. It prints one line for each goal with `row`; `python -m bench` collects those lines of
all programs (through the file that `ROWS_VARIABLE` names) into one table at the end.

`row` reports a goal as reached if the medians reach it. Nothing is asserted: a benchmark reports.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench._programs import MEMORY_DIRECTORY, MEMORY_VARIABLE, scratch_directory
from tests.support.tidelog_process import TidelogProcess
from tidelog.storage.bucket.open import EMBEDDED_BUCKET

ROWS_VARIABLE = "TIDELOG_BENCH_ROWS"
"""Environment variable with the file that `row` appends to, one JSON object per line."""
QUICK_VARIABLE = "TIDELOG_BENCH_QUICK"
"""Environment variable that requests short runs (`python -m bench --quick`)."""
ANSWERED = "acknowledged at the rate of the requests, share"
"""The name of `answered_share` among a server's figures."""
KEEPS_UP = 0.95
"""A server that answers a smaller share has latencies of a queue, which grow with the time: goals say nothing there."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
spawned = multiprocessing.get_context("spawn")
"""Processes that share no state with their parent."""


def quick() -> bool:
    """Whether short runs are requested: a check, not a measurement."""
    return bool(os.environ.get(QUICK_VARIABLE))


# --- figures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """The median of several runs, and the extremes."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Compute the spread of at least one value."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found))

    def text(self, unit: str = "", digits: int = 0) -> str:
        """`median (low–high) unit`."""
        text = f"{self.median:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"
        return f"{text} {unit}" if unit else text


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0–1) of `values` do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def answered_share(took: Sequence[float], seconds: float) -> float:
    """The share of requests, sent at a fixed rate for `seconds`, that a server answered at that rate: 1 if it keeps up.

    Else each waits longer than the one before, and the last ones say how far it is behind.
    """
    behind_s = statistics.median(took[-max(1, len(took) // 10) :])
    return seconds / (seconds + behind_s)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process (all its threads, not its children) has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def settle(pid: int, timeout_s: float = 10.0) -> None:
    """Wait until a process has used less than a tenth of a core for 0.3 s, for example until its uploads are done."""
    deadline, used = time.monotonic() + timeout_s, cpu_seconds(pid)
    while time.monotonic() < deadline:
        time.sleep(0.3)
        before, used = used, cpu_seconds(pid)
        if used - before < 0.03:
            return


def new_pages_mb_per_s(size: int = 256 << 20) -> float:
    """Return at how many MB/s this machine hands out new memory: a program that writes each page of it once, zeroed.

    Some virtual machines do this slowly. A server that does not reuse its buffers is then bound by it.
    """
    with mmap.mmap(-1, size) as memory:
        started = time.perf_counter()
        memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)
        return size / 1e6 / (time.perf_counter() - started)


def say_new_pages() -> None:
    """Print that speed, as the median of five."""
    print(f"  new memory   {Spread.of(new_pages_mb_per_s() for _ in range(5)).text('MB/s')}", flush=True)


def interleaved(runs: int, **phases: Callable[[], Any]) -> dict[str, list[Any]]:
    """Call every phase in turn, `runs` times; return the results of each."""
    found: dict[str, list[Any]] = {name: [] for name in phases}
    for _ in range(runs):
        for name, phase in phases.items():
            found[name].append(phase())
    return found


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One goal: the measured value, the limit in the same run, and their ratio."""

    measure: str
    figure: str
    limit: str = ""
    ratio: str = ""
    goal: str = ""
    holds: bool | None = None
    """None without a goal: the figure is only reported."""

    def verdict(self) -> str:
        """Return the text of the last column."""
        return "" if self.holds is None else "yes" if self.holds else "NO"


def row(
    measure: str, figure: str, *, limit: str = "", ratio: str = "", goal: str = "", holds: bool | None = None
) -> None:
    """Print one line of the table, and pass it to `python -m bench` if that started this program."""
    found = Row(measure, figure, limit, ratio, goal, holds)
    parts = [figure]
    parts += [f"limit {limit}"] if limit else []
    parts += [f"ratio {ratio}"] if ratio else []
    parts += [f"goal {goal}: {found.verdict()}"] if goal else []
    print(f"{measure}: {', '.join(parts)}", flush=True)
    if path := os.environ.get(ROWS_VARIABLE):
        with open(path, "a", encoding="utf-8") as rows:
            rows.write(json.dumps(asdict(found), ensure_ascii=False) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Format all rows in aligned columns."""
    lines: list[tuple[str, ...]] = [("measure", "figure", "limit", "ratio", "goal", "holds")]
    lines += [(one.measure, one.figure, one.limit, one.ratio, one.goal, one.verdict()) for one in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def read_rows(path: Path) -> list[Row]:
    """Read the programs' rows, in order."""
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


# --- processes -------------------------------------------------------------------------------------------------------


def pin(cores: set[int], pid: int = 0) -> None:
    """Pin a process with all current and future threads to these cores, if the machine has them."""
    if not cores <= set(range(os.cpu_count() or 1)):
        return
    for thread in os.listdir(f"/proc/{pid or os.getpid()}/task"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile, or the core is not ours
            os.sched_setaffinity(int(thread), cores)


@contextlib.contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """Pin the calling thread to these cores inside the block; None: no pinning."""
    before = os.sched_getaffinity(0)
    if cores is not None and cores < before:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def memory_directory() -> str | None:
    """Return a directory in memory; None if this machine has none."""
    chosen = os.environ.get(MEMORY_VARIABLE)
    return chosen or (str(MEMORY_DIRECTORY) if MEMORY_DIRECTORY.is_dir() else None)


@contextlib.contextmanager
def directory(parent: str | None = None) -> Iterator[Path]:
    """Yield an empty directory that is removed at the end; `parent` chooses the disk."""
    with scratch_directory(parent) as path:
        yield path


@contextlib.contextmanager
def broker(
    data_dir: Path, settings: Iterable[str] = (), *, bucket_in_memory: bool = False, cores: set[int] | None = None
) -> Iterator[TidelogProcess]:
    """Run a real `tidelog up` on `data_dir`; `settings` are `section.key=value`.

    `bucket_in_memory` keeps the embedded store's files in memory, as if the bucket were on other machines: otherwise
    each byte is written to the WAL's disk a second time. `cores` pins the broker process.
    """
    flags = [part for setting in settings for part in ("--set", setting)]
    with contextlib.ExitStack() as stack:
        if bucket_in_memory and (memory := memory_directory()) is not None:
            bucket = stack.enter_context(directory(memory))
            data_dir.mkdir(parents=True, exist_ok=True)
            (data_dir / EMBEDDED_BUCKET).symlink_to(bucket, target_is_directory=True)
        process = TidelogProcess(data_dir, flags)
        stack.callback(process.kill)
        process.start()
        if cores is not None:
            pin(cores, process.broker_pid())
        yield process


def due_times(per_s: float, seconds: float) -> Iterator[float]:
    """Sleep until each of `per_s` times a second; yield from when what is done then counts (`time.perf_counter`).

    What is due while the caller was busy counts from when it was due. The delay of the timer is not counted.
    """
    started = woke = time.perf_counter()
    for number in range(int(per_s * seconds)):
        due = started + number / per_s
        early = due - time.perf_counter()
        if early > 0:
            time.sleep(early)
            woke = time.perf_counter()
        yield max(due, woke)


def in_process(target: Callable[..., None], *args: Any, cores: set[int] | None = None) -> Any:
    """Run `target(*args, put)` in a separate process; return the put value."""
    with background(target, *args, cores=cores) as result:
        return result()


@contextlib.contextmanager
def background(
    target: Callable[..., None], *args: Any, cores: set[int] | None = None, ends: bool = True
) -> Iterator[Callable[[], Any]]:
    """Run `target(*args, put)` in a separate process during the block; yield a function that waits for its next put.

    A process that `ends` by itself has 10 s for that after the block; others are killed.
    """
    results: Any = spawned.Queue()
    process = spawned.Process(target=_pinned, args=(target, cores, args, results), daemon=True)
    process.start()

    def result() -> Any:
        while True:
            with contextlib.suppress(queue.Empty):
                return results.get(timeout=1.0)
            if not process.is_alive() and results.empty():
                raise RuntimeError(f"{target.__name__} ended with {process.exitcode} and without a result")

    try:
        yield result
    finally:
        process.join(10.0 if ends else 0.0)
        if process.is_alive():
            process.terminate()
            process.join()


def _pinned(target: Callable[..., None], cores: set[int] | None, args: tuple[Any, ...], results: Any) -> None:
    if cores is not None:
        pin(cores)
    target(*args, results.put)
