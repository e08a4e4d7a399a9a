"""The process-level harness: real processes, files, sockets and clients, sequential faults, and the checkers.

A run starts a cluster of nodes of both roles, with clients that write, read, commit and query (`tidelog.chaos.clients`)
while partitions move, and injects faults one after the other (`tidelog.chaos.faults`). After each it waits until every
partition acknowledges again. At the end all faults are healed, everything is read, and the history is checked
(`tidelog.simulation.checkers`). The run is bounded: no fault begins after `seconds`, every wait has a deadline, and all
processes are stopped in any case.

Entry: `run`.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tidelog.chaos.actors import ActorThread
from tidelog.chaos.bank import BankThread
from tidelog.chaos.clients import TOPIC, ClientJournal, Clients
from tidelog.chaos.compacted import TableThread
from tidelog.chaos.faults import BUCKET_FAULTS, COORDINATOR_PARTITIONS, FAULTS, USUAL, ChaosCluster, OldRelease, World
from tidelog.chaos.faulty_s3 import FaultyS3
from tidelog.chaos.inside import Inside
from tidelog.chaos.report import Row, report, unexpected
from tidelog.chaos.s3_server import RunningS3, s3_server
from tidelog.chaos.serve_cluster import tidelog_json
from tidelog.chaos.tcp_proxy import Proxies
from tidelog.runtime.children import TIDELOG
from tidelog.runtime.errors import InvalidInput, TidelogError
from tidelog.runtime.progress import SECONDS
from tidelog.runtime.progress_bar import ProgressBar
from tidelog.simulation.checkers import Finding, Lag, check, lag_of

RECOVERY_S = 90.0
"""Maximum time from the end of a fault to a partition's next acknowledgement."""
SLOW_S = 10.0
"""If it takes longer, the nodes' log lines since the start of the fault are shown, at most this number per node:"""
SLOW_LINES = 40
MAX_UNEXPECTED = 5
"""Exceptions of a node's log that are shown."""
MOVE_EVERY_S = 3.0
NODES = 3
NO_BOUND = 1_000_000
"""Of rounds."""
INTERNAL_TOPICS = ("__transaction_state", "__consumer_offsets")
VALUE_BYTES = 300
FILLING_VALUE_BYTES = 6_000
"""Large enough to use up a WAL's spare files (8 MiB) within seconds."""

Say = Callable[[str], None]


class ChaosOptions(msgspec.Struct, kw_only=True):
    """The options of a run. `run` raises `InvalidInput` if they are inconsistent."""

    seconds: float = 60.0
    """Time after which no fault begins."""
    rounds: int = NO_BOUND
    faults: tuple[str, ...] = USUAL
    """Faults, used in turn in an order drawn from the seed."""
    seed: int = 1
    partitions: int = 12
    rate: float = 800.0
    """Records per second."""
    wal: str = "disk"
    s3: str = "embedded"
    """`embedded`, or the kind of server to start (`tidelog.chaos.s3_server.KINDS`)."""
    endpoint: RunningS3 | None = None
    """A running server, instead."""
    moves: bool = True
    """Whether partitions move during the run."""
    transactions: bool = True
    """Whether there are transactional clients. An older release serves none."""
    compaction: bool = True
    """Whether there is a compacted topic. An older release compacts none."""
    history: Path | None = None
    old_python: str = ""
    """An interpreter in whose environment an older release is installed, which some of the nodes run; empty: none."""


class ChaosReport(msgspec.Struct, kw_only=True):
    """The result of a run."""

    rows: list[Row]
    findings: list[Finding]
    problems: list[str]
    """Parts of the cluster that did not become idle, and nodes that ended unexpectedly."""
    acknowledged: int
    read: int
    operations: int
    moves: int
    rounds_compacted: int
    """Whole rounds of log compaction that nodes have logged."""
    worst_lag_s: float
    worst_lag: Lag | None
    replayed_bytes: list[int]
    """Bytes in each killed node's WAL on disk."""
    orphans: int
    """Orphans at the end, which were then deleted."""
    orphans_left: int
    """Orphans left after the deletion."""
    restarts: list[str]
    """Nodes that ended by themselves and were restarted."""
    starts: dict[str, int]
    """How often a node was started, by the version: `new` or `old`."""
    took_s: float

    @property
    def clean(self) -> bool:
        """Whether every promise was kept."""
        return not (self.findings or self.problems or self.orphans_left)


