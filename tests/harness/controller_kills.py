"""`kill -9` of the active controller under load, again and again; then every promise is checked.

Load: one idempotent producer over many partitions of three brokers, a writer of controller commands that take a
counted id each, and in each round a topic that is created while there is no controller. Measured in each round:

- the time from the kill until another controller says that it is active (asked every 10 ms);
- the longest time that any partition was without an acknowledgement;
- the time until a command was answered, and until the topic was made.

At the end: no produce error; every acknowledged record at its offset, none twice, all in order; each topic there
once; each command took effect exactly once.

Controllers stand alone, so that no broker dies; with `--embedded` it is `tidelog up --brokers 3`, and a broker dies
with the controller: then the gaps are those of a broker's restart.

    python -m tests.harness.controller_kills --rounds 100 [--embedded] [--partitions 24]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from tests.support.cluster_process import ServeCluster, UpCluster, serve_cluster, up_cluster
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.report import quantile
from tidelog.controller.client.client import ClientTiming, ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.connection import RpcChannel
from tidelog.controller.rpc.handshake import NO_NODE, Credentials
from tidelog.controller.rpc.secret import read_secret
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.network import TcpNetwork

TOPIC = "load"
POLL_S = 0.01
TTL_MS = 24 * 3_600_000
"""Nobody else prepares ids for so long: by it the writer's ids are told from those of uploads."""
LONG_MS = TTL_MS // 2
MADE_PARTITIONS = 3


class Controllers:
    """The controllers of a running cluster, asked directly."""

    def __init__(self, addresses: dict[int, str], secret_file: Path) -> None:
        self.credentials = Credentials(read_secret(secret_file), NO_NODE)
        self.addresses = {node_id: split_address(address) for node_id, address in addresses.items()}
        self._channels = {
            node_id: RpcChannel([address], TcpNetwork(), self.credentials)
            for node_id, address in self.addresses.items()
        }

    async def status(self, node_id: int) -> dict[str, Any] | None:
        """What it says of itself; None: it does not answer."""
        try:
            raw = await self._channels[node_id].call("status", None, 0.5)
        except TidelogError:
            return None
        return msgspec.msgpack.decode(raw, type=dict[str, Any])

    async def active(self, other_than: int = 0, timeout_s: float = 60.0) -> dict[str, Any]:
        """The status of the active one."""
        others = [node_id for node_id in self.addresses if node_id != other_than]
        async with asyncio.timeout(timeout_s):
            while True:
                for found in await asyncio.gather(*map(self.status, others)):
                    if found is not None and found["active"]:
                        return found
                await asyncio.sleep(POLL_S)

    async def all_follow(self, timeout_s: float = 60.0) -> None:
        """Until every controller answers and knows the leader."""
        async with asyncio.timeout(timeout_s):
            while True:
                found = await asyncio.gather(*map(self.status, self.addresses))
                if all(each is not None and each["leader"] for each in found):
                    return
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Drop the connections."""
        for channel in self._channels.values():
            await channel.close()


class Commands:
    """Takes counted ids one after the other, and notes how long none was given."""

    def __init__(self, client: ControllerClient) -> None:
        self._client = client
        self.ids: list[int] = []
        self.last_s = time.monotonic()
        self.longest_s = 0.0
        self.stopping = False

    async def run(self) -> None:
        """Until `stopping`."""
        while not self.stopping:
            self.ids.append(await self._client.prepare_objects(1, TTL_MS))
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self.last_s)
            self.last_s = now
            await asyncio.sleep(0.05)

    async def grown(self, by: int) -> None:
        """Until so many more were answered."""
        target = len(self.ids) + by
        async with asyncio.timeout(60):
            while len(self.ids) < target:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@dataclass
class Figures:
    """One value in seconds for each round."""

    elected: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    gap_median: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    command: list[float] = field(default_factory=list)
    topic: list[float] = field(default_factory=list)


@dataclass
class Report:
    """What a run found."""

    rounds: int
    mode: str
    figures: Figures = field(default_factory=Figures)
    acknowledged: int = 0
    commands: int = 0
    topics: int = 0
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The table."""
        figures = self.figures
        rows = (
            ("kill to a new active controller", figures.elected),
            ("longest gap between two commands", figures.command),
            ("topic made while there is none", figures.topic),
            ("acknowledgements: gap, worst partition", figures.gap),
            ("acknowledgements: gap, median partition", figures.gap_median),
            ("  the same, worst, without a kill", figures.quiet),
        )
        lines = [f"{self.rounds} rounds, {self.mode}", "", f"{'seconds':<42}{'p50':>7}{'p99':>7}{'max':>7}"]
        for label, values in rows:
            lines.append(f"{label:<42}" + "".join(f"{quantile(values, q) or 0.0:>7.2f}" for q in (0.5, 0.99, 1.0)))
        lines += [
            "",
            f"records acknowledged                      {self.acknowledged}",
            f"commands answered                         {self.commands}",
            f"topics made                               {self.topics}",
            f"produce errors, lost, doubled, disordered {len(self.problems)}",
        ]
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems[:10])])


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[tuple[ServeCluster, dict[int, str], Path]]:
    """Three controllers and three brokers, six processes."""
    with serve_cluster(directory, controllers=3, brokers=3) as cluster:
        yield cluster, cluster.members, directory / "secret"


