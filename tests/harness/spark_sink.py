"""A streaming query that writes exactly once is killed at random, again and again; then the topics must be equal.

Three brokers with replicated WALs, a producer, and a query from one topic to another
(`tests.pyspark_tidelog.sink_query`). Each round sees to it that the query runs, with another number of tasks if it has
to be started, waits for a micro-batch and kills (`kill -9`):

- `all`: all its processes; `driver`, `jvm`: these only, the rest a little later (a Python worker may write on);
  `workers`, `executors`: these only, and the query goes on where Spark tries their tasks again, or is started again in
  the next round. Executors are JVMs of their own, with `local-cluster[2,1,1024]`;
- `prepared`: all, when a task has prepared its transaction; `decided`: all, when a decision is in the log;
- `again`: all, and the last commit is taken out of Spark's own log: the micro-batch runs again though it is committed;
- `zombie`: all its processes are stopped, another driver goes on with the same checkpoint, and the first one wakes up.

Meanwhile one of: a broker is killed (and started again after the round), a partition of the target moves.

At the end the query runs to the topic's end. A consumer that reads committed records of the target must see the source,
each partition in order; no transaction may be open, and no last stable offset behind the end.

    python -m tests.harness.spark_sink --rounds 30 [--seed N] [--kills all,zombie] [--meanwhile broker,move]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from pyspark_tidelog.decision_topic import DecisionTopic
from pyspark_tidelog.decisions import Query
from pyspark_tidelog.transactions import TransactionCalls
from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import World
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.job_process import DRIVER, EXECUTOR, JVM, WORKER, JobProcess
from tests.support.table_load import TableLoad, record

SOURCE, TARGET = "source", "target"
PARTITIONS = 4
FIRST = 200
"""Records of each partition before the first round."""
ROLES = {"driver": (DRIVER,), "jvm": (JVM,), "workers": (WORKER,), "executors": (EXECUTOR,)}
KILLS = ("all", *ROLES, "prepared", "decided", "again", "zombie")
MEANWHILE = ("nothing", "broker", "move")
SECTIONS: dict[str, dict[str, Any]] = {
    "upload": {"age_ms": 500},
    "log": {"retention_ms": -1},
    "group": {"transaction_two_phase_commit": True},
}
HEADER = "round kill       at     meanwhile tasks  batches    exit    open  of topic    took  load"
BEGIN_S = 600.0
"""How long a query may take to its first micro-batch, beside whatever else the machine does."""
ZOMBIE_S = 20.0
"""How long a zombie and the driver that goes on run beside each other."""
READ_S = 120.0


@dataclass(frozen=True)
class Wanted:
    """What the rounds are made of."""

    rounds: int
    seed: int = 1
    kills: Sequence[str] = KILLS
    meanwhile: Sequence[str] = MEANWHILE
    rate: float = 200.0
    """Records per second."""
    max_offsets: int = 400
    """Of one micro-batch."""
    moment_s: float = 3.0
    """The kill comes at a random moment within so many seconds from a micro-batch on."""


@dataclass
class Rounds:
    """A cluster, a load, the query, and what was wrong."""

    wanted: Wanted
    hot: HotCluster
    load: TableLoad
    directory: Path
    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.wanted.seed)
        self.world = World(self.hot)
        self.checkpoint = self.directory / "checkpoint"
        self.job: JobProcess | None = None
        self.tasks = 0
        self._is_cluster = False
        self._is_hurt = False
        """Whether the query has lost processes, so that it may end by itself."""
        self._jobs = 0
        self._kills = self._in_turn(self.wanted.kills)
        self._meanwhile = self._in_turn(self.wanted.meanwhile)

    def _in_turn(self, names: Sequence[str]) -> list[str]:
        """Each of the names as often as the others, in a random order."""
        found: list[str] = []
        while len(found) < self.wanted.rounds:
            found += self.rng.sample(names, len(names))
        return found

    # --- the query -----------------------------------------------------------------------------------------------

    def begin(self, *, ends: bool = False, is_cluster: bool = False) -> JobProcess:
        """Start the query, with some number of tasks."""
        self.tasks = self.rng.randint(1, PARTITIONS + 1)
        settings = {
            "spark.master": "local-cluster[2,1,1024]" if is_cluster else "local[2,4]",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.local.dir": str(self.directory / "local"),
        }
        given = {
            "bootstrap": self.hot.bootstrap,
            "token": self.world.token,
            "source": SOURCE,
            "target": TARGET,
            "checkpoint": str(self.checkpoint),
            "max_offsets": 100_000 if ends else self.wanted.max_offsets,
            "tasks": self.tasks,
            "ends": ends,
            "settings": settings,
        }
        self._jobs += 1
        log = self.directory / f"query-{self._jobs}.log"
        return JobProcess(self.hot.bootstrap, log, json.dumps(given), module="tests.pyspark_tidelog.sink_query")

    def batches(self) -> int:
        """How many micro-batches Spark has written down as done."""
        return max((int(each.name) for each in self.checkpoint.glob("commits/[0-9]*")), default=-1) + 1

    def query(self) -> Query:
        """The query, as its checkpoint names it."""
        told = json.loads((self.checkpoint / "metadata").read_text())
        return Query("tidelog-spark", told["id"])

    def open(self) -> int:
        """How many transactions of the query are open."""
        with closing(TransactionCalls(self.hot.bootstrap)) as calls:
            return len(calls.open(self.query()))

    def decided(self) -> int:
        """The number of the last micro-batch that was decided."""
        last = DecisionTopic(self.query(), {"bootstrap.servers": self.hot.bootstrap}).read().last
        return -1 if last is None else last.batch

    def _wait(self, condition: Callable[[], bool], job: JobProcess, timeout_s: float, what: str) -> bool:
        """Wait for a condition; False: the query ended before. Raises `AssertionError`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not job.is_running():
                return False
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{job.said()}"
            time.sleep(0.05)
        return True

    def _running(self, kill: str) -> JobProcess:
        """The query, which is started if it does not run, or not with executors that the round needs."""
        is_cluster = kill == "executors"
        if self.job is not None and self.job.is_running() and (self._is_cluster or not is_cluster):
            return self.job
        self.stop()
        self._is_cluster = is_cluster
        self._is_hurt = False
        self.job = self.begin(is_cluster=is_cluster)
        return self.job

    def stop(self) -> None:
        """Kill what runs of the query."""
        if self.job is not None:
            self.job.kill()

    # --- a round -------------------------------------------------------------------------------------------------

    def round(self, at: int) -> None:
        """Kill the query. Raises `AssertionError` when something is not in time."""
        began_s = time.monotonic()
        kill, meanwhile = self._kills[at], self._meanwhile[at]
        moment_s = self.rng.uniform(0, self.wanted.moment_s)
        before = self.batches()
        job = self._running(kill)
        is_there = self._wait(lambda: self.batches() > before, job, BEGIN_S, "a micro-batch")
        if not is_there and self._is_hurt:  # the driver's own Python worker was among those of the round before
            job = self._running(kill)
            is_there = self._wait(lambda: self.batches() > before, job, BEGIN_S, "a micro-batch")
        if not is_there:
            raise AssertionError(f"the query ended by itself:\n{job.said(40)}")
        self._disturb(meanwhile)
        told = self._end(kill, job, moment_s)
        is_left = job.is_running()
        self._heal()
        after, left = self.batches(), self.open()
        code = "goes on" if is_left else job.process.poll()
        self.lines.append(
            f"{at + 1:5} {kill:10} {told:6} {meanwhile:9} {self.tasks:5} {before:4} → {after:4} {code!s:>7} "
            f"{left:5} {sum(self.load.counts):9} {time.monotonic() - began_s:7.1f} {os.getloadavg()[0]:5.1f}"
        )

    def _end(self, kill: str, job: JobProcess, moment_s: float) -> str:
        """Kill the query, or what belongs to it; say when that was."""
        if kill in ("prepared", "decided"):
            decided = self.decided()
            reached = (lambda: self.open() > 0) if kill == "prepared" else (lambda: self.decided() > decided)
            self._wait(reached, job, BEGIN_S, kill)
            job.kill()
            return "-"
        time.sleep(moment_s)  # the random moment of the kill, not a wait for anything
        if kill == "zombie":
            self._wake(job)
        elif kill in ("workers", "executors"):
            job.signal(signal.SIGKILL, ROLES[kill])
            self._is_hurt = True
        elif kill in ROLES:
            job.signal(signal.SIGKILL, ROLES[kill])
            time.sleep(moment_s / 2)  # as long as what is left has, likewise random
            job.kill()
        else:
            job.kill()
        if kill == "again":
            last = self.batches() - 1
            for name in (f"{last}", f".{last}.crc"):
                (self.checkpoint / "commits" / name).unlink(missing_ok=True)
            for later in self.checkpoint.glob("offsets/[0-9]*"):  # which Spark begins when it has committed
                if int(later.name) > last:
                    later.unlink()
                    (later.parent / f".{later.name}.crc").unlink(missing_ok=True)
        return f"{moment_s:.1f} s"

    def _wake(self, job: JobProcess) -> None:
        """Stop the query, let another driver go on, and wake the first one up; the other one is kept, if it lives."""
        job.signal(signal.SIGSTOP)
        before = self.batches()
        other = self.begin()
        try:
            self._wait(lambda: self.batches() > before, other, BEGIN_S, "a micro-batch of another driver")
            job.signal(signal.SIGCONT)
            deadline = time.monotonic() + ZOMBIE_S
            while job.is_running() and other.is_running() and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            other.kill()
            job.kill()

    def _disturb(self, what: str) -> None:
        if what == "broker":
            self.hot.kill(self.rng.choice(BROKERS))
        elif what == "move":
            self.world.move(f"{TARGET}:{self.rng.randrange(PARTITIONS)}")

    def _heal(self) -> None:
        """Start brokers that were killed, and wait until all are ready."""
        for broker in BROKERS:
            if not self.hot.nodes[broker].is_running():
                self.hot.begin(broker)
        self.hot.ready(*BROKERS)

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring the target to the source's end, and note what is not as it must be."""
        self.stop()
        self._heal()
        self.load.send(10)  # so that there is one more micro-batch, after which nothing of the killed ones may be left
        self.load.flush()
        job = self.begin(ends=True)
        try:
            code = job.wait(2 * BEGIN_S)
        finally:
            job.kill()
        if code:
            self.problems.append(f"the last run ended with {code}:\n{job.said(40)}")
            print(self.problems[-1])
            return
        if left := self.open():
            self.problems.append(f"{left} transactions are open at the end")
        self.problems += [
            problem
            for partition, count in enumerate(self.load.counts)
            for problem in self._differences(partition, count)
        ]
        print(f"{self.batches()} micro-batches, the last decision is of number {self.decided()}")

    def _differences(self, partition: int, count: int) -> list[str]:
        """What is wrong with a partition of the target, which is to have the first `count` records of a load."""
        wanted = [(one.key, one.value) for one in (record(partition, number) for number in range(count))]
        found, stable, end = read_committed(self.hot.bootstrap, partition)
        problems = []
        if stable != end:
            problems.append(f"partition {partition}: its last stable offset is {stable}, its end {end}")
        if found != wanted:
            at = next((at for at, pair in enumerate(zip(wanted, found, strict=False)) if pair[0] != pair[1]), None)
            place = "at the end" if at is None else f"at {at}: {wanted[at]} is due, {found[at]} is there"
            problems.append(f"partition {partition} has {len(found)} records, {len(wanted)} are due; first: {place}")
        print(
            f"partition {partition}: {len(found):,} records, {end - len(found):,} offsets of markers and aborted ones"
        )
        return problems


