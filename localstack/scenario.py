#!/usr/bin/env python3
"""Run a cluster through scaling, moves and failures under load on a real S3 server, without containers, and check it.

    python localstack/scenario.py --bucket {minio|localstack} [--rounds 1] [--seconds 5] [--mb-per-s 4]

It starts the server (`serve.py`), `tidelog up --brokers 3 --wal s3` on a separate bucket, an idempotent producer on all
partitions at a constant rate, and a consumer group of two. Under that load each round

1. moves partitions through Kafka's AlterPartitionReassignments (kafka-python), and others by `tidelog partition move`;
2. adds two brokers and rebalances: 3 → 5;
3. drains the three oldest brokers in parallel and removes them: 5 → 2. After the first round their nodes run only
   controllers. With `--follow-signal` it is a small autoscaler: the capacity of a broker is set low, so that the load
   needs five; one is added while `/scale` requests more; then the load is reduced, and one is drained and removed while
   fewer are needed;
4. kills a broker (`kill -9`), waits until the other has taken over and the dead one has restarted, and rebalances;
5. kills the active controller, and creates a topic and moves a partition meanwhile.

At the end: every acknowledged record exists once, in order, at its offset; the group has read them all, and its
committed offsets never decreased; `tidelog object verify` and `tidelog status` find no problem; removed brokers left no
files; everything stops on request, and no process is left.

A row of the table is a step: its duration (without the following `--seconds` of load), the number of partitions with a
new leader, the longest time that each partition was without an acknowledgement (the median partition, the 99th
percentile, the worst) and without a record for the group (the worst), errors of clients.

Exit codes: 0 all checks passed; 1 a check failed, or a step timed out; 3 the server cannot be installed on this
machine. Every wait has a deadline. Needs the `dev` extra.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidelog.chaos.report import quantile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient
from kafka.errors import KafkaError

from tests.e2e.backends import create_topic, s3_flags
from tests.harness.controller_kills import Controllers, make_topic
from tests.harness.failover import ask
from tests.support.cluster_process import UpCluster, eventually, up_cluster
from tests.support.group_load import GroupLoad
from tests.support.partition_load import PartitionLoad
from tests.support.s3_servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, Missing, S3Server, ServerPool
from tidelog.cli import output
from tidelog.cli.client import http_json
from tidelog.runtime.errors import TidelogError

TOPIC = "orders"
OFFSETS = "__consumer_offsets"
RECORD_BYTES = 2_048
MANY = 5
"""Maximum number of brokers."""
SLOW = 0.07
"""The share of the load that remains for scaling down."""
COMMAND_TIMEOUT_S = 120.0
DEADLINE_S = 90.0
END_S = 5.0
"""Time-out for the end of a process after a stop request or the death of its parent."""
MISSING = 3
PR_SET_CHILD_SUBREAPER = 36
EXPECTED = (AssertionError, TidelogError, KafkaException, KafkaError, subprocess.SubprocessError, OSError)
"""Exceptions that end a run as a failure with its table; any other is a bug of this script."""


@dataclass
class Step:
    """A row of the table."""

    name: str
    took_s: float = 0.0
    moved: int = 0
    producer_s: list[float] = field(default_factory=list)
    consumer_s: float = 0.0
    errors: int = 0
    note: str = ""

    def cells(self) -> list[str]:
        """The printed cells; stalls in milliseconds."""
        quantiles = [quantile(self.producer_s, q) for q in (0.5, 0.99, 1.0)]
        stalls = [f"{one * 1000:.0f}" for one in quantiles if one is not None]
        measured = [str(self.moved), *stalls, f"{self.consumer_s * 1000:.0f}", str(self.errors)] if stalls else [""] * 6
        return [self.name, f"{self.took_s:.1f}", *measured, self.note]


HEADERS = ["STEP", "TOOK-S", "MOVED", "STALL-P50", "P99", "MAX", "READ-GAP", "ERRORS", "NOTE"]


class Scene:
    """The running cluster, the load on it, and the table so far."""

    def __init__(self, up: UpCluster, load: PartitionLoad, group: GroupLoad, options: argparse.Namespace) -> None:
        self.up = up
        self.load = load
        self.group = group
        self.options = options
        self.steps: list[Step] = []
        self.removed: list[int] = []

    # --- state -----------------------------------------------------------------------------------------------------

    def _layout(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.up.data_dir / "cluster.json").read_text())
        return found

    def brokers(self) -> list[int]:
        """The broker ids, the oldest first."""
        layout = self._layout()
        return sorted(layout["brokers"] or map(int, layout["kafka_ports"]))

    def bootstrap(self, spare: int = 0) -> str:
        """The brokers' addresses, without that of `spare`."""
        ports = self._layout()["kafka_ports"]
        return ",".join(f"127.0.0.1:{ports[str(each)]}" for each in self.brokers() if each != spare)

    def leaders(self, topic: str = TOPIC) -> dict[int, int | None]:
        """The leader of each partition."""
        rows = ask(self.bootstrap(), f"/partitions?topic={topic}", lambda found: found["partitions"], DEADLINE_S)[
            "partitions"
        ]
        return {row["partition"]: row["leader"] for row in rows}

    def controllers(self) -> Controllers:
        """The addresses of the quorum, for direct requests."""
        ports = self._layout()["controllers"]
        addresses = {int(node): f"127.0.0.1:{port}" for node, port in ports.items()}
        return Controllers(addresses, self.up.data_dir / "cluster.secret")

    # --- actions ---------------------------------------------------------------------------------------------------

    def tidelog(self, *arguments: str, asks: bool = True, ok: Sequence[int] = (0,)) -> str:
        """Return the output of a command. Raises `AssertionError` if it fails."""
        return finished(self.begin(*arguments, asks=asks), ok)

    def begin(self, *arguments: str, asks: bool = True) -> subprocess.Popen[str]:
        """Start a command in the background; `asks`: it needs a broker's address."""
        where = ["--bootstrap", self.bootstrap()] if asks else []
        command = [sys.executable, "-m", "tidelog", *arguments, *where]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def reassign(self, wanted: dict[int, int]) -> None:
        """Move partitions by a third-party client: AlterPartitionReassignments, then List until none is left."""
        with closing(KafkaAdminClient(bootstrap_servers=self.bootstrap().split(","))) as admin:
            targets = {TopicPartition(TOPIC, index): [to] for index, to in wanted.items()}
            refused = {one: error for one, error in admin.alter_partition_reassignments(targets).items() if error}
            assert not refused, refused
            eventually(lambda: not admin.list_partition_reassignments(), DEADLINE_S)
        self.wait_led(wanted)

    def share(self) -> None:
        """Distribute the topic evenly over the brokers, by `tidelog partition move --file`."""
        brokers, found = self.brokers(), self.leaders()
        wanted = {index: brokers[index % len(brokers)] for index in found}
        rows = [
            {"topic": TOPIC, "partition": index, "replicas": [to]} for index, to in wanted.items() if found[index] != to
        ]
        plan = self.up.data_dir.parent / "plan.json"
        plan.write_text(json.dumps({"version": 1, "partitions": rows}))
        if rows:
            self.tidelog("partition", "move", "--file", str(plan))
        self.wait_led(wanted)

    def wait_led(self, wanted: dict[int, int]) -> None:
        """Wait until the partitions are on their target brokers."""
        eventually(lambda: wanted.items() <= self.leaders().items(), DEADLINE_S)

    def slow_down(self) -> None:
        """Reduce the load to what two brokers carry easily, by `scale_flags`."""
        self.load.pause_s = pause_s(self.options) / SLOW

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        """Measure a row of the table: the block, and the following `--seconds` of load."""
        row = Step(name)
        self.steps.append(row)
        before = self._places()
        errors = len(self.load.errors) + len(self.group.facts.problems)
        self.load.begin_round()
        self.group.begin_round()
        began = time.monotonic()
        try:
            yield row
            row.took_s = time.monotonic() - began
            self.load.wait_grown(5, DEADLINE_S)
            time.sleep(self.options.seconds)  # the duration of the measurement, not a wait for a condition
        finally:
            row.took_s = row.took_s or time.monotonic() - began
            row.producer_s = list(self.load.gaps_s().values())
            row.consumer_s = max(self.group.gaps_s().values())
            row.errors = len(self.load.errors) + len(self.group.facts.problems) - errors
        row.moved = sum(leader != before.get(each) for each, leader in self._places().items())
        print("  ".join([f"{name}:", *row.cells()[1:]]), file=sys.stderr, flush=True)

    def _places(self) -> dict[tuple[str, int], int | None]:
        return {(topic, index): to for topic in (TOPIC, OFFSETS) for index, to in self.leaders(topic).items()}


