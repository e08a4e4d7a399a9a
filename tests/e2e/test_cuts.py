"""Cuts between brokers, controllers and the bucket, under load: real processes, with a TCP proxy on every path.

Nothing may be lost, doubled or reordered, no produce request may fail, and all must be well when the cut has healed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tests.harness.controller_kills import Controllers
from tests.support.cluster_process import eventually, tidelog_json
from tests.support.partition_load import PartitionLoad
from tests.support.s3_servers import S3Server, section
from tidelog.chaos.cut_cluster import SESSION_MS, CutCluster, cut_cluster
from tidelog.chaos.tcp_proxy import Path as Cut

TOPIC = "orders"
PARTITIONS = 6
BEYOND_A_SESSION_S = 2 * SESSION_MS / 1000

pytestmark = pytest.mark.slow


def under_load(cluster: CutCluster, scenario: Callable[[PartitionLoad], None]) -> None:
    """Run `scenario` under load; then everything must be well, and every promise kept."""
    made = tidelog_json(cluster.bootstrap, "topic", "create", TOPIC, "--partitions", str(PARTITIONS))
    assert made
    with PartitionLoad(cluster.bootstrap, TOPIC, PARTITIONS) as load:
        load.wait_grown()
        scenario(load)
        eventually(lambda: not tidelog_json(cluster.bootstrap, "status")["problems"], 120)
        load.wait_grown()
    assert load.verify(cluster.bootstrap) == []


def cut_all(paths: Iterable[Cut], *, requests: bool = True, answers: bool = True) -> None:
    for path in paths:
        path.cut(requests=requests, answers=answers)


def heal_all(paths: Iterable[Cut]) -> None:
    for path in paths:
        path.heal()


def active(cluster: CutCluster, other_than: int = 0) -> int:
    """The active controller, asked directly."""

    async def find() -> int:
        controllers = Controllers(cluster.members, cluster.directory / "secret")
        try:
            return int((await controllers.active(other_than, 30))["node"])
        finally:
            await controllers.close()

    return asyncio.run(find())


def alive(address: str) -> dict[int, bool]:
    """Which brokers live, as a broker tells."""
    problems = tidelog_json(address, "status")["problems"]
    return {broker: not any(f"broker {broker}" in each for each in problems) for broker in (101, 102, 103)}


@pytest.mark.gate_cases("answers")
@pytest.mark.parametrize("ways", [{}, {"requests": False}, {"answers": False}], ids=["both", "answers", "requests"])
def test_brokers_cut_from_all_controllers_go_on_serving(tmp_path: Path, ways: dict[str, bool]) -> None:
    with cut_cluster(tmp_path) as cluster:
        paths = cluster.between(list(cluster.kafka_ports), list(cluster.members))

        def scenario(load: PartitionLoad) -> None:
            cut_all(paths, **ways)
            healed_at = time.monotonic() + BEYOND_A_SESSION_S
            while time.monotonic() < healed_at:
                load.wait_grown(10)  # every partition, all the time
            heal_all(paths)

        under_load(cluster, scenario)


@pytest.mark.long
def test_an_active_controller_cut_from_the_others_is_replaced_and_steps_down(tmp_path: Path) -> None:
    with cut_cluster(tmp_path) as cluster:

        def scenario(load: PartitionLoad) -> None:
            for ways in ({}, {"requests": False}, {"answers": False}):
                old = active(cluster)
                others = [each for each in cluster.members if each != old]
                inward, outward = cluster.between(others, [old]), cluster.between([old], others)
                if ways == {}:
                    cut_all([*inward, *outward])
                elif "requests" in ways:  # it hears nobody: of its own connections the answers, of theirs the requests
                    cut_all(outward, requests=False)
                    cut_all(inward, answers=False)
                else:  # nobody hears it
                    cut_all(outward, answers=False)
                    cut_all(inward, requests=False)
                assert active(cluster, other_than=old) != old
                name = f"made-{'-'.join(ways) or 'both'}"
                tidelog_json(cluster.bootstrap, "topic", "create", name)
                load.wait_grown(10)
                heal_all([*inward, *outward])
                eventually(lambda: _agree(cluster), 120)

        under_load(cluster, scenario)


def _agree(cluster: CutCluster) -> bool:
    """Every controller follows one leader, and one is active."""

    async def ask() -> list[dict[str, Any] | None]:
        controllers = Controllers(cluster.members, cluster.directory / "secret")
        try:
            return await asyncio.gather(*map(controllers.status, cluster.members))
        finally:
            await controllers.close()

    found = asyncio.run(ask())
    leaders = {each["leader"] if each is not None else None for each in found}
    return len(leaders) == 1 and None not in leaders and sum(bool(each and each["active"]) for each in found) == 1


WAYS: dict[str, dict[str, bool]] = {"both": {}, "answers": {"requests": False}, "requests": {"answers": False}}


@pytest.mark.gate_cases("disk-both")
@pytest.mark.parametrize(("wal", "ways"), [("disk", "both"), ("s3", "both"), ("s3", "answers"), ("disk", "requests")])
def test_a_broker_cut_from_the_bucket_loses_nothing(
    tmp_path: Path, minio_server: S3Server, wal: str, ways: str
) -> None:
    with cut_cluster(tmp_path, s3=section(minio_server), wal=wal) as cluster:

        def scenario(load: PartitionLoad) -> None:
            path = cluster.bucket_paths[101]
            path.cut(**WAYS[ways])
            cut_until = time.monotonic() + 4
            if wal == "disk":
                while time.monotonic() < cut_until:
                    load.wait_grown(10)
            else:
                eventually(lambda: time.monotonic() > cut_until)
            path.heal()
            load.wait_grown()

        under_load(cluster, scenario)


@pytest.mark.long
def test_partitions_move_between_brokers_that_are_cut_from_each_other(tmp_path: Path) -> None:
    with cut_cluster(tmp_path) as cluster:

        def rows() -> dict[int, int]:
            described = tidelog_json(cluster.bootstrap, "topic", "describe", TOPIC)
            return {each["partition"]: each["leader"] for each in described[0]["partitions"]}

        def scenario(load: PartitionLoad) -> None:
            for ways in WAYS.values():
                cut_all(cluster.peer_paths.values(), **ways)
                for partition, leader in rows().items():
                    target = next(each for each in cluster.kafka_ports if each != leader)
                    moved = tidelog_json(
                        cluster.bootstrap, "partition", "move", f"{TOPIC}:{partition}", "--to", str(target)
                    )
                    assert moved and rows()[partition] == target
                load.wait_grown(10)
                heal_all(cluster.peer_paths.values())

        under_load(cluster, scenario)


@pytest.mark.long
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_move_whose_source_or_target_is_cut_from_the_controllers_ends_in_one_owner(tmp_path: Path, side: str) -> None:
    with cut_cluster(tmp_path) as cluster:

        def row(partition: int) -> dict[str, Any]:
            described = tidelog_json(third_address, "topic", "describe", TOPIC)
            return next(each for each in described[0]["partitions"] if each["partition"] == partition)

        third_address = f"127.0.0.1:{cluster.kafka_ports[103]}"

        def scenario(load: PartitionLoad) -> None:
            moving = next(each for each in range(PARTITIONS) if row(each)["leader"] == 101)
            paths = cluster.between([101 if side == "source" else 102], list(cluster.members))
            cut_all(paths)
            move = ("partition", "move", f"{TOPIC}:{moving}", "--to", "102", "--no-wait")
            tidelog_json(third_address, *move, ok=range(20))  # refused if the target is declared dead already
            eventually(lambda: not alive(third_address)[101 if side == "source" else 102], 120)
            heal_all(paths)
            eventually(lambda: all(alive(third_address).values()), 120)
            tidelog_json(third_address, *move, ok=range(20))  # success if it is placed already
            eventually(lambda: row(moving)["leader"] == 102, 40)
            for address in cluster.bootstrap.split(","):
                described = tidelog_json(address, "topic", "describe", TOPIC)
                assert {each["partition"]: each["leader"] for each in described[0]["partitions"]}[moving] == 102

        under_load(cluster, scenario)


def test_a_broker_cut_from_the_controllers_does_not_say_that_a_config_is_as_it_was(tmp_path: Path) -> None:
    """Its metadata say so, but another broker has changed it meanwhile."""
    with cut_cluster(tmp_path) as cluster:
        tidelog_json(cluster.bootstrap, "topic", "create", TOPIC, "--config", "retention.ms=1000000")
        there, here = (f"127.0.0.1:{cluster.kafka_ports[broker]}" for broker in (101, 103))
        eventually(lambda: configured(here) == "1000000", 60)
        paths = cluster.between([103], list(cluster.members))
        cut_all(paths)
        eventually(lambda: configure(there, "2000000") is None, 60)
        refused = configure(here, "1000000")
        assert refused is not None and refused.code() == KafkaError.REQUEST_TIMED_OUT, refused
        assert configured(here) == "1000000"
        heal_all(paths)
        eventually(lambda: configure(here, "1000000") is None, 60)
        eventually(lambda: configured(there) == "1000000", 60)


RETENTION = "retention.ms"


def configure(address: str, retention_ms: str) -> KafkaError | None:
    """Set the topic's retention through one broker; return what went wrong."""
    entry = ConfigEntry(RETENTION, retention_ms, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    try:
        admin.incremental_alter_configs([resource], request_timeout=20)[resource].result(30)
    except KafkaException as error:
        found = error.args[0]
        assert isinstance(found, KafkaError)
        return found
    return None


def configured(address: str) -> str | None:
    """The topic's retention, as one broker tells it; None: it does not know the topic."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, TOPIC)
    admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
    try:
        return str(admin.describe_configs([resource], request_timeout=20)[resource].result(30)[RETENTION].value)
    except KafkaException:
        return None
