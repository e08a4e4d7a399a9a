"""Settings of the controllers that change while they run: what may, what counts, and that every controller follows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.controller.controller_helpers import TOPIC, Driver, make_client, make_node, until
from tests.controller.replica_cluster import ReplicaCluster
from tests.support.ports import free_port
from tidelog.controller.active.balance_schedule import BalanceSchedule
from tidelog.controller.active.duties import Duties
from tidelog.controller.active.masters import PREFERRED_AFTER_S, PREFERRED_REASON
from tidelog.controller.active.sessions import BrokerSessions
from tidelog.controller.inputs import ControllerIdentity, ControllerSections, ControllerWorld
from tidelog.controller.model import commands as c
from tidelog.controller.model import replica_set_commands as r
from tidelog.controller.model.levels import UnsupportedLevel
from tidelog.controller.model.load import BrokerLoad, PartitionLoad
from tidelog.controller.model.overrides import (
    DYNAMIC,
    HEARTBEAT_INTERVAL,
    SECTIONS,
    SESSION_TIMEOUT,
    SettingsInForce,
    change_of,
    in_force,
    is_known,
    refusal,
)
from tidelog.controller.model.settings import BalancerSettings, ControllerSettings, ScaleSettings
from tidelog.controller.node import ControllerNode
from tidelog.controller.rpc.handshake import Credentials
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.network import TcpNetwork
from tidelog.runtime.steps import at_once

REPAIR, PREFERRED = "controller.replica_repair_after_ms", "controller.preferred_master_enable"


def set_(driver: Driver, **changes: str | None) -> None:
    driver.run(c.AlterConfigs("cluster", "", {key.replace("__", "."): value for key, value in changes.items()}))


# --- what may be changed ---


def changed(key: str, text: str | None, has: dict[str, str] | None = None, level: int = 2, **configs: str) -> object:
    return change_of(key, text, has or {}, level=level, configs={k.replace("__", "."): v for k, v in configs.items()})


@pytest.mark.parametrize(
    ("key", "text", "stored"),
    [
        (SESSION_TIMEOUT, " 6000 ", "6000"),
        (PREFERRED, "FALSE", "false"),
        ("balancer.cooldown_ms", "0", "0"),
    ],
)
def test_a_dynamic_setting_is_changed_stored_in_one_form_and_taken_back(key: str, text: str, stored: str) -> None:
    assert changed(key, text) == {key: stored}
    assert changed(key, text, {key: stored}) == {}, "it is so already"
    assert changed(key, None, {key: stored}) == {key: None}
    assert changed(key, None) == {}


@pytest.mark.parametrize(
    ("key", "text", "what"),
    [
        (SESSION_TIMEOUT, "soon", "invalid value 'soon'"),
        (SESSION_TIMEOUT, "0", "invalid value '0'"),
        (SESSION_TIMEOUT, "2999", "less than 3 heartbeat intervals of 1000 ms"),
        (PREFERRED, "1", "invalid value '1'"),
        ("balancer.max_moves_in_plan", "10001", "invalid value"),
        ("controller.nothing", "1", "no setting 'controller.nothing'"),
        ("wal.flush", "async", "no setting 'wal.flush'"),
    ],
)
def test_what_is_not_a_value_of_a_dynamic_setting_is_refused(key: str, text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        changed(key, text)


def test_the_session_timeout_is_measured_by_the_brokers_heartbeat_interval() -> None:
    assert changed(SESSION_TIMEOUT, "900", controller__heartbeat_interval_ms="300") == {SESSION_TIMEOUT: "900"}
    with pytest.raises(ConfigError, match="give 15000 or more"):
        changed(SESSION_TIMEOUT, "9000", controller__heartbeat_interval_ms="5000")


def test_every_other_setting_of_the_controllers_says_why_it_is_not_dynamic_and_what_to_do() -> None:
    keys = [f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.__struct_fields__]
    assert {*DYNAMIC} < {*keys}
    for key in keys:
        error = refusal(key)
        assert is_known(key) and (error is None) == (key in DYNAMIC)
        if error is not None:
            assert key in error.message and error.hint
            with pytest.raises(ConfigError, match="cannot be changed while the cluster runs"):
                changed(key, "1")
    assert "controller add" in str(refusal("controller.members"))
    assert "objects that are deleted" in str(refusal("controller.read_grace_ms"))
    assert "below a third" in str(refusal(HEARTBEAT_INTERVAL))
    assert "balancer mode" in str(refusal("balancer.mode"))


def test_below_level_2_nothing_is_set_and_what_is_there_is_taken_back() -> None:
    with pytest.raises(UnsupportedLevel, match="from feature level 2 on; the cluster is at level 1"):
        changed(REPAIR, "1000", level=1)
    assert changed(REPAIR, None, {REPAIR: "1000"}, level=1) == {REPAIR: None}
    assert changed("controller.of_a_newer_version", None, {"controller.of_a_newer_version": "1"}) == {
        "controller.of_a_newer_version": None
    }


# --- what is in force ---


def test_an_override_counts_before_the_file_and_one_that_is_not_understood_does_not() -> None:
    configured = ControllerSettings(session_timeout_ms=7_000, port=9)
    overrides = {SESSION_TIMEOUT: "5000", REPAIR: "-1", "controller.port": "1", "balancer.cooldown_ms": "3", "x": "y"}
    found = in_force("controller", configured, overrides)
    assert (found.session_timeout_ms, found.port) == (5_000, 9)
    assert found.replica_repair_after_ms == configured.replica_repair_after_ms
    assert in_force("balancer", BalancerSettings(), overrides).cooldown_ms == 3
    assert configured.session_timeout_ms == 7_000


def test_the_settings_follow_the_metadata_and_are_the_same_object_while_nothing_changes() -> None:
    driver = Driver()
    settings = SettingsInForce("controller", ControllerSettings(), lambda: driver.image.cluster_configs)
    first = settings.now
    assert first is settings.configured
    set_(driver, log__retention__ms="1000")
    assert settings.now is first
    set_(driver, controller__session_timeout_ms="5000")
    assert settings.now.session_timeout_ms == 5_000 and settings.now is settings.now
    set_(driver, controller__session_timeout_ms=None, log__retention__ms=None)
    assert settings.now == first


def test_a_session_timeout_counts_from_the_next_heartbeat_on_and_brings_nobody_back() -> None:
    sessions, driver = BrokerSessions(10.0), Driver()
    driver.broker(1)
    brokers, epoch = list(driver.image.brokers.values()), driver.image.brokers[1].registration_epoch
    sessions.heartbeat(1, epoch, "connection", 0.0)
    sessions.use_timeout(30.0)
    assert not sessions.scan(brokers, 9.0)
    (verdict,) = sessions.scan(brokers, 10.0)
    assert not verdict.alive, "it was silent all the time"
    sessions.heartbeat(1, epoch, "connection", 11.0)
    assert not sessions.scan(brokers, 40.0)
    sessions.use_timeout(3.0)
    sessions.heartbeat(1, epoch, "connection", 40.0)
    assert not sessions.scan(brokers, 42.9)
    (verdict,) = sessions.scan(brokers, 43.0)
    assert not verdict.alive


def test_a_preferred_master_leads_again_as_soon_as_that_is_switched_on() -> None:
    cluster = ReplicaCluster([""] * 3)
    cluster.settle()
    set_(cluster, controller__preferred_master_enable="false")
    cluster.set_alive(0, False)
    cluster.settle(5)
    cluster.set_alive(0, True)
    cluster.settle(int(PREFERRED_AFTER_S) + 10)
    assert cluster.record(0).master != 0
    set_(cluster, controller__preferred_master_enable=None)
    (election,) = [each for each in cluster.tick() if isinstance(each, r.BeginElection)]
    assert (election.replica_set_id, election.reason) == (0, PREFERRED_REASON)


def test_dead_replicas_are_replaced_after_the_time_that_is_in_force() -> None:
    cluster = ReplicaCluster([""] * 4)
    cluster.settle()
    (spare,) = {*range(4)} - {*cluster.assigned(0)}
    gone = next(each for each in cluster.assigned(0) if each != 0)
    cluster.set_alive(gone, False)
    cluster.settle(60)
    assert spare not in cluster.assigned(0)
    set_(cluster, controller__replica_repair_after_ms="30000")
    cluster.settle(5)
    assert spare in cluster.assigned(0), "it has been dead for longer"


def test_a_move_whose_source_closed_is_elected_after_the_time_that_is_in_force() -> None:
    driver = Driver()
    for each in (1, 2):
        driver.broker(each)
    driver.run(c.CreateTopic(TOPIC, "t", 1, {}, False, False, (1,)))
    driver.run(c.MovePartitions((c.PartitionMove(TOPIC, 0, 2),)))
    duties = Duties(lambda: driver.image, BrokerSessions(10.0), dict, ControllerSettings())
    set_(driver, controller__reelect_timeout_ms="60000")
    assert not list(duties.elections(0.0, 0)) and not list(duties.elections(30.0, 0))
    set_(driver, controller__reelect_timeout_ms="10000")
    assert list(duties.elections(30.0, 0)) == [c.ElectPartitions(((TOPIC, 0),))]


def test_the_balancer_uses_the_settings_that_are_in_force() -> None:
    driver = Driver()
    for each in (1, 2):
        driver.broker(each)
    driver.run(c.CreateTopic(TOPIC, "t", 12, {}, False, False, (1,) * 12))
    schedule = BalanceSchedule(BalancerSettings(mode="on", min_bytes_per_s=0), ScaleSettings(), lambda: driver.image)
    schedule.activated(0.0)
    set_(driver, balancer__max_moves_in_flight="2", balancer__mode="off")
    assert schedule.mode == "on", "it has a command of its own"
    command = None
    for now_s in range(60):
        for each in (1, 2):
            rows = tuple(
                PartitionLoad(one.first_stream, 1_000_000, 0, 0)
                for one in driver.image.all_partitions()
                if one.replica_set == each
            )
            schedule.loads.note(each, 1, BrokerLoad(1_000_000 * len(rows), 0, 0, 0, rows), float(now_s))
        command = command or at_once(schedule.look(float(now_s), 0))
    assert command is not None and len(command.moves) == 2


# --- on real controllers ---


async def test_an_override_is_in_force_on_a_controller_at_once_and_after_its_restart(tmp_path: Path) -> None:
    settings = ControllerSettings(session_timeout_ms=3_600_000)
    node = make_node(tmp_path, settings=settings)
    await node.start()
    await node.wait_active(60)
    client = make_client(node.address, heartbeat_interval_s=0.05, budget_s=60)
    await client.start()
    own = node.status()["settings"][SESSION_TIMEOUT]
    assert own == {"value": 3_600_000, "configured": 3_600_000, "default": 10_000, "overridden": False}
    await client.alter_configs("cluster", "", {SESSION_TIMEOUT: "1000"})
    await until(lambda: node.status()["settings"][SESSION_TIMEOUT]["overridden"])
    registration = c.RegisterBroker(1, "check", "process", "h", 9092, "", "")
    await client.register_broker(registration)
    await until(lambda: node.hears(1))
    await node.close()
    await client.close()
    node = make_node(tmp_path, settings=settings)
    await node.start()
    await node.wait_active(60)
    assert node.image.brokers[1].alive
    await until(lambda: not node.image.brokers[1].alive)  # an hour, by its configuration
    assert node.status()["settings"][SESSION_TIMEOUT]["value"] == 1_000
    await node.close()


async def test_an_override_is_in_force_on_every_controller_and_stays_when_another_one_is_active(tmp_path: Path) -> None:
    secret, ports = b"s" * 32, [free_port() for _ in range(3)]
    members = [f"{each}@127.0.0.1:{ports[each]}" for each in range(3)]
    nodes = [
        ControllerNode(
            ControllerIdentity(each, tmp_path / str(each), Credentials(secret, each)),
            ControllerSections(ControllerSettings(members=members, session_timeout_ms=60_000 + each)),
            ControllerWorld(TcpNetwork(), SystemClock(), random.Random()),
        )
        for each in range(3)
    ]

    def values() -> list[int]:
        return [each.status()["settings"][SESSION_TIMEOUT]["value"] for each in nodes]

    for each in nodes:
        await each.start()
    await until(lambda: any(each.is_active for each in nodes))
    client = make_client(*(each.address for each in nodes), budget_s=60, credentials=Credentials(secret, 0))
    await client.start()
    assert values() == [60_000, 60_001, 60_002]
    await client.alter_configs("cluster", "", {SESSION_TIMEOUT: "5000"})
    await until(lambda: values() == [5_000] * 3)
    (active,) = [each for each in nodes if each.is_active]
    nodes.remove(active)
    await active.close()
    await until(lambda: any(each.is_active for each in nodes))
    assert values() == [5_000] * 2
    await client.alter_configs("cluster", "", {SESSION_TIMEOUT: None})
    await until(lambda: 5_000 not in values())
    assert len({*values()}) == 2, "each goes by its own configuration again"
    await client.close()
    for each in nodes:
        await each.close()