def run(options: ChaosOptions, say: Say) -> ChaosReport:
    """Run everything; `say` gets a line for each round. Raises `InvalidInput`, `NotFound`, `Unavailable`."""
    _check_options(options)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(ProgressBar(f"starting {NODES} nodes", unit=SECONDS))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidelog-chaos-")))
        proxies = stack.enter_context(Proxies())
        bucket, section = _bucket(options, scratch, proxies, stack)
        directory = scratch / "cluster"
        directory.mkdir()
        small = "disk-full" in options.faults
        old = None
        if options.old_python:
            old = OldRelease(options.old_python, random.Random(f"versions {options.seed}"))
        cluster = ChaosCluster(directory, proxies, section, options.wal, nodes=NODES, small_disks=small, old=old)
        stack.callback(cluster.close)
        cluster.start()
        world = World(cluster, bucket, random.Random(options.seed))
        inside = Inside(cluster.members, directory / "secret", directory, section)
        return _ChaosRun(options, world, inside, _ChaosShown(say, bar), began_s).all()


def _check_options(options: ChaosOptions) -> None:
    unknown = [name for name in options.faults if name not in FAULTS]
    if unknown or not options.faults:
        raise InvalidInput(f"there is no fault {', '.join(unknown)}", hint=f"there are {', '.join(FAULTS)}")
    if options.old_python and shutil.which(options.old_python) is None:
        raise InvalidInput(
            f"there is no interpreter {options.old_python}",
            hint="`python localstack/install.py previous_release` installs one, and prints its path",
        )
    need = BUCKET_FAULTS.intersection(options.faults)
    if need and options.s3 == "embedded" and options.endpoint is None:
        raise InvalidInput(f"{', '.join(sorted(need))} needs an S3 server", hint="add --s3 minio, or --s3-endpoint")


def _bucket(
    options: ChaosOptions, scratch: Path, proxies: Proxies, stack: contextlib.ExitStack
) -> tuple[FaultyS3[Any] | None, dict[str, Any]]:
    server = options.endpoint
    if server is None and options.s3 != "embedded":
        server = stack.enter_context(s3_server(options.s3, scratch / "s3"))
    if server is None:
        return None, {}
    proxy = FaultyS3(server, remembers=False)
    proxies.run(proxy.__aenter__())
    stack.callback(lambda: proxies.run(proxy.__aexit__()))
    return proxy, {
        "endpoint": proxy.server.endpoint,
        "bucket": f"chaos-{uuid.uuid4().hex[:16]}",
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
    }


def _shown(options: ChaosOptions) -> dict[str, Any]:
    """The options for the history's header, without the address and keys of a server."""
    shown = {name: getattr(options, name) for name in ("seconds", "rounds", "seed", "partitions", "rate", "wal", "s3")}
    flags = {name: getattr(options, name) for name in ("moves", "transactions", "compaction")}
    return {**shown, "faults": list(options.faults), **flags}


class _ChaosShown(NamedTuple):
    """Who is told how it goes."""

    say: Say
    bar: ProgressBar