def finished(process: subprocess.Popen[str], ok: Sequence[int] = (0,)) -> str:
    """Return the output of a background command. Raises `AssertionError` if it failed, `TimeoutExpired`."""
    try:
        said, errors = process.communicate(timeout=COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    assert process.returncode in ok, f"{process.args!r} ended with {process.returncode}: {said}{errors}"
    return said


def pause_s(options: argparse.Namespace) -> float:
    """The interval between two records of a partition, for `--mb-per-s` in total."""
    return float(options.partitions * RECORD_BYTES / (options.mb_per_s * 1e6))


def scale_flags(options: argparse.Namespace) -> list[str]:
    """The capacity of a broker: so low that half of the load needs five at a target of 70 %; and windows of seconds.

    Half of the load, because a busy machine may not carry more. `max_brokers` bounds the brokers for the whole load.
    """
    settings = {
        "broker_bytes_in_per_s": int(0.5 * options.mb_per_s * 1e6 / (0.7 * (MANY - 0.3))),
        "broker_bytes_out_per_s": 10**12,
        "broker_requests_per_s": 10**9,
        "broker_cpu_percent": 10**6,
        "min_brokers": 2,
        "max_brokers": MANY,
        "up_window_ms": 2_000,
        "down_window_ms": 4_000,
    }
    return [part for key, value in settings.items() for part in ("--set", f"scale.{key}={value}")]


# --- the steps -------------------------------------------------------------------------------------------------------


def quiet(scene: Scene) -> None:
    """No action: measure the gaps of the load alone."""
    with scene.step("load alone"):
        pass


def reassignments(scene: Scene) -> None:
    """Move half of the partitions to the next broker, a quarter by each method."""
    brokers = scene.brokers()
    following = dict(zip(brokers, [*brokers[1:], brokers[0]], strict=True))
    placed = sorted(scene.leaders().items())
    count = max(1, len(placed) // 4)
    with scene.step("AlterPartitionReassignments"):
        scene.reassign({index: following[at] for index, at in placed[:count] if at is not None})
    target = brokers[-1]
    chosen = [index for index, at in placed[count:] if at != target][:count]
    with scene.step("tidelog partition move"):
        scene.tidelog("partition", "move", *(f"{TOPIC}:{index}" for index in chosen), "--to", str(target))


def scale_up(scene: Scene) -> None:
    """3 → 5."""
    before = len(scene.brokers())
    with scene.step(f"brokers {before} → {before + 2}") as row:
        for _ in range(2):
            if scene.options.follow_signal:
                row.note = signalled(scene, lambda found: found["wanted"] > found["brokers"])
            scene.tidelog("broker", "add", "--data-dir", str(scene.up.data_dir), asks=False)
        began = time.monotonic()
        scene.share()
        row.note = row.note or f"shared in {time.monotonic() - began:.1f} s"


def scale_down(scene: Scene) -> None:
    """5 → 2: drain the oldest in parallel, or one by one with `--follow-signal`."""
    brokers = scene.brokers()
    leaving = brokers[:-2]
    with scene.step(f"brokers {len(brokers)} → 2") as row:
        if scene.options.follow_signal:
            scene.slow_down()
            for each in leaving:
                row.note = signalled(scene, lambda found: found["wanted"] < found["brokers"])
                scene.tidelog("broker", "drain", str(each))
                remove(scene, each)
        else:
            began = time.monotonic()
            drains = [scene.begin("broker", "drain", str(each)) for each in leaving]
            for drain in drains:
                finished(drain)
            row.note = f"drained in {time.monotonic() - began:.1f} s"
            for each in leaving:
                remove(scene, each)
        eventually(lambda: alive(scene) == scene.brokers(), DEADLINE_S)
    if scene.options.follow_signal:
        found = json.loads(scene.tidelog("broker", "wanted", "--format", "json"))
        assert found["wanted"] == found["brokers"] == 2, found


def signalled(scene: Scene, holds: Callable[[Any], bool]) -> str:
    """Poll the number of brokers that the load needs until it requires an action; return the reason."""
    began = time.monotonic()
    found = ask(scene.bootstrap(), "/scale", holds, DEADLINE_S)
    return f"{found['wanted']} wanted after {time.monotonic() - began:.1f} s: {found['reason']}"


def remove(scene: Scene, broker: int) -> None:
    """Remove a drained broker, by a request to another one."""
    scene.removed.append(broker)
    command = ["broker", "remove", str(broker), "--data-dir", str(scene.up.data_dir)]
    finished(scene.begin(*command, "--bootstrap", scene.bootstrap(spare=broker), asks=False))


def alive(scene: Scene) -> list[int]:
    """The brokers that are alive according to the cluster."""
    rows = ask(scene.bootstrap(), "/brokers", lambda found: found["brokers"], DEADLINE_S)["brokers"]
    return sorted(row["id"] for row in rows if row["state"] == "alive")


def pid_of(scene: Scene, broker: int) -> int:
    """The pid of a broker, which only that broker reports."""
    rows = ask(scene.bootstrap(), "/brokers", lambda found: found["brokers"], DEADLINE_S)["brokers"]
    url = next(row["admin_url"] for row in rows if row["id"] == broker)
    return next(int(row["pid"]) for row in http_json(url, "/status")["nodes"] if row["id"] == broker)


def kill_broker(scene: Scene) -> None:
    """`kill -9` of a broker: the others take over its partitions, and it restarts empty."""
    victim = scene.brokers()[0]
    others = scene.bootstrap(spare=victim)
    with scene.step(f"kill -9 of broker {victim}") as row:
        pid = pid_of(scene, victim)
        died_ms = int(time.time() * 1000)
        os.kill(pid, signal.SIGKILL)

        def taken_over(found: Any) -> list[Any]:
            done: list[Any] = found["taken_over"]
            return [one for one in done if one["broker"] == victim and one["since_ms"] >= died_ms]

        done = taken_over(ask(others, "/failover", taken_over, DEADLINE_S))[-1]
        declared_s = (done["since_ms"] - died_ms) / 1000
        takeover_s = sum(done["steps_ms"].values()) / 1000
        placed = done["partitions_placed"]
        row.note = f"declared dead after {declared_s:.2f} s, {placed} partitions placed {takeover_s:.2f} s later"
        scene.load.wait_grown(1, DEADLINE_S)
        eventually(lambda: alive(scene) == scene.brokers(), DEADLINE_S)
    with scene.step("shared again"):
        scene.share()


def kill_controller(scene: Scene) -> None:
    """`kill -9` of the active controller; create a topic and move a partition meanwhile."""
    admin = AdminClient({"bootstrap.servers": scene.bootstrap(), "log_level": 0})
    index, leader = min((index, at) for index, at in scene.leaders().items() if at is not None)
    target = next(each for each in scene.brokers() if each != leader)
    with scene.step("kill -9 of the active controller") as row:
        asyncio.run(_kill_active(scene, row))
        made_s = make_topic(admin, f"made-{len(scene.steps)}")
        row.note += f", topic made {made_s:.2f} s later"
        scene.reassign({index: target})
        asyncio.run(_all_follow(scene))


async def _kill_active(scene: Scene, row: Step) -> None:
    controllers = scene.controllers()
    try:
        victim = await controllers.active()
        began = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        await controllers.active(other_than=victim["node"])
        row.note = f"controller {victim['node']}, another is active after {time.monotonic() - began:.2f} s"
    finally:
        await controllers.close()


async def _all_follow(scene: Scene) -> None:
    controllers = scene.controllers()
    try:
        await controllers.all_follow()
    finally:
        await controllers.close()


def back_to_three(scene: Scene) -> None:
    """Restore three brokers for the next round."""
    scene.load.pause_s = pause_s(scene.options)
    with scene.step("brokers 2 → 3"):
        scene.tidelog("broker", "add", "--data-dir", str(scene.up.data_dir), asks=False)
        scene.share()


# --- checks ----------------------------------------------------------------------------------------------------------


class Checks:
    """The checks and their problems."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed = 0

    def hold(self, what: str, problems: Sequence[str]) -> None:
        """Record the check `what`, passed if there are no problems."""
        self.failed += bool(problems)
        self.lines.append(f"{'FAILED' if problems else 'ok':<6}  {what}")
        self.lines += [f"        {problem}" for problem in problems[:10]]

    def run(self, what: str, check: Callable[[], Sequence[str]]) -> None:
        """Run and record a check that may time out."""
        try:
            problems = check()
        except EXPECTED as error:
            problems = [f"{type(error).__name__}: {error}"]
        self.hold(what, problems)


def verify(scene: Scene, checks: Checks) -> None:
    """Check the running cluster. The load has ended, the group has not."""
    load, facts = scene.load, scene.group.facts
    checks.run(
        f"{load.count():,} acknowledged records are there once, in order, at their offsets; no produce error",
        lambda: load.verify(scene.bootstrap()),
    )

    def read() -> Sequence[str]:
        scene.group.wait_read(load.ends())
        return facts.problems

    checks.run("the group has read and committed all of them, in order; committed offsets never went back", read)
    checks.lines.append(
        f"        {facts.records:,} deliveries, {facts.repeated:,} of them again; {facts.commits:,} commits,"
        f" looked {facts.looks:,} times"
    )
    checks.run("tidelog object verify", lambda: [scene.tidelog("object", "verify")][:0])
    checks.run("tidelog status --format json", lambda: unhealthy(scene))
    left = [str(path) for each in scene.removed for path in left_files(scene, each)]
    checks.hold(f"{len(scene.removed)} removed brokers left no files", left)


def left_files(scene: Scene, broker: int) -> list[Path]:
    """Return the remaining files of removed brokers, except those of a controller on the node."""
    node = scene.up.data_dir / f"node-{broker}"
    kept = str(broker) in json.loads((scene.up.data_dir / "cluster.json").read_text())["controllers"]
    return [path for path in ([node / "wal"] if kept else [node]) if path.exists()]


def unhealthy(scene: Scene) -> list[str]:
    """Return the problems of `tidelog status`, once all work has completed."""

    def settled() -> list[str]:
        document = json.loads(scene.tidelog("status", "--format", "json", ok=(0, 10)))
        problems = list(document["problems"])
        brokers = sorted(node["id"] for node in document["nodes"] if "broker" in node["roles"])
        controllers = sum("controller" in node["roles"] for node in document["nodes"])
        if brokers != scene.brokers() or controllers != 3:
            problems.append(f"there are brokers {brokers} and {controllers} controllers")
        return problems

    found: list[str] = []

    def healthy() -> bool:
        found[:] = settled()
        return not found

    with suppress(AssertionError):
        eventually(healthy, 30)
    return found


def children() -> list[int]:
    """The child processes, including orphans of children (`PR_SET_CHILD_SUBREAPER`)."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found


def processes_left(spared: set[int]) -> list[str]:
    """Reap ended processes, return those still running after a moment, and kill them."""
    deadline = time.monotonic() + END_S
    while left := {pid for pid in set(children()) - spared if os.waitpid(pid, os.WNOHANG) == (0, 0)}:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    lines = []
    for pid in left:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        lines.append(f"process {pid} is left: {line}")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return lines


# --- main program ----------------------------------------------------------------------------------------------------


def play(scene: Scene) -> None:
    """Run all rounds."""
    quiet(scene)
    for number in range(scene.options.rounds):
        if number:
            back_to_three(scene)
        reassignments(scene)
        scale_up(scene)
        scale_down(scene)
        kill_broker(scene)
        kill_controller(scene)


def run(server: S3Server, options: argparse.Namespace, directory: Path) -> int:
    """Run the scenario on this server, print the results and return the exit code."""
    checks = Checks()
    steps: list[Step] = []
    spared = set(children())
    flags = ["--wal", "s3", *s3_flags(server), *(scale_flags(options) if options.follow_signal else [])]
    began = time.monotonic()
    try:
        with up_cluster(directory / "data", 3, flags) as up:
            try:
                create_topic(up.bootstrap, TOPIC, options.partitions)
                load = PartitionLoad(
                    up.bootstrap, TOPIC, options.partitions, pause_s(options), value_bytes=RECORD_BYTES
                )
                with GroupLoad(up.bootstrap, TOPIC, options.partitions) as group:
                    scene = Scene(up, load, group, options)
                    steps = scene.steps
                    with load:
                        load.wait_grown()
                        group.wait_assigned()
                        steps.append(Step("start", time.monotonic() - began, note="3 brokers, 3 controllers"))
                        play(scene)
                    verify(scene, checks)
            except BaseException:
                print(up.tail(40), file=sys.stderr)
                raise
            checks.run("SIGTERM ends it in good order", lambda: [f"exit code {code}"] if (code := up.stop()) else [])
    except EXPECTED as error:
        checks.hold("every step comes about", [f"{type(error).__name__}: {error}"])
    checks.hold("no process is left", processes_left(spared))
    load_average = os.getloadavg()
    print(
        f"{server.kind}, {options.rounds} round(s), {options.partitions} partitions, {options.mb_per_s:g} MB/s in"
        f" records of {RECORD_BYTES} bytes; load average {load_average[0]:.1f} on {os.cpu_count()} cores; stalls and"
        " gaps in ms\n"
    )
    print(output.table(HEADERS, [step.cells() for step in steps], right=HEADERS[1:-1]))
    print("\n" + "\n".join(checks.lines))
    return 1 if checks.failed else 0


@contextmanager
def s3_server(options: argparse.Namespace, directory: Path) -> Iterator[S3Server]:
    """Yield the given kind of server, or one that is already running. Raises `Missing`."""
    if options.endpoint:
        yield S3Server(options.bucket, options.endpoint, options.access_key, options.secret_key)
        return
    with closing(ServerPool(directory, shared=False)) as pool:
        yield pool.get(options.bucket)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bucket", choices=("minio", "localstack"), default="minio", help="the S3 server")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long the load goes on after each step")
    parser.add_argument("--mb-per-s", type=float, default=4.0, help="what is produced")
    parser.add_argument("--partitions", type=int, default=24)
    parser.add_argument("--follow-signal", action="store_true", help="add and remove brokers as `/scale` wants it")
    parser.add_argument("--endpoint", default="", help="of such a server that runs already")
    parser.add_argument("--access-key", default=ACCESS_KEY_ID)
    parser.add_argument("--secret-key", default=SECRET_ACCESS_KEY)
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.partitions < 4 or options.mb_per_s <= 0 or options.seconds < 0:
        parser.error("at least one round, four partitions, and some load")
    return options


def main() -> int:
    options = parse()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that everything is stopped
    with tempfile.TemporaryDirectory(prefix="tidelog-scenario-") as scratch:
        try:
            with s3_server(options, Path(scratch)) as server:
                return run(server, options, Path(scratch))
        except Missing as error:
            print(f"missing: {error}", file=sys.stderr)
            return MISSING
        finally:
            processes_left(set())


if __name__ == "__main__":
    sys.exit(main())
