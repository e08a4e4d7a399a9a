"""`tidelog spark table --follow` is killed at random, again and again; then the tables must equal the topic.

Three brokers with replicated WALs, a producer, and two tables of one topic: one with every record, one that keeps the
last of each key. Both have columns of JSON; one record in eight does not fit. Each round starts a job for one of them,
a driver with its JVM and Python workers in a session of its own, and kills (`kill -9`):

- `all`: all its processes; `driver`, `jvm`, `workers`: these only, the rest a little later (without its driver a
  worker may write on for a moment); `executors`: as `workers`, with `--master local-cluster[2,1,1024]`, where each is a
  JVM;
- at a step of a commit, `files`, `commit`, `quarantine` (`tests.pyspark_tidelog.table_steps.ingest`): the driver;
- `zombie`: all its processes are stopped, another job makes commits, and the first one wakes up: one of the two has to
  give up.

Meanwhile, from the first commit of the round on, one of: a broker is killed (and started again after the round), a
partition moves, the leases of all readers are ended, or objects are uploaded, compacted and deleted.

At the end each job runs to the topic's end. The topic, read by a consumer, has what was sent; the tables and their
quarantines, read by DuckDB, have each record once, with its values; no file and no marker of the killed runs is left.

    python -m tests.harness.spark_tables --rounds 30 [--seed N] [--kills all,files] [--meanwhile broker,move]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyiceberg.exceptions import NoSuchTableError

from pyspark_tidelog.jobs.table.tables import CatalogOptions, JobTable, open_catalog
from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import World
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.job_process import DRIVER, EXECUTOR, JVM, WORKER, JobProcess
from tests.support.lake import Warehouse
from tests.support.table_load import Record, TableLoad, as_latest, as_row, as_rows, record
from tidelog.runtime.errors import Unavailable

TOPIC = "events"
ROWS, LATEST = "lake.rows", "lake.latest"
PARTITIONS = 4
FIRST = 200
"""Records of each partition before the first round."""
FINAL_OFFSETS = 100_000
"""Of a commit of the last run."""
ROLES = {"driver": (DRIVER,), "jvm": (JVM,), "workers": (WORKER,), "executors": (EXECUTOR,)}
STEPS = ("files", "commit", "quarantine")
KILLS = ("all", *ROLES, *STEPS, "zombie")
MEANWHILE = ("nothing", "broker", "move", "leases", "compact")
SECTIONS = {"upload": {"age_ms": 500, "delete_delay_ms": 100}, "log": {"retention_ms": -1}}
HEADER = "round table   kill        at     meanwhile  commits        exit  offsets   of topic    took  load"
MET_ANOTHER = "another job has written"
"""What a job says that gives up. One that does not get the catalog's lock ends as if that did not answer."""
BEGIN_S = 180.0
ZOMBIE_S = 30.0


@dataclass(frozen=True)
class Wanted:
    """What the rounds are made of."""

    rounds: int
    seed: int = 1
    kills: Sequence[str] = KILLS
    meanwhile: Sequence[str] = MEANWHILE
    master: str = "local[2]"
    rate: float = 200.0
    """Records per second."""
    max_offsets: int = 400
    """Of one commit."""
    moment_s: float = 4.0
    """The kill comes at a random moment within so many seconds from the first commit's beginning on."""


