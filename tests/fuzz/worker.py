"""One process that fuzzes one target: `python -m tests.fuzz.worker TARGET PLACE [libFuzzer's flags]`.

`PLACE/corpus` grows; a failing input is written to `PLACE/crash-…`, with the inputs that its world had seen before it
beside it (`….history`, msgpack). Limits: 8 s of CPU time for an input (other work on the machine does not count), and
2 GiB of address space more than at the start, so that a huge allocation is an error and not a slow machine.

`TARGET PLACE --fixed SEED RUNS` runs inputs that nothing but the seed and the samples decides: mutations of the samples
without the guidance by coverage, which leads along another path after every change of the code and on every machine.
"""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import atheris
import msgspec

from tests.fuzz.base import MAX_INPUT_BYTES, Target, fixed_inputs

with atheris.instrument_imports(include=["tidelog"]):
    from tests.fuzz.targets import TARGETS

EXTRA_MEMORY_BYTES = 2 << 30
CPU_S = 8.0


class InputTooSlow(BaseException):
    """An input used up its CPU time."""


def _too_slow(number: int, frame: object) -> None:
    raise InputTooSlow(f"more than {CPU_S} s of CPU time")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _guarded(target: Target, name: str, place: Path) -> Callable[[bytes], None]:
    """Runs one input within its limits, and keeps it when it fails."""

    def one(data: bytes) -> None:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            target.one(data)
        except BaseException:
            crash = place / f"crash-{name}-{hashlib.sha256(data).hexdigest()[:12]}"
            crash.write_bytes(data)
            history = [bytes(item) for item in getattr(target, "history", [])]
            crash.with_name(crash.name + ".history").write_bytes(msgspec.msgpack.encode(history))
            sys.stderr.write(f"\ncrash: {crash}\n{traceback.format_exc()}\n")
            sys.stderr.flush()
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    return one


def run_fixed(target: Target, one: Callable[[bytes], None], seed: int, runs: int) -> None:
    """Run them, and say how many there were and how many edges they reached, as libFuzzer does."""
    edges: set[int] = set()
    atheris._trace_branch = edges.add  # what instrumented code calls
    for data in fixed_inputs(target, seed, runs):
        one(data)
    target.close()
    print(f"#{runs}\tDONE   cov: {len(edges)}\nDone {runs} runs")


def run_guided(target: Target, one: Callable[[bytes], None], place: Path, flags: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    corpus, samples = place / "corpus", place / "samples"
    corpus.mkdir(exist_ok=True)
    samples.mkdir(exist_ok=True)
    names = []
    for number, sample in enumerate(target.seeds()):  # listed: a directory has another order on each file system
        names.append(str(samples / str(number)))
        (samples / str(number)).write_bytes(sample)
    (place / "samples.txt").write_text(",".join(names))

    def mutate(data: bytes, limit: int, seed: int) -> bytes:
        return target.mutate(data, limit, random.Random(seed), atheris.Mutate)

    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
            f"-seed_inputs=@{place / 'samples.txt'}",
            "-reload=0",  # nobody else writes there
            f"-max_len={MAX_INPUT_BYTES}",
            "-timeout=120",
            "-rss_limit_mb=3000",
            f"-artifact_prefix={place}/",
            "-print_final_stats=1",
            *flags,
        ],
        one,
        custom_mutator=mutate,
    )
    atheris.Fuzz()


def main(name: str, place: Path, flags: list[str]) -> None:
    """See the module."""
    target = TARGETS[name]()
    place.mkdir(parents=True, exist_ok=True)
    one = _guarded(target, name, place)
    _limit_memory()
    signal.signal(signal.SIGPROF, _too_slow)
    if flags[:1] == ["--fixed"]:
        run_fixed(target, one, seed=int(flags[1]), runs=int(flags[2]))
    else:
        run_guided(target, one, place, flags)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
