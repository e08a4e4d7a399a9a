"""Facts about the machine and other nodes: gathered from real files, sockets and certificates."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Authority
from tests.support.hung_disk import hung_syncs
from tidelog.controller.checkup import Checkup, CheckupWorld
from tidelog.controller.image.image import Image
from tidelog.doctor.rules_node import judge_disk
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import Unavailable
from tidelog.runtime.facts import disk
from tidelog.runtime.facts.disk import (
    LEAST_SYNCS,
    MAX_SYNCS,
    DiskProbes,
    file_system_in,
    probe_disk,
    probe_disks,
    quantile,
)
from tidelog.runtime.facts.files import file_facts
from tidelog.runtime.facts.machine import machine_facts
from tidelog.runtime.facts.node import OwnFacts, secret_files, tls_certificates
from tidelog.runtime.facts.reach import AddressKind, AddressTry, NodeAddress, Tries
from tidelog.runtime.facts.stacks import stacks
from tidelog.runtime.network import Listener, ProtocolFactory, TcpNetwork, cannot_connect
from tidelog.runtime.version import VERSION

NO_NAME = "no-such-host.invalid"
CLOCK = SystemClock()


# --- disks -----------------------------------------------------------------------------------------------------------


def test_a_probe_syncs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    facts = probe_disk(tmp_path, CLOCK, budget_s=0.2)
    assert facts.exists and not facts.error
    assert 3 <= facts.syncs <= MAX_SYNCS
    assert 0 < facts.p50_ms <= facts.p99_ms <= facts.max_ms
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert facts.mode == tmp_path.stat().st_mode & 0o7777
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_nameless_files_is_probed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    facts = probe_disk(tmp_path, CLOCK, budget_s=0.1)
    assert facts.syncs >= 3 and not facts.error
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_yet_is_judged_by_the_one_above_it(tmp_path: Path) -> None:
    facts = probe_disk(tmp_path / "new" / "data", CLOCK, budget_s=0.1)
    assert facts.probed == str(tmp_path)
    assert not facts.exists and facts.mode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_takes_no_file_says_why() -> None:
    facts = probe_disk(Path("/proc"), CLOCK, budget_s=0.1)
    assert facts.error and facts.syncs == 0
    assert facts.file_system == "proc"


def test_a_sync_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    assert probe_disk(tmp_path, CLOCK, budget_s=0.1).error == "Input/output error"
    assert list(tmp_path.iterdir()) == []


def test_folders_of_one_device_are_probed_once(tmp_path: Path) -> None:
    (tmp_path / "wal").mkdir()
    (found,) = probe_disks([tmp_path, tmp_path / "wal", tmp_path / "not-yet"], CLOCK, budget_s=0.1)
    assert found.path == str(tmp_path)
    assert found.holds == [str(tmp_path), str(tmp_path / "wal"), str(tmp_path / "not-yet")]


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = "\n".join(
        [
            "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw",
            "23 22 0:21 / /data rw shared:1 - xfs /dev/sdb rw",
            r"24 23 0:22 / /data/my\040wal rw - tmpfs tmpfs rw",
            "25 22 0:23 / /database rw - nfs4 server:/ rw",
            "26 23 0:24 / /data rw - btrfs /dev/sdc rw",
            "broken line",
        ]
    )
    found = {
        each: file_system_in(mounts, Path(each)) for each in ("/", "/data/wal", "/data/my wal/x", "/database", "/dat")
    }
    assert found == {
        "/": "ext4",
        "/data/wal": "btrfs",  # mounted over the other
        "/data/my wal/x": "tmpfs",
        "/database": "nfs4",
        "/dat": "ext4",
    }
    assert file_system_in("", Path("/")) == ""


def test_quantiles_are_values_that_were_seen() -> None:
    values = [float(each) for each in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([7.0], 0.99)) == (50.0, 99.0, 7.0)


# --- files, machine, stacks ------------------------------------------------------------------------------------------


def test_files_with_secrets_are_looked_at_and_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o640)
    facts = file_facts("controller.secret_file", str(secret))
    assert (facts.mode, facts.size, facts.is_readable, facts.is_own) == (0o640, 16, True, True)
    assert facts.open_to_others
    assert "No such file" in file_facts("x", str(tmp_path / "missing")).error
    assert "no file" in file_facts("x", str(tmp_path)).error


def test_only_files_with_secrets_are_taken_from_the_settings(tmp_path: Path) -> None:
    names = ("controller.secret_file", "s3.secret_access_key_file", "replication.tls_key_file")
    settings: dict[str, Any] = dict.fromkeys(names, str(tmp_path / "x"))
    settings |= {"replication.tls_cert_file": "/c", "replication.tls_ca_file": "/a", "s3.access_key_id_file": ""}
    assert [each.setting for each in secret_files(settings)] == list(names)


def test_certificates_are_tried_with_their_key_and_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    def facts(files: Any) -> Any:
        settings = {
            "replication.tls_cert_file": str(files.cert_file),
            "replication.tls_key_file": str(files.key_file),
            "replication.tls_ca_file": str(files.ca_file),
        }
        (found,) = tls_certificates(settings)
        return found

    now_ms = SystemClock().time_ms()
    good = facts(authority.issue("good", days=3))
    assert not good.error
    assert 2.9 < (good.expires_ms - now_ms) / 86_400_000 < 3.1
    assert 29 < (good.ca_expires_ms - now_ms) / 86_400_000 < 31
    assert "expired" in facts(authority.issue("old", begins_days=-3, days=-1)).error
    mixed = authority.issue("one")._replace(key_file=authority.issue("two").key_file)
    assert "cannot be used together" in facts(mixed).error
    (partly,) = tls_certificates({"replication.tls_cert_file": "/c.pem"})
    assert "tls_key_file" in partly.error and partly.hint
    assert tls_certificates({}) == []


def test_the_machine_tells_what_bounds_a_process() -> None:
    facts = machine_facts()
    assert facts.release == VERSION and facts.pid == os.getpid()
    assert 0 < facts.open_files <= facts.open_files_limit <= facts.open_files_hard_limit
    assert 0 < facts.resident_bytes < facts.usable_memory_bytes <= facts.memory_bytes


async def test_stacks_show_where_each_task_waits_and_no_value() -> None:
    async def inner(password: str) -> None:
        assert password
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner("do-not-show")

    task = asyncio.create_task(outer(), name="the-waiter")
    await asyncio.sleep(0)
    told = stacks()
    (found,) = [each for each in told["tasks"] if each["name"] == "the-waiter"]
    assert found["does"].endswith("outer")
    places = [each.rpartition(" ")[2] for each in found["stack"]]
    assert [each.rpartition(".")[2] for each in places[:3]] == ["outer", "inner", "wait"]
    assert any(each["name"] == "MainThread" and each["stack"] for each in told["threads"])
    assert "do-not-show" not in str(told)
    task.cancel()


# --- addresses -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(answer: Callable[[bytes], bytes | None]) -> AsyncIterator[int]:
    """A server that answers with what `answer` returns of the first bytes, and then closes; None: it stays silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = answer(await reader.read(4096))
        if said is None:
            await reader.read()
        else:
            writer.write(said)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


