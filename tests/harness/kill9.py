"""`kill -9` of a broker under load, again and again; then every promise is checked against what clients were told.

Load: the clients of `tidelog chaos` (`tidelog.chaos.clients`): an idempotent and a plain producer, both
acks=all, consumers by assignment and in a group, some that commit, ask for watermarks and committed offsets, and delete
old records. Each round lets them work for a random time and kills the broker process; its supervisor starts it again.
Small upload thresholds keep uploads, commits and WAL trims in flight when the kill comes. At the end the whole log is
read, and the history is held against the checkers (docs/checkers.md). Besides, offsets must be contiguous (`holes`).

    python -m tests.harness.kill9 --rounds 200 [--seed N] [--wal disk|s3] [--history FILE]
        [--s3-endpoint URL --bucket NAME]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.backends import create_topic
from tests.support.tidelog_process import TidelogProcess
from tidelog.chaos.clients import FINAL_PROCESS, TOPIC, ClientJournal, Clients
from tidelog.simulation.checkers import Finding, check
from tidelog.simulation.checkers.history import History

PARTITIONS = 6
RECORDS_PER_S = 2000.0
VALUE_BYTES = 400
SMALL_UPLOADS = ("--set", "upload.age_ms=400", "--set", "upload.size_bytes=524288", "--set", "upload.split_bytes=65536")


@dataclass
class Report:
    """What a run found."""

    rounds: int
    history: History
    downtime_s: list[float] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What did not come to its end, and holes in the offsets."""

    @property
    def clean(self) -> bool:
        return not (self.findings or self.problems)

    def count(self, kind: str, outcome: str, *, idempotent: bool = False) -> int:
        """Operations, of the kind of producer that is asked for."""
        ops = self.history.ops
        return sum(op.kind == kind and op.outcome == outcome and op.idempotent == idempotent for op in ops)

    def text(self) -> str:
        read = sum(len(op.values) for op in self.history.ops if op.kind == "poll")
        lines = [
            f"rounds of kill -9                  {self.rounds}",
            f"acknowledged, idempotent           {self.count('send', 'ok', idempotent=True)}",
            f"acknowledged, plain                {self.count('send', 'ok')}",
            f"without an outcome, idempotent     {self.count('send', 'info', idempotent=True)}",
            f"without an outcome, plain          {self.count('send', 'info')}",
            f"group commits acknowledged         {self.count('commit', 'ok')}",
            f"deletions of records acknowledged  {self.count('delete_records', 'ok')}",
            f"records read, by all consumers     {read}",
            f"findings of the checkers           {len(self.findings)}",
        ]
        if down := sorted(self.downtime_s):
            lines.append(
                f"kill to ready, s                   median {statistics.median(down):.2f}, "
                f"p90 {down[int(len(down) * 0.9)]:.2f}, max {down[-1]:.2f}"
            )
        return "\n".join(lines + [finding.text() for finding in self.findings[:10]] + self.problems)


def holes(history: History) -> list[str]:
    """Where the last reader found no record: a line for the first hole of each partition.

    Without transactions every offset holds a record. A partition with a DeleteRecords, whatever came of it, may begin
    anywhere and is left out.
    """
    deleted = {op.partition for op in history.ops if op.kind == "delete_records"}
    read: dict[int, list[int]] = defaultdict(list)
    for op in history.ops:
        if op.kind == "poll" and op.process == FINAL_PROCESS and op.partition not in deleted:
            read[op.partition] += op.offsets
    found = []
    for partition, offsets in sorted(read.items()):
        for due, offset in enumerate(offsets):
            if offset != due:
                found.append(f"{TOPIC}-{partition}: offset {offset} was read where {due} was due")
                break
    return found


def run(rounds: int, seed: int, data_dir: Path, flags: tuple[str, ...] = ()) -> Report:
    """The whole exercise; raises only when the broker does not come back."""
    rng = random.Random(seed)
    process = TidelogProcess(data_dir, [*SMALL_UPLOADS, *flags])
    try:
        process.start()
        create_topic(process.bootstrap, TOPIC, PARTITIONS)
        journal = ClientJournal(process.bootstrap, PARTITIONS, {"harness": "kill9", "rounds": rounds, "seed": seed})
        report = Report(rounds, journal.history)
        with Clients(journal, rate=RECORDS_PER_S, value_bytes=VALUE_BYTES) as clients:
            for number in range(rounds):
                time.sleep(rng.uniform(0.05, 1.5))  # the random moment of the kill, not a wait for anything
                fault = journal.begin("fault", 0, name="kill -9")
                process.kill_broker()
                process.wait_for_line("ready again", 120)
                journal.end(fault, "ok")
                report.downtime_s.append((fault.ended_us - fault.began_us) / 1e6)
                if sys.stdout.isatty() or (number + 1) % 20 == 0:
                    print(f"round {number + 1}: ready after {report.downtime_s[-1]:.2f} s", flush=True)
            journal.history.note("heal", 0, journal.now_us())
            report.problems += clients.finish()
        journal.history.ops.sort(key=lambda op: op.index)
        report.findings += check(journal.history)
        report.problems += holes(journal.history)
        code = process.stop()
        assert code == 0, process.tail()
    finally:
        process.kill()
    return report


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--wal", choices=("disk", "s3"), default="disk")
    arguments.add_argument("--s3-endpoint")
    arguments.add_argument("--bucket")
    arguments.add_argument("--history", type=Path, help="for `tidelog check`")
    given = arguments.parse_args()
    flags: tuple[str, ...] = ("--wal", given.wal)
    if given.s3_endpoint:
        flags += ("--s3-endpoint", given.s3_endpoint, "--bucket", given.bucket)
    with tempfile.TemporaryDirectory(prefix="tidelog-kill9-") as scratch:
        report = run(given.rounds, given.seed, Path(scratch) / "data", flags)
    if given.history is not None:
        report.history.save(given.history)
    print(report.text())
    return 0 if report.clean else 1


if __name__ == "__main__":
    sys.exit(main())
