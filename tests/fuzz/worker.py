"""One process that fuzzes one target: `python -m tests.fuzz.worker TARGET PLACE [libFuzzer's flags]`.

`PLACE/corpus` grows; a failing input is written to `PLACE/crash-…`, with the inputs that its world had seen before it
beside it (`….history`, msgpack). Limits: 8 s of CPU time for an input (other work on the machine does not count), and
2 GiB of address space more than at the start, so that a huge allocation is an error and not a slow machine.
"""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import sys
import traceback
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["broker", "controller", "stream", "storage", "runtime"]):
    from tests.fuzz.targets import TARGETS

MAX_INPUT_BYTES = 4096
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


def main(name: str, place: Path, flags: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    target = TARGETS[name]()
    corpus = place / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    done = 0

    def one(data: bytes) -> None:
        nonlocal done
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            target.one(data)
            done += 1
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

    def mutate(data: bytes, limit: int, seed: int) -> bytes:
        return target.mutate(data, limit, random.Random(seed), atheris.Mutate)

    atheris.Setup(
        [
            sys.argv[0],
            str(corpus),
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
    _limit_memory()
    signal.signal(signal.SIGPROF, _too_slow)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
