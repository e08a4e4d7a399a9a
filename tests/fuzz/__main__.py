"""`make fuzz`: runs targets in processes of their own, one after another, and says how to replay what they find."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
_LAST = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+)")
_DONE = re.compile(r"Done (\d+) runs")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of a target came to."""

    target: str
    code: int
    inputs: int
    coverage: int
    """Instrumented edges that were reached."""
    crashes: list[Path]
    output: str

    @property
    def has_failed(self) -> bool:
        """Whether something was found, or nothing was tried."""
        return self.code != 0 or self.inputs == 0


def fuzz(target: str, place: Path, *, seconds: int = 0, runs: int = 0, seed: int = 0) -> Outcome:
    """Search by coverage for so many seconds or inputs (0: no bound), keeping corpus and crashes in `place`."""
    flags = [f"-max_total_time={seconds}"] if seconds else []
    flags += [f"-runs={runs}"] if runs else []
    flags += [f"-seed={seed}"] if seed else []
    return _work(target, place, flags)


def run_fixed(target: str, place: Path, *, runs: int, seed: int) -> Outcome:
    """Run so many inputs that only the seed decides (`base.fixed_inputs`)."""
    return _work(target, place, ["--fixed", str(seed), str(runs)])


def _work(target: str, place: Path, flags: list[str]) -> Outcome:
    command = [sys.executable, "-m", "tests.fuzz.worker", target, str(place), *flags]
    place.mkdir(parents=True, exist_ok=True)
    log = place / "log"
    with log.open("wb") as output, tempfile.TemporaryDirectory(dir=place) as scratch:  # libFuzzer ends without clean-up
        env = {**os.environ, "TMPDIR": scratch, "PYTHONHASHSEED": "0"}
        code = subprocess.run(command, cwd=ROOT, env=env, stdout=output, stderr=output, check=False).returncode
    text = log.read_text(errors="replace")
    last = _LAST.findall(text)
    done = _DONE.findall(text)
    crashes = [path for path in sorted(place.glob("crash-*")) + sorted(place.glob("timeout-*")) if not path.suffix]
    return Outcome(
        target,
        code,
        int(done[-1] if done else last[-1][0] if last else 0),
        int(last[-1][1]) if last else 0,
        crashes,
        text,
    )


def replay(target: str, path: Path) -> None:
    """Run one input, after those that its world had seen if their file lies beside it. Raises what it raises."""
    one = TARGETS[target]()
    history = path.with_name(path.name + ".history")
    before = msgspec.msgpack.decode(history.read_bytes(), type=list[bytes]) if history.exists() else []
    for data in before[:-1]:
        one.one(data)
    one.one(path.read_bytes())
    one.close()


def main() -> int:
    """See `--help`."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="may be repeated; default: all")
    parser.add_argument("--seconds", type=int, default=600, help="for each target (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: a new one")
    parser.add_argument("--place", type=Path, help="keeps corpus and crashes (default: a new temporary directory)")
    parser.add_argument("--replay", type=Path, help="run one input instead; needs --target")
    arguments = parser.parse_args()
    if arguments.replay:
        if not arguments.target or len(arguments.target) != 1:
            parser.error("--replay needs one --target")
        replay(arguments.target[0], arguments.replay)
        print("nothing wrong with it")
        return 0
    place = arguments.place or Path(tempfile.mkdtemp(prefix="tidelog-fuzz-"))
    failed = False
    for target in arguments.target or sorted(TARGETS):
        outcome = fuzz(target, place / target, seconds=arguments.seconds, seed=arguments.seed)
        print(
            f"{target:10} {outcome.inputs:>9} inputs, {outcome.coverage:>6} edges, exit code {outcome.code}", flush=True
        )
        for crash in outcome.crashes:
            print(f"  replay: python -m tests.fuzz --target {target} --replay {crash}")
        if outcome.has_failed:
            failed = True
            print("\n".join(outcome.output.splitlines()[-40:]))
    print(f"corpus, logs and crashes: {place}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