@dataclass
class Rounds:
    """A cluster, a load, the tables, and what was wrong."""

    wanted: Wanted
    hot: HotCluster
    load: TableLoad
    directory: Path
    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.wanted.seed)
        self.world = World(self.hot)
        self.lake = Warehouse(self.directory / "lake")
        self._jobs = 0
        self._kills = self._in_turn(self.wanted.kills)
        self._meanwhile = self._in_turn(self.wanted.meanwhile)

    def _in_turn(self, names: Sequence[str]) -> list[str]:
        """Each of the names as often as the others, in a random order."""
        found: list[str] = []
        while len(found) < self.wanted.rounds:
            found += self.rng.sample(names, len(names))
        return found

    # --- jobs ----------------------------------------------------------------------------------------------------

    def begin(self, table: str, *more: str, die_at: tuple[str, int] | None = None, master: str = "") -> JobProcess:
        """Start a job for a table."""
        arguments = ["spark", "table", TOPIC, "--table", table, "--warehouse", str(self.lake.warehouse)]
        arguments += ["--schema", "json", "--master", master or self.wanted.master, *more]
        for setting in ("spark.ui.enabled=false", "spark.driver.host=127.0.0.1", "spark.driver.bindAddress=127.0.0.1"):
            arguments += ["--conf", setting]
        arguments += ["--conf", f"spark.local.dir={self.directory / 'local'}"]
        if table == LATEST:
            arguments += ["--upsert-by", "_key"]
        self._jobs += 1
        log = self.directory / f"job-{self._jobs}.log"
        if die_at is None:
            return JobProcess(self.hot.bootstrap, log, *arguments)
        steps = [die_at[0], str(die_at[1])]
        return JobProcess(self.hot.bootstrap, log, *steps, *arguments, module="tests.pyspark_tidelog.table_job")

    def follow(self, table: str, die_at: tuple[str, int] | None = None, master: str = "") -> JobProcess:
        """Start a job that follows the topic."""
        bound = str(self.wanted.max_offsets)
        return self.begin(
            table, "--follow", "--interval", "0.2", "--max-offsets-per-commit", bound, die_at=die_at, master=master
        )

    def number(self, table: str) -> int:
        """The number of a table's last commit."""
        return self._state(table)[0]

    def _state(self, table: str) -> tuple[int, int]:
        """The number of the last commit, and how many offsets the table has."""
        if not (self.lake.warehouse / "catalog.db").exists():
            return 0, 0
        catalog = open_catalog(CatalogOptions(str(self.lake.warehouse)))
        try:
            found = JobTable.find(catalog, table)
        finally:
            catalog.close()
        state = found.state if found is not None else None
        return (state.number, sum(state.next.values())) if state is not None else (0, 0)

    def _wait(self, condition: Callable[[], bool], job: JobProcess, timeout_s: float, what: str) -> bool:
        """Wait for a condition; False: the job ended before. Raises `AssertionError`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not job.is_running():
                return False
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{job.said()}"
            time.sleep(0.05)
        return True

    # --- a round -------------------------------------------------------------------------------------------------

    def round(self, at: int) -> None:
        """Start a job, and kill it. Raises `AssertionError` when something is not in time."""
        began_s = time.monotonic()
        table = LATEST if at % 2 else ROWS
        kill, meanwhile = self._kills[at], self._meanwhile[at]
        master = "local-cluster[2,1,1024]" if kill == "executors" else ""
        die_at = (kill, self.rng.randint(1, 3)) if kill in STEPS else None
        moment_s = self.rng.uniform(0, self.wanted.moment_s)
        is_early = kill in ("all", "driver", "jvm") and self.rng.random() < 0.2
        before = self.number(table)
        markers = set(self.lake.markers())
        job = self.follow(table, die_at, master)
        others: list[JobProcess] = []
        try:
            if not is_early:
                self._wait(lambda: not markers >= set(self.lake.markers()), job, BEGIN_S, "the job's first commit")
                self._disturb(meanwhile)
            told = self._end(kill, table, job, moment_s, die_at, others)
        finally:
            for each in (job, *others):
                each.kill()
        after, offsets = self._state(table)
        self._heal()
        self._look(table)
        codes = ",".join(str(each.process.returncode) for each in (job, *others))
        self.lines.append(
            f"{at + 1:5} {table.rpartition('.')[2]:7} {kill:10} {told:8} {'-' if is_early else meanwhile:9} "
            f"{before:6} → {after:4} {codes:>6} {offsets:8} {sum(self.load.counts):10} "
            f"{time.monotonic() - began_s:7.1f} {os.getloadavg()[0]:5.1f}"
        )

    def _end(
        self,
        kill: str,
        table: str,
        job: JobProcess,
        moment_s: float,
        die_at: tuple[str, int] | None,
        others: list[JobProcess],
    ) -> str:
        """Kill the job, all of it but what lives on for a moment; say when that was."""
        if die_at is not None:
            job.wait(BEGIN_S)
            if job.process.returncode != -signal.SIGKILL:
                self.problems.append(f"a job that was to die at {die_at} ended by itself:\n{job.said()}")
            return f"{die_at[1]}."
        time.sleep(moment_s)  # the random moment of the kill, not a wait for anything
        if not job.is_running():
            self.problems.append(f"a job ended before it was killed, with {job.process.returncode}:\n{job.said()}")
        if kill == "zombie":
            others.append(self._wake(table, job))
        elif kill in ROLES:
            if not job.signal(signal.SIGKILL, ROLES[kill]):
                self.problems.append(f"a job had no {kill}:\n{job.said()}")
            time.sleep(moment_s / 2)  # as long as what is left has, likewise random
        return f"{moment_s:.1f} s"

    def _wake(self, table: str, job: JobProcess) -> JobProcess:
        """Stop a job, let another one commit, and wake the first one up; return the other."""
        job.signal(signal.SIGSTOP)
        before = self.number(table)
        other = self.follow(table)
        with contextlib.suppress(AssertionError):  # the first one was stopped with a lock on the catalog
            self._wait(lambda: self.number(table) > before, other, ZOMBIE_S, "commits of another job")
        job.signal(signal.SIGCONT)
        deadline = time.monotonic() + BEGIN_S
        while job.is_running() and other.is_running():
            if time.monotonic() > deadline:
                self.problems.append(f"of two jobs on {table} none gives up:\n{job.said()}")
                break
            time.sleep(0.1)
        for each in (job, other):
            is_told = MET_ANOTHER in each.said(60) or each.process.returncode == Unavailable.exit_code
            if not (each.is_running() or is_told):
                self.problems.append(
                    f"a job that met another one ended with {each.process.returncode}:\n{each.said(60)}"
                )
        return other

    def _disturb(self, what: str) -> None:
        if what == "broker":
            self.hot.kill(self.rng.choice(BROKERS))
        elif what == "move":
            self.world.move(f"{TOPIC}:{self.rng.randrange(PARTITIONS)}")
        elif what == "leases":
            for lease in self.world.cli("lease", "list", "--format", "json").json():
                self.world.cli("lease", "end", lease["id"], code=None)  # it may have ended meanwhile
        elif what == "compact":
            self.world.upload()
            self.world.compact()

    def _heal(self) -> None:
        """Start brokers that were killed, and wait until all are ready."""
        for broker in BROKERS:
            if not self.hot.nodes[broker].is_running():
                self.hot.begin(broker)
        self.hot.ready(*BROKERS)

    def _look(self, table: str) -> None:
        """Note whether a table has a record twice."""
        try:
            (found,) = self.lake.query(
                table, "select count(*) as rows, count(distinct (_partition, _offset)) as places from {rows}"
            ) or [{"rows": 0, "places": 0}]
        except NoSuchTableError:
            return
        if found["rows"] != found["places"]:
            self.problems.append(f"{table} has {found['rows']} rows of {found['places']} records")

    # --- the end -------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Bring both tables to the topic's end, and note what is not as it must be."""
        self._heal()
        self.load.send(10)  # so that each table gets a commit, after which nothing of the killed ones may be left
        self.load.flush()
        for table in (ROWS, LATEST):
            job = self.begin(table, "--max-offsets-per-commit", str(FINAL_OFFSETS), "--format", "json")
            try:
                code = job.wait(2 * BEGIN_S)
            finally:
                job.kill()
            if code:
                self.problems.append(f"the last run for {table} ended with {code}:\n{job.said()}")
        topic = self.load.read()
        sent = [record(at, number) for at, count in enumerate(self.load.counts) for number in range(count)]
        if topic != sent:
            self.problems.append(f"the topic has {len(topic)} records, which are not the {len(sent)} that were sent")
        for table, found in ((ROWS, as_rows(topic)), (LATEST, as_latest(topic))):
            self.problems += self._differences(table, *found)
        names = [name for table in (ROWS, LATEST) for name in (table, f"{table}_quarantine")]
        if left := [*self.lake.strays(*names), *self.lake.markers()]:
            self.problems.append(f"{len(left)} files and markers of killed runs are left: {left[:3]}")

    def _differences(self, table: str, rows: dict[Any, Record], bad: dict[Any, Record]) -> list[str]:
        found = []
        fits = [as_row(TOPIC, one) for _, one in sorted(rows.items())]
        told = [{name: row.get(name) for name in fits[0]} for row in self.lake.rows(table)] if fits else []
        found += _compare(table, fits, told)
        names = ("_topic", "_partition", "_offset", "key", "value")
        unfit = [dict(zip(names, (TOPIC, *at, one.key, one.value), strict=True)) for at, one in sorted(bad.items())]
        quarantine = f"{table}_quarantine"
        found += _compare(
            quarantine, unfit, [{name: row[name] for name in names} for row in self.lake.rows(quarantine)]
        )
        print(f"{table}: {len(told):,} rows, {len(unfit):,} records in the quarantine, {self.number(table)} commits")
        return found


