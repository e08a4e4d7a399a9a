"""`tidelog replica-set` against a real process, and a replica set of several members that only the controller knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.controller.controller_helpers import make_client
from tests.support.cli import Cli
from tests.support.ports import free_port
from tests.support.tidelog_process import running
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.addresses import split_address
from tidelog.controller.model.commands import RegisterBroker
from tidelog.controller.model.replica_set_commands import PromiseEpoch
from tidelog.controller.model.replication import PolicyRecord
from tidelog.controller.rpc.handshake import Credentials
from tidelog.controller.rpc.secret import read_secret
from tidelog.storage.replication.configuration import SetConfiguration, WalReplica

pytestmark = pytest.mark.processes

OTHER = 7
"""A broker that only registers."""


def test_a_set_of_one_is_shown_and_has_no_other_candidate(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "t", "-p", 3)
        [row] = cli("replica-set", "list", "--format", "json").json()
        own = row["id"]
        assert (row["state"], row["master"], row["members"], row["quorum"], row["partitions"]) == (
            "led",
            own,
            [own],
            1,
            3,
        )
        assert cli("replica-set", "list").rows()[0][:3] == [str(own), "led", str(own)]
        document = cli("replica-set", "describe", own, "--format", "json").json()
        live = document["live"]
        assert (live["quorum"], live["need"], live["in_sync"], live["degraded"]) == (1, 1, [own], False)
        assert live["confirm_offset"] == live["end_offset"] > 0 and document["live_problem"] is None
        assert [row["caught_up_ms"] for row in document["replicas"]] == [0] and document["last_election"] is None
        shown = cli("replica-set", "describe", own).text
        assert ["in", "sync", "now", "1", "of", "1,", "needed", "1"] in [line.split() for line in shown.splitlines()]
        refused = cli("replica-set", "elect", own, code=2)
        assert "has one member" in refused.err and "several members" in refused.err
        assert "there is no replica set 99" in cli("replica-set", "describe", 99, code=3).err
        assert "needs --broker" in cli("replica-set", "elect", own, "--accept-loss", code=2).err

        assert "nothing is to be changed" in cli("replica-set", "set-policy", own, code=2).err
        contradicting = cli("replica-set", "set-policy", own, "--in-sync-replicas", 2, code=2)
        assert "total_replicas 1" in contradicting.err
        told = cli(
            "replica-set",
            "set-policy",
            own,
            *("--total-replicas", 3, "--in-sync-replicas", 2, "--enable-auto-in-sync-replicas"),
            *("--max-behind-s", "2.5"),
        )
        assert "max behind s" in told.text
        cli("replica-set", "set-policy", own, "--max-gap-bytes", 1 << 20)
        policy = cli("replica-set", "describe", own, "--format", "json").json()["policy"]
        assert (policy["total_replicas"], policy["in_sync_replicas"], policy["max_behind_s"]) == (3, 2, 2.5)
        assert (policy["enable_auto_in_sync_replicas"], policy["max_gap_bytes"]) == (True, 1 << 20)
        assert "in sync replicas" in cli("replica-set", "describe", own).text


def test_an_election_is_begun_shown_and_ended(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running(data_dir) as process:
        asyncio.run(with_client(data_dir, lambda client: elections(client, Cli(process.bootstrap))))


async def with_client(data_dir: Path, use: Callable[[ControllerClient], Awaitable[None]]) -> None:
    address = (data_dir / "controller" / "address").read_text().strip()
    client = make_client(
        split_address(address), heartbeat_interval_s=0.1, budget_s=60, credentials=credentials(data_dir)
    )
    await client.start()
    try:
        await use(client)
    finally:
        await client.close()


def credentials(data_dir: Path) -> Credentials | None:
    files = sorted(data_dir.glob("**/*secret*"))
    return Credentials(read_secret(files[0]), -1) if files else None


async def elections(client: ControllerClient, cli: Cli) -> None:
    [own] = client.image.brokers
    registration = await client.register_broker(RegisterBroker(OTHER, "check", "a", "h", 9092, "", ""))
    await client.elect(OTHER, OTHER)
    sets, registrations = client.replica_sets, {own: client.image.brokers[own].registration_epoch, OTHER: registration}
    await sets.assign_replica(OTHER, own)
    for each in (OTHER, own):
        await sets.add_replica(OTHER, each, registrations[each], f"wal-{each}")

    async def run(*args: str | int, code: int = 0) -> str:
        done = await asyncio.to_thread(cli, "replica-set", *args, code=code)
        return done.text if code == 0 else done.err

    async def promise(broker: int) -> None:
        epoch = client.image.replica_sets[OTHER].master_epoch
        await sets.promise(PromiseEpoch(OTHER, epoch, broker, registrations[broker], f"wal-{broker}", 1, 50, 10))

    assert "has begun" in await run("elect", OTHER, "--no-wait")
    shown = await run("describe", OTHER)
    assert ["because", "an", "operator"] in [line.split() for line in shown.splitlines()]
    assert ["no", "promise", "of", str(OTHER)] in [line.split() for line in shown.splitlines()]
    assert "no master after 1 s" in await run("elect", OTHER, "--timeout", 1, code=5)
    assert "has not promised" in await run("elect", OTHER, "--broker", OTHER, "--accept-loss", code=1)
    await promise(own)
    assert "electing" in await run("list")
    lossy = await run("elect", OTHER, "--broker", own, "--accept-loss")
    assert f"broker {own} is the master of replica set {OTHER}" in lossy
    document = (await asyncio.to_thread(cli, "replica-set", "describe", OTHER, "--format", "json")).json()
    ended = document["last_election"]
    assert (ended["reason"], ended["accepted_loss"]) == ("an operator", True)
    assert (ended["master"], ended["last_master"], ended["master_epoch"]) == (own, OTHER, document["master_epoch"])
    assert (
        document["live"] is None and document["live_problem"] == f"broker {own} does not lead the set yet, or any more"
    )
    assert {row["lag_bytes"] for row in document["replicas"]} == {None}
    assert "a loss was accepted" in await run("describe", OTHER)
    assert "an operator elected" in (await asyncio.to_thread(cli, "wal", "losses", "--format", "json")).text


def test_a_member_is_added_waited_for_and_removed(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running(data_dir) as process:
        asyncio.run(with_client(data_dir, lambda client: members(client, Cli(process.bootstrap))))


async def members(client: ControllerClient, cli: Cli) -> None:
    [own] = client.image.brokers
    registrations = {own: client.image.brokers[own].registration_epoch}
    nobody = f"http://127.0.0.1:{free_port()}"
    registration = RegisterBroker(OTHER, "check", "a", "h", 9092, "", admin_url=nobody)
    registrations[OTHER] = await client.register_broker(registration)
    await client.elect(OTHER, OTHER)
    sets = client.replica_sets
    await sets.add_replica(OTHER, OTHER, registrations[OTHER], f"wal-{OTHER}")

    async def run(*args: str | int, code: int = 0) -> str:
        done = await asyncio.to_thread(cli, "replica-set", *args, code=code)
        return done.text if code == 0 else done.err

    shown = " ".join((await run("describe", OTHER)).split())
    assert (
        f"not known the master, broker {OTHER}, does not answer: the admin HTTP at {nobody} cannot be reached" in shown
    )
    assert "there is no broker 99" in await run("add-member", OTHER, "--broker", 99, code=3)
    assert "is assigned to" in await run("add-member", OTHER, "--broker", own, "--no-wait")
    [row] = [each.split() for each in (await run("list")).splitlines() if each.split()[0] == str(OTHER)]
    assert row[4:7] == [str(OTHER), "-", str(own)], "members, learners, joining"
    assert [str(own), "joining"] in [line.split()[:2] for line in (await run("describe", OTHER)).splitlines()]
    assert f"not in sync in replica set {OTHER} after 1 s" in await run(
        "add-member", OTHER, "--broker", own, "--timeout", 1, code=5
    )

    await sets.assign_replica(OTHER, own)
    waiting = asyncio.create_task(run("add-member", OTHER, "--broker", own))
    await sets.add_replica(OTHER, own, registrations[own], f"wal-{own}")
    record = client.image.replica_sets[OTHER]
    wanted = frozenset(WalReplica(each, f"wal-{each}") for each in (own, OTHER))
    await sets.alter_sync_state_set(
        OTHER,
        SetConfiguration(record.sync_state_set_epoch, wanted, 1),
        master=(OTHER, registrations[OTHER]),
        master_epoch=record.master_epoch,
        ends={},
        confirm_offset=0,
    )
    assert f"broker {own} is in sync" in await waiting

    await priorities(run, own)
    assert "is the master of" in await run("remove-member", OTHER, "--broker", OTHER, code=1)
    await sets.set_policy(OTHER, PolicyRecord(2, 1, 1))
    assert "shall have 2 replicas" in await run("remove-member", OTHER, "--broker", own, code=2)
    await sets.set_policy(OTHER, PolicyRecord())
    assert "is to leave" in await run("remove-member", OTHER, "--broker", own, "--no-wait")
    assert [str(own), "leaving"] in [line.split()[:2] for line in (await run("describe", OTHER)).splitlines()]
    assert "still a member" in await run("remove-member", OTHER, "--broker", own, "--timeout", 1, code=5)
    leaving = asyncio.create_task(run("remove-member", OTHER, "--broker", own))
    record = client.image.replica_sets[OTHER]
    await sets.alter_sync_state_set(
        OTHER,
        SetConfiguration(record.sync_state_set_epoch, frozenset({WalReplica(OTHER, f"wal-{OTHER}")}), 1),
        master=(OTHER, registrations[OTHER]),
        master_epoch=record.master_epoch,
        ends={},
        confirm_offset=0,
    )
    assert "keeps no replica" in await leaving
    assert list(client.image.replication[OTHER].assigned) == [OTHER]


async def priorities(run: Callable[..., Awaitable[str]], own: int) -> None:
    assert "is 5" in await run("set-priority", OTHER, "--broker", own, "--priority", 5)
    assert "5 (set)" in await run("describe", OTHER)
    document = json.loads(await run("describe", OTHER, "--format", "json"))
    assert [(row["broker"], row["priority"], row["set_priority"]) for row in document["replicas"]] == [
        (own, 5, 5),
        (OTHER, 0, None),
    ]
    assert "is -3" in await run("set-priority", OTHER, "--broker", own, "--priority", -3)
    assert "is 0" in await run("set-priority", OTHER, "--broker", own, "--unset")
    assert "(set)" not in await run("describe", OTHER)
    assert "give one of" in await run("set-priority", OTHER, "--broker", own, code=2)
    assert "has no replica" in await run("set-priority", OTHER, "--broker", 99, "--unset", code=3)


def test_a_learner_is_added_promoted_and_removed(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with running(data_dir) as process:
        asyncio.run(with_client(data_dir, lambda client: learners(client, Cli(process.bootstrap))))


async def learners(client: ControllerClient, cli: Cli) -> None:
    [own] = client.image.brokers
    registrations = {own: client.image.brokers[own].registration_epoch}
    registrations[OTHER] = await client.register_broker(RegisterBroker(OTHER, "check", "a", "h", 9092, "", ""))
    await client.elect(OTHER, OTHER)
    sets = client.replica_sets
    await sets.add_replica(OTHER, OTHER, registrations[OTHER], f"wal-{OTHER}")

    async def run(*args: str | int, code: int = 0) -> str:
        done = await asyncio.to_thread(cli, "replica-set", *args, code=code)
        return done.text if code == 0 else done.err

    assert "becomes no learner" in await run("add-member", OTHER, "--broker", OTHER, "--learner", code=1)
    assert "is no learner of" in await run("promote-member", OTHER, "--broker", own, code=2)
    assert f"not a learner of replica set {OTHER} after 1 s" in await run(
        "add-member", OTHER, "--broker", own, "--learner", "--timeout", 1, code=5
    )
    await sets.assign_replica(OTHER, own, is_learner=True)
    waiting = asyncio.create_task(run("add-member", OTHER, "--broker", own, "--learner"))
    await sets.add_replica(OTHER, own, registrations[own], f"wal-{own}", is_learner=True)
    assert f"broker {own} is a learner of replica set {OTHER}" in await waiting
    [row] = [each.split() for each in (await run("list")).splitlines() if each.split()[0] == str(OTHER)]
    assert row[4:8] == [str(OTHER), str(own), "-", str(OTHER)], "members, learners, joining, in sync"
    assert [str(own), "learner"] in [line.split()[:2] for line in (await run("describe", OTHER)).splitlines()]

    assert "is assigned to" in await run("promote-member", OTHER, "--broker", own, "--no-wait")
    assert client.image.replica_sets[OTHER].members == tuple(sorted((own, OTHER)))
    assert client.image.replica_sets[OTHER].learners == ()
    assert "keeps no replica" in await run("remove-member", OTHER, "--broker", own)

    # in this order: with the policy first the active controller might assign this broker as a member before
    await run("add-member", OTHER, "--broker", own, "--learner", "--no-wait")
    await sets.set_policy(OTHER, PolicyRecord(2, 1, 1))
    assert "keeps no replica" in await run("remove-member", OTHER, "--broker", own), "the policy does not count it"