class _ChaosRun:
    """A run on a started cluster."""

    def __init__(self, options: ChaosOptions, world: World, inside: Inside, told: _ChaosShown, began_s: float) -> None:
        self._options = options
        self._world = world
        self._inside = inside
        self._inside_findings: list[Finding] = []
        self._say, self._bar = told
        self._began_s = began_s
        about = {"harness": "tidelog chaos", **_shown(options)}
        self._journal = ClientJournal(world.cluster.bootstrap, options.partitions, about)
        self._value_bytes = FILLING_VALUE_BYTES if "disk-full" in options.faults else VALUE_BYTES
        self._problems: list[str] = []
        self._moves = 0
        self._threads: list[ActorThread] = []
        if options.transactions and not options.old_python:
            self._threads.append(BankThread(self._journal, options.seed))
        if options.compaction and not options.old_python:
            self._threads.append(TableThread(self._journal, options.seed))

    def all(self) -> ChaosReport:
        self._make_topic()
        try:
            with Clients(self._journal, rate=self._options.rate, value_bytes=self._value_bytes) as clients:
                self._wait_acknowledged(0)
                for thread in self._threads:
                    thread.start()
                with self._moving():
                    self._rounds(clients)
                self._bar.describe("healing, and ending the clients")
                self._heal()
                for thread in self._threads:
                    thread.end()
                for thread in self._threads:
                    self._problems += thread.finish()
                self._problems += clients.finish()
            self._bar.describe("checking every promise")
            return self._judge()
        finally:
            if self._options.history is not None:
                self._journal.history.save(self._options.history)

    def _make_topic(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._world.cluster.bootstrap, "log_level": 0})
        deadline = time.monotonic() + 60
        while True:
            try:
                admin.create_topics([NewTopic(TOPIC, num_partitions=self._options.partitions)])[TOPIC].result(30)
            except KafkaException:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def _wait_acknowledged(self, since_us: int) -> None:
        """Wait until every partition has an acknowledgement after this time. Raises `AssertionError`."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            missing = [at for at, last_us in enumerate(self._journal.acknowledged_us) if last_us <= since_us]
            if not missing:
                return
            assert time.monotonic() < deadline, f"partitions {missing} acknowledge nothing for {RECOVERY_S:g} s"
            time.sleep(0.02)

    def _rounds(self, clients: Clients) -> None:
        options = self._options
        began_s = time.monotonic()  # not earlier: a slow start must leave time for a fault
        if options.rounds < NO_BOUND:
            with ProgressBar("round 1", options.rounds, "rounds") as bar:
                self._rounds_from(began_s, clients, bar)
            return
        whole_s = max(1, round(options.seconds))
        with ProgressBar("round 1", whole_s, SECONDS) as bar:
            bar.follow(lambda: min(whole_s, int(time.monotonic() - began_s)))
            self._rounds_from(began_s, clients, bar)

    def _rounds_from(self, began_s: float, clients: Clients, bar: ProgressBar) -> None:
        options, rng = self._options, self._world.rng
        names: list[str] = []
        for number in range(options.rounds):
            if time.monotonic() - began_s > options.seconds or self._problems:
                return
            if not names:
                names = rng.sample(options.faults, len(options.faults))
            bar.update(number)
            bar.describe(f"round {number + 1}, {names[-1]}")
            try:
                self._round(number, names.pop())
            except AssertionError as error:
                self._problems.append(f"round {number + 1}: {error}")
            self._problems += [*clients.problems(), *self._world.cluster.problems]
            for thread in self._threads:
                self._problems += thread.problems()

    def _round(self, number: int, name: str) -> None:
        journal, cluster = self._journal, self._world.cluster
        time.sleep(self._world.rng.uniform(0.2, 1.0))  # the random time of the fault, not a wait for a condition
        logged = {node: len(node.output) for node in cluster.nodes.values()}
        op = journal.begin("fault", 0, name=name)
        try:
            with FAULTS[name](self._world) as target:
                op.target = target
        finally:
            journal.end(op, "ok")
        cluster.revive()
        self._wait_acknowledged(op.ended_us)
        acknowledged_us = journal.now_us()
        self._look(f"after round {number + 1}", self._inside.look)
        took_s, back_s = (op.ended_us - op.began_us) / 1e6, (acknowledged_us - op.ended_us) / 1e6
        self._say(f"round {number + 1}: {name} ({op.target}) for {took_s:.1f} s; all acknowledge {back_s:.2f} s later")
        if back_s > SLOW_S:
            for node, before in logged.items():
                for line in node.output[before:][:SLOW_LINES]:
                    self._say(f"    node {node.node_id}: {line}")

    def _look(self, when: str, look: Callable[[], list[Finding]]) -> None:
        try:
            self._inside_findings += look()
        except (TimeoutError, TidelogError) as error:
            self._problems.append(f"{when}, the look at the controllers and the bucket: {error!r}")

    def _heal(self) -> None:
        """Undo what a failed round may have left."""
        now_us = self._journal.now_us()
        try:
            self._world.cluster.revive()
            self._wait_acknowledged(now_us)
        except AssertionError as error:
            self._problems.append(f"at the end: {error}")
        self._journal.history.note("heal", 0, self._journal.now_us())

    def _any_partition(self, rng: random.Random) -> str:
        """A partition to move: of the topic, of the actors', or of those that transactions are coordinated by."""
        places = [those for thread in self._threads if (those := thread.places())]
        if not places or rng.random() < 0.5:
            return f"{TOPIC}:{rng.randrange(self._options.partitions)}"
        internal = [f"{name}:{index}" for name in INTERNAL_TOPICS for index in range(COORDINATOR_PARTITIONS)]
        return rng.choice(rng.choice((*places, internal)))

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Move partitions between random nodes meanwhile; refused moves are not counted."""
        stopping, rng = threading.Event(), random.Random(self._options.seed)

        def move() -> None:
            while not stopping.wait(MOVE_EVERY_S):
                to = rng.choice(list(self._world.cluster.nodes))
                command = [*TIDELOG, "partition", "move", self._any_partition(rng), "--to", str(to)]
                command += ["--no-wait", "--bootstrap", rng.choice(self._world.cluster.bootstrap.split(","))]
                with contextlib.suppress(subprocess.TimeoutExpired):  # the requested node may be paused
                    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
                    self._moves += done.returncode == 0

        thread = threading.Thread(target=move, daemon=True, name="chaos-moves")
        if self._options.moves:
            thread.start()
        try:
            yield
        finally:
            stopping.set()
            if self._options.moves:
                thread.join(30)

    def _judge(self) -> ChaosReport:
        history = self._journal.history
        history.ops.sort(key=lambda op: op.index)
        findings, lag = check(history), lag_of(history)
        orphans = self._clean(dry_run=False)
        self._look("at the end", self._inside.look)
        self._look("at the end", self._inside.look_at_bucket)
        self._note_unexpected()
        return ChaosReport(
            rows=report(history, findings),
            findings=[*findings, *self._inside_findings, *(one for each in self._threads for one in each.findings)],
            problems=self._problems,
            acknowledged=sum(len(op.values) for op in history.ops if op.kind == "send" and op.ok),
            read=sum(len(op.values) for op in history.ops if op.kind == "poll"),
            operations=len(history),
            moves=self._moves,
            rounds_compacted=sum(
                "log compacted" in line for node in self._world.cluster.nodes.values() for line in node.output
            ),
            worst_lag_s=lag.lag_us / 1e6 if lag is not None else 0.0,
            worst_lag=lag,
            replayed_bytes=self._world.replayed,
            orphans=orphans,
            orphans_left=self._clean(dry_run=True) if orphans else 0,
            restarts=self._world.cluster.ended,
            starts=self._world.cluster.starts,
            took_s=time.monotonic() - self._began_s,
        )

    def _clean(self, *, dry_run: bool) -> int:
        """Return the number of orphans; unless it is a dry run they are deleted."""
        flag = "--dry-run" if dry_run else "--yes"
        bootstrap = self._world.cluster.bootstrap.split(",")[0]
        found = tidelog_json(bootstrap, "object", "clean", "--min-age", "0", flag)
        return len(found["orphans"]) if found is not None else 0

    def _note_unexpected(self) -> None:
        """Exceptions in the nodes' logs; what an older release logs is not this one's."""
        if self._options.old_python:
            return
        for node in self._world.cluster.nodes.values():
            lines = unexpected(node.output)
            self._problems += [f"node {node.node_id} has logged: {line}" for line in lines[:MAX_UNEXPECTED]]