class Timeless(SystemClock):
    """A clock that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000

    def time_ms(self) -> int:
        return self.now_ms


async def tried(kind: AddressKind, port: int, host: str = "127.0.0.1", node: int = 2) -> AddressTry:
    (found,) = await Tries(TcpNetwork(), Timeless()).run([NodeAddress(kind, node, host, port)])
    return found


def kafka_answer(request: bytes) -> bytes:
    """An answer to ApiVersions v0: the correlation id of the request, no error, no API."""
    assert request[4:8] == b"\x00\x12\x00\x00"
    body = request[8:12] + b"\x00\x00" + b"\x00\x00\x00\x00"
    return len(body).to_bytes(4, "big") + body


def http_answer(body: str) -> Callable[[bytes], bytes]:
    def answer(request: bytes) -> bytes:
        assert request.startswith(b"GET /clock HTTP/1.1\r\n")
        return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{body}".encode()

    return answer


async def test_what_answers_as_it_should_is_well_and_tells_its_time() -> None:
    async with listening(kafka_answer) as port:
        assert (await tried("kafka", port)).outcome == "ok"
    async with listening(http_answer('{"node": 2, "cluster_id": "c", "time_ms": 1500}')) as port:
        found = await tried("admin", port)
        assert found.outcome == "ok" and found.clock is not None
        assert (found.clock.before_ms, found.clock.told_ms, found.clock.after_ms) == (1_000, 1_500, 1_000)
    async with listening(lambda _data: None) as port:
        assert (await tried("peer", port)).outcome == "ok"  # a peer asks for a proof before it says anything


async def test_an_address_where_nothing_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: refuses connections
        found = await tried("kafka", taken.getsockname()[1])
    assert found.outcome == "refused" and "cannot connect to 127.0.0.1" in found.detail


async def test_another_program_or_node_at_an_address_is_called_wrong() -> None:
    async with listening(lambda _data: b"220 mail.example.org ESMTP\r\n") as port:
        found = await tried("kafka", port)
        assert found.outcome == "wrong" and "220 mail" in found.detail
        assert (await tried("admin", port)).outcome == "wrong"
    async with listening(http_answer('{"node": 3, "time_ms": 1}')) as port:
        found = await tried("admin", port)
        assert (found.outcome, found.detail) == ("wrong", "node 3 answers there")
    async with listening(http_answer('{"node": "2", "time_ms": null}')) as port:
        assert (await tried("admin", port)).outcome == "wrong"
    async with listening(lambda _data: b"") as port:
        found = await tried("kafka", port)
        assert found.outcome == "wrong" and "closes the connection" in found.detail


async def test_a_listener_that_says_nothing_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidelog.runtime.facts.reach.TRY_S", 0.2)
    async with listening(lambda _data: None) as port:
        assert (await tried("kafka", port)).outcome == "silent"
        assert (await tried("admin", port)).outcome == "silent"


async def test_a_name_without_an_address_is_unresolved() -> None:
    assert (await tried("kafka", 9092, NO_NAME)).outcome == "unresolved"


class Failing:
    """A network on which every connection fails as the system would have it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def listen(self, factory: ProtocolFactory, host: str, port: int) -> Listener:
        raise AssertionError

    async def connect(self, factory: ProtocolFactory, host: str, port: int, *, timeout_s: float) -> Any:
        try:
            raise self._error
        except Exception as error:
            raise cannot_connect(host, port, error) from error