def read_committed(bootstrap: str, partition: int) -> tuple[list[tuple[bytes | None, bytes | None]], int, int]:
    """The committed records of a partition of the target, its last stable offset, and its end."""
    settings = {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False, "log_level": 0}
    consumer: Any = Consumer({**settings, "isolation.level": "read_committed", "enable.partition.eof": True})
    place = TopicPartition(TARGET, partition, OFFSET_BEGINNING)
    found: list[tuple[bytes | None, bytes | None]] = []
    deadline = time.monotonic() + READ_S
    try:
        consumer.assign([place])
        while time.monotonic() < deadline:
            for message in consumer.consume(5_000, 0.5):
                if message.error() is None:
                    found.append((message.key(), message.value()))
                else:
                    assert message.error().name() == "_PARTITION_EOF", message.error()
                    end: int = consumer.get_watermark_offsets(place, READ_S, cached=False)[1]
                    return found, message.offset(), end
    finally:
        consumer.close()
    raise AssertionError(f"partition {partition} was not read within {READ_S:g} s")


def run(wanted: Wanted, directory: Path) -> Rounds:
    """All rounds. `problems` of the result are what was wrong."""
    with hot_cluster(directory / "cluster", SECTIONS) as hot:
        for topic in (SOURCE, TARGET):
            create_topic(hot.bootstrap, topic, PARTITIONS)
        load = TableLoad(hot.bootstrap, SOURCE, PARTITIONS, wanted.rate)
        rounds = Rounds(wanted, hot, load, directory)
        load.send(FIRST)
        load.flush()
        print(HEADER, flush=True)
        try:
            with load:
                for at in range(wanted.rounds):
                    try:
                        rounds.round(at)
                    except AssertionError as error:
                        rounds.problems.append(f"round {at + 1} did not end: {error}")
                        print(rounds.problems[-1])
                        break
                    print(rounds.lines[-1], flush=True)
            rounds.finish()
        finally:
            rounds.stop()
    return rounds


def main() -> int:
    """Run; exit code 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", default=",".join(KILLS))
    parser.add_argument("--meanwhile", default=",".join(MEANWHILE))
    parser.add_argument("--rate", type=float, default=200.0, help="records per second")
    parser.add_argument("--max-offsets", type=int, default=400, help="of one micro-batch")
    parser.add_argument("--moment-s", type=float, default=3.0, help="the kill comes within so many seconds")
    given = vars(parser.parse_args())
    for name, known in (("kills", KILLS), ("meanwhile", MEANWHILE)):
        given[name] = given[name].split(",")
        if unknown := set(given[name]) - set(known):
            parser.error(f"--{name} {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end queries and nodes
    wanted = Wanted(**given)
    print(f"seed {wanted.seed}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="tidelog-spark-sink-") as directory:
        rounds = run(wanted, Path(directory))
    print(f"{len(rounds.lines)} rounds, {sum(rounds.load.counts):,} records")
    print(json.dumps(rounds.problems, indent=1) if rounds.problems else "each record is in the target once, in order")
    return 1 if rounds.problems else 0


if __name__ == "__main__":
    sys.exit(main())