def _compare(table: str, wanted: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    if wanted == found:
        return []
    first = next((pair for pair in zip(wanted, found, strict=False) if pair[0] != pair[1]), None)
    return [f"{table} has {len(found)} rows, {len(wanted)} are due; first difference: {first or 'at the end'}"]


def run(wanted: Wanted, directory: Path) -> Rounds:
    """All rounds. `problems` of the result are what was wrong."""
    with hot_cluster(directory / "cluster", SECTIONS) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        load = TableLoad(hot.bootstrap, TOPIC, PARTITIONS, wanted.rate)
        rounds = Rounds(wanted, hot, load, directory)
        load.send(FIRST)
        load.flush()
        print(HEADER, flush=True)
        with load:
            for at in range(wanted.rounds):
                try:
                    rounds.round(at)
                except AssertionError as error:
                    rounds.problems.append(f"round {at + 1} did not end: {error}")
                    break
                print(rounds.lines[-1], flush=True)
        rounds.finish()
    return rounds


def main() -> int:
    """Run; exit code 1 when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", default=",".join(KILLS))
    parser.add_argument("--meanwhile", default=",".join(MEANWHILE))
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--rate", type=float, default=200.0, help="records per second")
    parser.add_argument("--max-offsets", type=int, default=400, help="of one commit")
    parser.add_argument("--moment-s", type=float, default=4.0, help="the kill comes within so many seconds")
    given = vars(parser.parse_args())
    for name, known in (("kills", KILLS), ("meanwhile", MEANWHILE)):
        given[name] = given[name].split(",")
        if unknown := set(given[name]) - set(known):
            parser.error(f"--{name} {', '.join(sorted(unknown))}: known are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end jobs and nodes
    wanted = Wanted(**given)
    print(f"seed {wanted.seed}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory(prefix="tidelog-spark-tables-") as directory:
        rounds = run(wanted, Path(directory))
    print(f"{len(rounds.lines)} rounds, {sum(rounds.load.counts):,} records")
    print(
        json.dumps(rounds.problems, indent=1) if rounds.problems else "each record is in its table or quarantine, once"
    )
    return 1 if rounds.problems else 0


if __name__ == "__main__":
    sys.exit(main())