@pytest.mark.parametrize(
    ("error", "outcome"), [(TimeoutError(), "timeout"), (OSError(113, "No route to host"), "unreachable")]
)
async def test_other_failures_are_told_apart(error: Exception, outcome: str) -> None:
    (found,) = await Tries(Failing(error), SystemClock()).run([NodeAddress("kafka", 2, "10.0.0.9", 9092)])
    assert found.outcome == outcome and "10.0.0.9:9092" in found.detail
    assert isinstance(cannot_connect("h", 1, error), Unavailable)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert str(NodeAddress("kafka", 1, "fe80::1", 9092)) == "[fe80::1]:9092"


async def test_a_disk_that_hangs_is_told_as_such_and_takes_one_thread_however_often_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor waited two minutes for it, and ended well: what was not looked at is no problem to it."""
    monkeypatch.setattr(disk, "HANGS_S", 0.2)
    monkeypatch.setattr(disk, "BUDGET_S", 0.01)
    (tmp_path / "wal").mkdir()
    probes = DiskProbes([tmp_path, tmp_path / "wal"], CLOCK)
    before = threading.active_count()
    with hung_syncs(monkeypatch, str(tmp_path)) as go_on:
        for _ in range(3):
            found = await probes.run()
            assert [(each.path, each.error.endswith("the disk hangs")) for each in found] == [
                (str(tmp_path), True),
                (str(tmp_path / "wal"), True),
            ]
            assert [each.check for each in judge_disk("broker 1", found[0], None)] == ["disk.unusable"]
        assert threading.active_count() == before + 1
        go_on.set()
        async with asyncio.timeout(20):
            while (found := await probes.run())[0].error:
                continue
    (facts,) = found
    assert facts.syncs >= LEAST_SYNCS and facts.holds == [str(tmp_path), str(tmp_path / "wal")]


async def test_a_checkup_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "HANGS_S", 0.2)

    async def nobody(_address: str) -> dict[str, Any]:
        raise Unavailable("nobody")

    checkup = Checkup(CheckupWorld(1, [], TcpNetwork(), CLOCK, Image, list, nobody, own=OwnFacts(folders=[tmp_path])))
    with hung_syncs(monkeypatch, str(tmp_path)):
        async with asyncio.timeout(20):
            (found,) = (await checkup.run()).disks
    assert found.error.endswith("the disk hangs")
