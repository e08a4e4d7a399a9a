"""What producers with acks=all get while followers of a replicated WAL are dead, hung or slow: a table, as measured.

Controllers and brokers in a process each. One replica set is looked at, with its master on a broker that stays well.
Each row has a policy (members, `in_sync_replicas` as need, auto-degrade on or off), and one or more followers that are

- `killed`: `kill -9`, started again after `--fault-s`;
- `hung`: SIGSTOP, SIGCONT after `--fault-s`;
- `lagging`: stopped for `LAG_STOP_S` of each `LAG_STOP_S + LAG_RUN_S` seconds: it acknowledges in bursts, and lacks
  more than `max_gap_bytes` in between.

Two producers write meanwhile. An idempotent one (librdkafka, default retries, 400 KB/s) shows how long acknowledgements
stall; at the end every record that it was told of must be there, once and in order. A plain one sends a request with
acks=all and a time-out of 2 s after another, and counts the answers. Columns, in seconds:

- `plain producer`: answers while the fault lasts;
- `stall`: the longest time between two acknowledgements of the idempotent producer;
- `acks go on`: from the beginning of the fault (`fault +`), or from the member's return (`return +`) until the first
  acknowledgement after that stall; `never stopped`: no stall over `STALL_S`;
- `described`: what `replica-set describe` says shortly before the return: members in sync, of the SyncStateSet's, the
  quorum, whether it is degraded;
- `in sync again`: from the return until all members are in sync and the quorum is what the policy asks for.

`make quorum-table`; `--rows 3/2` runs those of three members with a need of two:

    python -m tests.harness.quorum_table
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from confluent_kafka.admin import AdminClient, NewTopic

from tests.e2e.backends import QUIET
from tests.support import schema
from tests.support.hot_cluster import BROKERS, HotCluster, hot_cluster
from tests.support.kafka_client import KafkaClient, request_entity
from tests.support.kafka_world import batch
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.serve_cluster import eventually
from tidelog.cli.client import ClusterConnection, http_json
from tidelog.runtime.errors import TidelogError

MASTER = BROKERS[0]
KILLED, HUNG, LAGGING = FAULTS = ("killed", "hung", "lagging")
LAG_STOP_S, LAG_RUN_S = 3.6, 0.4
"""Shorter than `replication.silence_ms` (5 s), longer than `slave_timeout_ms` (3 s)."""
STALL_S = 1.5
"""A shorter gap is taken for the machine's."""
PLAIN_TIMEOUT_MS = 2_000
PLAIN_PAUSE_S = 0.05
LOAD_PAUSE_S, LOAD_BYTES = 0.02, 8 << 10
ANSWERS = {0: "acked", 6: "NOT_LEADER_OR_FOLLOWER", 7: "REQUEST_TIMED_OUT", 19: "NOT_ENOUGH_REPLICAS"}
HEADER = (
    "| members | need | degrade | fault | plain producer | stall | acks go on | described | in sync again |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


class Case(NamedTuple):
    """One row."""

    members: int
    need: int
    degrade: bool
    faulty: int
    fault: str

    @property
    def brokers(self) -> tuple[int, ...]:
        """Those that are faulty."""
        return BROKERS[self.members - self.faulty : self.members]

    def text(self) -> str:
        """The first columns."""
        what = self.fault if self.faulty == 1 else f"{self.faulty} {self.fault}"
        return f"| {self.members} | {self.need} | {'to 1' if self.degrade else 'off'} | {what}"


def cases(members: int) -> list[Case]:
    """All rows of a cluster of so many members. Degrading has no effect where the need is one."""
    found = []
    for need in range(1, members + 1):
        for faulty in (1, 2) if (members, need) == (3, 2) else (1,):
            for degrade in (False, True) if need > 1 else (False,):
                found += [Case(members, need, degrade, faulty, fault) for fault in FAULTS]
    return found


@dataclass(frozen=True)
class Measured:
    """What a row came to; seconds."""

    case: Case
    answers: Counter[str]
    stall_s: float
    resumed: str
    described: str
    in_sync_s: float
    problems: tuple[str, ...]

    def line(self) -> str:
        """The row of the table."""
        total = self.answers.total()
        shares = {name: 100 * count / total for name, count in self.answers.most_common()}
        told = ", ".join(f"{name} {share:.0f} %" if share >= 0.5 else f"{name} < 1 %" for name, share in shares.items())
        return (
            f"{self.case.text()} | {told or 'no answer'} | {self.stall_s:.1f} | {self.resumed} | {self.described} |"
            f" {self.in_sync_s:.1f} |"
        )


class PlainProducer:
    """One request with acks=all after another to the master, each answered or timed out; answers are counted."""

    def __init__(self, hot: HotCluster, topic: str) -> None:
        self._address = ("127.0.0.1", hot.kafka_ports[MASTER])
        self._topic = topic
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._lock = threading.Lock()
        self._answers: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def __enter__(self) -> PlainProducer:
        self._thread.start()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def take(self) -> Counter[str]:
        """The answers since the last call."""
        with self._lock:
            taken, self._answers = self._answers, Counter()
        return taken

    async def _run(self) -> None:
        try:
            async with KafkaClient(*self._address) as client:
                while not self._stopping.is_set():
                    client.post(self._request())
                    answer = await client.receive()
                    code = int(answer.responses[0].partition_responses[0].error_code)
                    with self._lock:
                        self._answers[ANSWERS.get(code, f"error {code}")] += 1
                    await asyncio.sleep(PLAIN_PAUSE_S)
        except BaseException as error:
            self.failure = error
            raise

    def _request(self) -> Any:
        make = schema.request(0, 10).make
        data = make("PartitionProduceData", index=0, records=batch(b"plain"))
        topics = (make("TopicProduceData", name=self._topic, partition_data=(data,)),)
        return request_entity(0, 10, transactional_id=None, acks=-1, timeout=PLAIN_TIMEOUT_MS, topic_data=topics)


class QuorumTable:
    """Runs rows against one cluster, whose brokers all are members of the set that `MASTER` leads."""

    def __init__(self, hot: HotCluster, fault_s: float) -> None:
        self._hot = hot
        self._fault_s = fault_s
        self._rows = 0
        connection = ClusterConnection(hot.address(MASTER))
        self._connection = connection.at(hot.admin_url(MASTER), MASTER)

    def live(self) -> dict[str, Any]:
        """What the master knows, as `replica-set describe` shows it. Raises `AssertionError` if it does not lead."""
        url = self._connection.admin_url
        found: dict[str, Any] | None = http_json(url, f"/replica-sets/describe?id={MASTER}", timeout_s=5.0)["live"]
        assert found is not None, f"broker {MASTER} does not lead"
        return found

    def row(self, case: Case) -> Measured:
        """Measure one row. Raises `AssertionError` when something is not in time."""
        self._rows += 1
        hot, topic = self._hot, f"row-{case.members}-{self._rows}"
        self._prepare(case)
        admin = AdminClient({"bootstrap.servers": hot.bootstrap, **QUIET})
        for name in (topic, f"{topic}-plain"):
            new = NewTopic(name, num_partitions=1, replica_assignment=[[MASTER]])
            admin.create_topics([new])[name].result(60)
        load = PartitionLoad(
            hot.address(MASTER), topic, 1, LOAD_PAUSE_S, value_bytes=LOAD_BYTES, settings={"linger.ms": "0"}
        )
        with load, PlainProducer(hot, f"{topic}-plain") as plain:
            load.wait_grown(50)
            plain.take()
            began_s = time.monotonic()
            with self._fault(case):
                time.sleep(self._fault_s)  # how long the fault lasts; nothing is waited for
                answers, status = plain.take(), self.live()
            returned_s = time.monotonic()
            self._wait_whole(case)
            in_sync_s = time.monotonic() - returned_s
            load.wait_grown(20)
        problems = [*load.verify(hot.bootstrap)]
        if plain.failure is not None:
            problems.append(f"the plain producer's connection ended: {plain.failure!r}")
        stall_s, at_s = longest_stall(load, began_s)
        resumed = "never stopped"
        if stall_s > STALL_S:
            resumed = f"return + {at_s - returned_s:.1f}" if at_s > returned_s else f"fault + {at_s - began_s:.1f}"
        return Measured(case, answers, stall_s, resumed, described(status), in_sync_s, tuple(problems))

    def _prepare(self, case: Case) -> None:
        hot = self._hot
        fields = {
            "total_replicas": case.members,
            "in_sync_replicas": case.need,
            "min_in_sync_replicas": 1,
            "enable_auto_in_sync_replicas": str(case.degrade).lower(),
        }
        self._connection.post(f"/replica-sets/policy?{urlencode({'id': MASTER, **fields})}")
        hot.wait_full(case.members, 120)
        if hot.sets()[MASTER]["master"] != MASTER:
            hot.elect(MASTER, MASTER)
        self._wait_whole(case)

    def _wait_whole(self, case: Case) -> None:
        def is_whole() -> bool:
            try:
                live = self.live()
            except TidelogError as error:
                raise AssertionError(str(error)) from error
            whole = len(live["in_sync"]) == len(live["sync_state_set"]) == case.members
            return whole and live["quorum"] == case.need and not live["changing"] and not live["degraded"]

        eventually(is_whole, 120)

    @contextlib.contextmanager
    def _fault(self, case: Case) -> Iterator[None]:
        hot, brokers = self._hot, case.brokers
        if case.fault == KILLED:
            hot.kill(*brokers)
            yield
            hot.begin(*brokers)
        elif case.fault == HUNG:
            self._signal(case, signal.SIGSTOP)
            try:
                yield
                self._check_stopped(case)
            finally:
                self._signal(case, signal.SIGCONT)
        else:
            ending = threading.Event()
            duty = threading.Thread(target=self._lag, args=(case, ending), daemon=True)
            duty.start()
            try:
                yield
            finally:
                ending.set()
                duty.join(30)

    def _lag(self, case: Case, ending: threading.Event) -> None:
        while not ending.is_set():
            self._signal(case, signal.SIGSTOP)
            ending.wait(LAG_STOP_S)
            self._signal(case, signal.SIGCONT)
            ending.wait(LAG_RUN_S)

    def _check_stopped(self, case: Case) -> None:
        """Raise `AssertionError` if somebody has continued a process: the kernel does when a process group is orphaned,
        that is, when the shell ends that has started this in the background."""
        for each in case.brokers:
            state = Path(f"/proc/{self._hot.nodes[each].pid}/stat").read_text().rpartition(")")[2].split()[0]
            assert state == "T", f"broker {each} was continued: start this with setsid, or in the foreground"

    def _signal(self, case: Case, number: signal.Signals) -> None:
        for each in case.brokers:
            self._hot.nodes[each].signal(number)


def described(live: dict[str, Any]) -> str:
    """What a row says of the master's own view."""
    members, near = len(live["sync_state_set"]), len(live["in_sync"])
    parts = [f"{near} in sync of {members}", f"quorum {live['quorum']}"]
    if live["degraded"]:
        parts.append("degraded")
    if live["refusal"]:
        parts.append("refuses")
    return ", ".join(parts)


def longest_stall(load: PartitionLoad, began_s: float) -> tuple[float, float]:
    """The longest time without an acknowledgement since then, and when it ended (monotonic seconds)."""
    ended = sorted(op.ended_us / 1e6 for op in load.history.ops if op.kind == "send" and op.ok)
    times = [began_s, *(each for each in ended if each > began_s)]
    gaps = [(later - earlier, later) for earlier, later in pairwise(times)]
    return max(gaps, default=(0.0, began_s))


def run(wanted: Callable[[Case], bool], fault_s: float, directory: Path) -> Iterator[Measured]:
    """Measure all rows that are wanted, cluster by cluster."""
    for members in (2, 3):
        rows = [each for each in cases(members) if wanted(each)]
        if not rows:
            continue
        with hot_cluster(directory / f"members-{members}", brokers=members) as hot:
            table = QuorumTable(hot, fault_s)
            for case in rows:
                yield table.row(case)


def main() -> int:
    """Run; exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault-s", type=float, default=20.0, help="how long a fault lasts")
    parser.add_argument("--rows", default="", help="only those with this MEMBERS/NEED, and /FAULT")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # and end the nodes

    def wanted(case: Case) -> bool:
        return f"{case.members}/{case.need}/{case.fault}".startswith(arguments.rows)

    problems: list[str] = []
    print(HEADER, flush=True)
    gc.disable()  # each record is noted: to look through them stops the clients for longer and longer
    with tempfile.TemporaryDirectory(prefix="tidelog-quorum-table-") as directory:
        loads = []
        for one in run(wanted, arguments.fault_s, Path(directory)):
            print(one.line(), flush=True)
            loads.append(os.getloadavg()[0])
            problems += [f"{one.case}: {each}" for each in one.problems]
    told = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "none"
    print(f"\n{len(loads)} rows, faults of {arguments.fault_s:g} s, {os.cpu_count()} cores, load average {told}")
    print("\n".join(problems) or "nothing that was acknowledged is lost, doubled or out of order")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