@contextlib.contextmanager
def embedded(directory: Path) -> Iterator[tuple[UpCluster, dict[int, str], Path]]:
    """`tidelog up --brokers 3`."""
    with up_cluster(directory, brokers=3) as cluster:
        ports = json.loads((directory / "cluster.json").read_text())["controllers"]
        addresses = {int(node_id): f"127.0.0.1:{port}" for node_id, port in ports.items()}
        yield cluster, addresses, directory / "cluster.secret"


def make_topic(admin: AdminClient, name: str) -> float:
    """Seconds until it is there. A metadata operation may fail and be asked again; that must not make it twice."""
    began = time.monotonic()
    while True:
        try:
            admin.create_topics([NewTopic(name, num_partitions=MADE_PARTITIONS)], request_timeout=20)[name].result(30)
        except KafkaException as error:
            if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                assert time.monotonic() - began < 60, f"{name} cannot be made: {error}"
                time.sleep(0.05)
                continue
        return time.monotonic() - began


class Run:
    """One run over a started cluster."""

    def __init__(
        self, cluster: ServeCluster | UpCluster, controllers: Controllers, report: Report, rng: random.Random
    ) -> None:
        self._cluster = cluster
        self._controllers = controllers
        self._report = report
        self._rng = rng
        self._admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})

    async def rounds(self, partitions: int) -> None:
        """All of them, and the check."""
        report = self._report
        await asyncio.to_thread(
            self._admin.create_topics([NewTopic(TOPIC, num_partitions=partitions)])[TOPIC].result, 60
        )
        client = ControllerClient(
            list(self._controllers.addresses.values()),
            TcpNetwork(),
            SystemClock(),
            self._rng,
            timing=ClientTiming(60.0),
            credentials=self._controllers.credentials,
        )
        await client.start()
        commands = Commands(client)
        writer = asyncio.create_task(commands.run())
        load = PartitionLoad(self._cluster.bootstrap, TOPIC, partitions)
        with load:
            try:
                for number in range(report.rounds):
                    await self._round(number, load, commands)
            finally:
                commands.stopping = True
                await writer
        report.acknowledged = load.count()
        report.problems += await asyncio.to_thread(load.verify, self._cluster.bootstrap)
        await self._check_commands(client, commands)
        await client.close()

    async def _round(self, number: int, load: PartitionLoad, commands: Commands) -> None:
        figures = self._report.figures
        await asyncio.to_thread(load.wait_grown, 5)
        load.begin_round()
        await asyncio.sleep(self._rng.uniform(0.8, 1.6))  # the random moment of the kill, not a wait for anything
        figures.quiet.append(max(load.gaps_s().values()))
        victim = await self._controllers.active()
        commands.longest_s = 0.0
        load.begin_round()
        killed = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        topic = asyncio.create_task(asyncio.to_thread(make_topic, self._admin, f"made-{number}"))
        await self._controllers.active(other_than=victim["node"])
        figures.elected.append(time.monotonic() - killed)
        figures.topic.append(await topic)
        await commands.grown(2)
        figures.command.append(commands.longest_s)
        if isinstance(self._cluster, ServeCluster):
            node = self._cluster.nodes[victim["node"]]
            await asyncio.to_thread(node.kill)
            node.start()
            await asyncio.to_thread(node.wait_ready)
        else:
            await asyncio.to_thread(
                self._cluster.wait_for_line, f"broker process {victim['node']} is ready again", 120.0
            )
        await self._controllers.all_follow()
        await asyncio.to_thread(load.wait_grown, 5)
        gaps = sorted(load.gaps_s().values())
        figures.gap.append(gaps[-1])
        figures.gap_median.append(gaps[len(gaps) // 2])
        print(
            f"round {number + 1}: active after {figures.elected[-1]:.2f} s, gap {gaps[-1]:.2f} s, before the kill"
            f" {figures.quiet[-1]:.2f} s, load {os.getloadavg()[0]:.1f}",
            file=sys.stderr,
            flush=True,
        )

    async def _check_commands(self, client: ControllerClient, commands: Commands) -> None:
        report = self._report
        await client.prepare_objects(1, 1)  # the image is then as new as every answer
        now_ms = time.time() * 1000
        held = {each.id for each in client.image.objects.values() if each.expires_ms > now_ms + LONG_MS}
        report.commands = len(commands.ids)
        if len(set(commands.ids)) != len(commands.ids):
            report.problems.append("one id was given twice")
        if held != set(commands.ids):
            report.problems.append(f"commands lost: {set(commands.ids) - held}, doubled: {held - set(commands.ids)}")
        wanted = {f"made-{number}": MADE_PARTITIONS for number in range(report.rounds)}
        found = {each.name: each.partitions for each in client.image.topics.values() if each.name.startswith("made-")}
        report.topics = len(found)
        if found != wanted or len(found) != sum(each.name in wanted for each in client.image.topics.values()):
            report.problems.append(f"topics differ: {set(found.items()) ^ set(wanted.items())}")


def run(rounds: int, directory: Path, *, is_embedded: bool = False, partitions: int = 24, seed: int = 1) -> Report:
    """The whole exercise; raises only when the cluster does not come back."""
    mode = "controllers in the brokers' processes" if is_embedded else "controllers alone"
    report = Report(rounds, f"{mode}, {partitions} partitions")

    async def main(cluster: ServeCluster | UpCluster, addresses: dict[int, str], secret: Path) -> None:
        controllers = Controllers(addresses, secret)
        try:
            await Run(cluster, controllers, report, random.Random(seed)).rounds(partitions)
        finally:
            await controllers.close()

    with (embedded if is_embedded else alone)(directory) as (cluster, addresses, secret):
        asyncio.run(main(cluster, addresses, secret))
    return report


def main() -> int:
    """The command."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--partitions", type=int, default=24)
    arguments.add_argument("--embedded", action="store_true", help="controllers in the brokers' processes")
    given = arguments.parse_args()
    gc.disable()  # each record is noted: to look through them stops the clients for longer and longer
    with tempfile.TemporaryDirectory(prefix="tidelog-kills-") as scratch:
        directory = Path(scratch) / "data"
        directory.mkdir()
        report = run(given.rounds, directory, is_embedded=given.embedded, partitions=given.partitions, seed=given.seed)
    print(report.text())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
