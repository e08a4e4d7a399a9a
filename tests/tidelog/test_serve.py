"""What a process of `tidelog serve` says about its configuration and its end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import pytest

from tests.controller.controller_helpers import make_client, until
from tests.support.ports import free_port
from tests.support.tidelog_process import running
from tidelog.broker.admin.quorum import QuorumView
from tidelog.broker.settings import AdminSettings, KafkaSettings
from tidelog.config import Config
from tidelog.controller.model.addresses import split_address
from tidelog.controller.rpc.secret import write_secret
from tidelog.process.data_dir import WrongDataDirectory
from tidelog.process.listener import warn_of_admin_address
from tidelog.process.node_base import credentials_of
from tidelog.process.serve import NodeProcess
from tidelog.runtime.errors import ConfigError, Unavailable
from tidelog.storage.cleaning.orphan_cleaner import OrphanCleaner


@pytest.mark.parametrize(
    ("kafka", "admin", "warns"),
    [
        (KafkaSettings(host="10.0.0.1"), AdminSettings(), True),
        (KafkaSettings(advertised_host="broker-1"), AdminSettings(), True),
        (KafkaSettings(host="10.0.0.1"), AdminSettings(host="0.0.0.0"), True),
        (KafkaSettings(host="10.0.0.1"), AdminSettings(host="10.0.0.1"), False),
        (KafkaSettings(host="10.0.0.1"), AdminSettings(advertised_host="broker-1"), False),
        (KafkaSettings(), AdminSettings(), False),
        (KafkaSettings(host="0.0.0.0", advertised_host="127.0.0.1"), AdminSettings(), False),
    ],
)
def test_an_admin_address_that_other_hosts_cannot_use_is_warned_of(
    kafka: KafkaSettings, admin: AdminSettings, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_admin_address(kafka, admin)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == (
        ["other hosts cannot use this broker's admin address"] if warns else []
    )


@pytest.mark.parametrize("section", ["controller", "admin"])
@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "broker-1"])
def test_a_listener_that_other_hosts_reach_needs_the_secret(section: str, host: str, tmp_path: Path) -> None:
    config = Config()
    getattr(config, section).host = host
    with pytest.raises(ConfigError, match=f"{section}.host {host} accepts remote connections"):
        credentials_of(config)
    file = tmp_path / "secret"
    write_secret(file)
    config.controller.secret_file = str(file)
    assert credentials_of(config) is not None


def test_listeners_on_loopback_need_no_secret_and_a_controller_alone_has_no_admin_http() -> None:
    assert credentials_of(Config()) is None
    alone = Config()
    alone.node.roles, alone.admin.host = ["controller"], "0.0.0.0"
    assert credentials_of(alone) is None


async def test_a_process_without_a_role_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    config = Config()
    config.node.roles, config.node.data_dir = [], str(tmp_path / "data")
    process = NodeProcess(config)
    with pytest.raises(ConfigError, match="roles is empty"):
        await process.start()
    await process.stop()
    assert not (tmp_path / "data").exists()


async def test_a_start_that_fails_gives_the_data_directory_back(tmp_path: Path) -> None:
    config = Config()
    config.node.roles, config.node.data_dir, config.kafka.port = ["broker"], str(tmp_path / "data"), 0
    for _ in range(2):
        process = NodeProcess(config)
        with pytest.raises(ConfigError, match="must know where the controllers are"):
            await process.start()
        await process.stop()


@pytest.mark.parametrize("left", ["wal/00000000000000000000.wal", "replica-2/id"])
async def test_a_broker_that_does_not_know_its_id_takes_no_wal_for_its_own(left: str, tmp_path: Path) -> None:
    """It would ask for another id, and drop all records in the WAL as those of partitions of another one."""
    write_secret(tmp_path / "secret")
    config, file = Config(), tmp_path / "data" / left
    config.node.roles, config.node.data_dir, config.kafka.port = ["broker"], str(tmp_path / "data"), 0
    config.controller.endpoints, config.controller.secret_file = ["127.0.0.1:1"], str(tmp_path / "secret")
    file.parent.mkdir(parents=True)
    file.write_bytes(b"records")
    process = NodeProcess(config)
    with pytest.raises(WrongDataDirectory, match="does not say whose it is"):
        await process.start()
    await process.stop()


@pytest.mark.parametrize("roles", [["controller", "broker"], ["controller"]])
@pytest.mark.parametrize("is_quorum", [False, True])
async def test_the_only_controller_without_its_files_makes_no_other_cluster(
    roles: list[Literal["controller", "broker"]], is_quorum: bool, tmp_path: Path
) -> None:
    config, data_dir = Config(), tmp_path / "data"
    config.node.id, config.node.roles, config.node.data_dir = 1, roles, str(data_dir)
    config.kafka.port = config.admin.port = 0
    if is_quorum:  # of one member, as that of `tidelog up --brokers 2`
        write_secret(tmp_path / "secret")
        config.controller.secret_file = str(tmp_path / "secret")
        config.controller.members = [f"1@127.0.0.1:{free_port()}"]
    process = NodeProcess(config)
    await process.start()
    await process.stop()
    (data_dir / "controller").rename(tmp_path / "aside")
    process = NodeProcess(config)
    with pytest.raises(WrongDataDirectory, match="the only controller of cluster"):
        await process.start()
    await process.stop()
    assert not (data_dir / "controller").exists()
    (tmp_path / "aside").rename(data_dir / "controller")
    process = NodeProcess(config)
    await process.start()
    await process.stop()


async def test_a_controller_alone_tells_that_its_search_for_orphans_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no HTTP to tell it at, and nobody else searches: what crashes left in the bucket was paid for, unseen."""

    async def fails(_cleaner: OrphanCleaner) -> None:
        raise Unavailable("the bucket denies it")

    monkeypatch.setattr(OrphanCleaner, "clean", fails)
    config = Config()
    config.node.id, config.node.roles, config.node.data_dir = 1, ["controller"], str(tmp_path)
    config.clean.interval_ms = 100
    process = NodeProcess(config)
    await process.start()
    client = make_client(split_address(process.ready_line.removeprefix("controller=")))
    await client.start()
    problem = "the active controller 1 fails to search for orphans: the bucket denies it"
    told: list[str] = []

    async def look() -> None:
        told[:] = (await QuorumView(client).report())["problems"]

    await until(lambda: problem in told, nudge=look)
    await client.close()
    await process.stop()


@pytest.mark.processes
def test_a_clean_stop_ends_with_a_line_in_the_log_and_leaves_files_for_their_owner_only(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        assert process.stop() == 0
    open_to_others = [path for path in (tmp_path / "data").rglob("*") if path.lstat().st_mode & 0o077]
    assert not open_to_others, "logs, objects and metadata are for their owner"
    assert "stopped" in process.output[-1] and "node=1" in process.output[-1], process.tail()
