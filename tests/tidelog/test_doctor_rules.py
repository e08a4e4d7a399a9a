"""The judgements of `tidelog doctor`: each finding from facts that provoke it, and none from facts that are well.

That real faults make such facts is shown in `test_facts.py`, `test_doctor_here.py`, `test_bucket_rights.py` and
`test_doctor_cluster.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from tidelog.config import Config, examine
from tidelog.controller.checkup import CheckupReport, ControllerTry
from tidelog.doctor.advice import ADVICE
from tidelog.doctor.facts import ClusterView, DirectoryFacts, Facts, NodeClock, NodeView, PortFacts
from tidelog.doctor.findings import DoctorFinding, count, found, in_order, ok
from tidelog.doctor.judge import judge
from tidelog.doctor.rules_bucket import judge_rights
from tidelog.doctor.rules_config import judge_config, judge_errors
from tidelog.doctor.rules_node import (
    DAY_MS,
    judge_certificate,
    judge_directory,
    judge_disk,
    judge_files,
    judge_limits,
    judge_port,
    judge_tracing,
)
from tidelog.runtime.facts.certificates import CertificateFacts
from tidelog.runtime.facts.disk import DiskFacts
from tidelog.runtime.facts.files import FileFacts
from tidelog.runtime.facts.machine import MachineFacts
from tidelog.runtime.facts.node import NodeFacts, SettingFacts
from tidelog.runtime.facts.reach import AddressTry, ClockSample
from tidelog.storage.bucket.rights import RightsFacts, RightTry

GIB = 1 << 30
MEMBERS = "1@10.0.0.1:9193,2@10.0.0.2:9193,3@10.0.0.3:9193"
NOW_MS = 1_700_000_000_000

Provoke = Callable[[], Sequence[DoctorFinding]]


def configured(memory_bytes: int = 0, **settings: Any) -> Provoke:
    """The configuration with these settings; `section__key=value`."""

    def judged() -> list[DoctorFinding]:
        flags = [(key.replace("__", ".", 1), value) for key, value in settings.items()]
        loaded, errors = examine(flags=flags)
        return [*judge_errors(errors, "here"), *judge_config("here", loaded.config, loaded.sources, memory_bytes)]

    return judged


DISK = DiskFacts(
    path="/data",
    probed="/data",
    holds=["/data"],
    file_system="ext4",
    mode=0o700,
    free_bytes=100 * GIB,
    total_bytes=200 * GIB,
    free_files=1_000_000,
    syncs=100,
    p50_ms=0.5,
    p99_ms=2.0,
    max_ms=3.0,
)
FILE = FileFacts(setting="controller.secret_file", path="/secret", mode=0o600, size=64, is_readable=True, is_own=True)
MACHINE = MachineFacts(
    release="1.0",
    python="CPython 3.11",
    system="Linux",
    host_name="h",
    pid=1,
    uid=0,
    processors=2,
    memory_bytes=8 * GIB,
    memory_limit_bytes=0,
    resident_bytes=GIB,
    open_files=100,
    open_files_limit=65_536,
    open_files_hard_limit=65_536,
)
CERTIFICATE = CertificateFacts(
    section="replication",
    cert_file="/b.pem",
    ca_file="/ca.pem",
    expires_ms=NOW_MS + 100 * DAY_MS,
    ca_expires_ms=NOW_MS + 900 * DAY_MS,
)
PORT = PortFacts(setting="kafka.port", host="127.0.0.1", port=9092)
replace = msgspec.structs.replace


def disk(**facts: Any) -> Provoke:
    return lambda: judge_disk("here", replace(DISK, **facts), Config())


def file(**facts: Any) -> Provoke:
    return lambda: judge_files("here", [replace(FILE, **facts)])


def machine(*, is_running: bool = True, **facts: Any) -> Provoke:
    return lambda: judge_limits("here", replace(MACHINE, **facts), Config(), is_running=is_running)


def certificate(**facts: Any) -> Provoke:
    return lambda: judge_certificate("here", replace(CERTIFICATE, **facts), NOW_MS)


def directory(config: Config | None = None, **facts: Any) -> Provoke:
    return lambda: judge_directory("here", DirectoryFacts(path="/data", **facts), config)


def tried(right: Any = "put", outcome: Any = "ok", took_ms: float = 5.0, **more: Any) -> Provoke:
    """One try in the bucket; `more`: of `RightsFacts` and of `judge_rights`."""

    def judged() -> list[DoctorFinding]:
        judging = {name: more[name] for name in ("wal_in_bucket", "may_create") if name in more}
        facts = {name: value for name, value in more.items() if name not in judging}
        one = RightTry(right=right, outcome=outcome, took_ms=took_ms, detail="as the server says")
        return judge_rights("here", RightsFacts(url="s3://b/", tries=[one], **facts), **judging)

    return judged


# --- clusters --------------------------------------------------------------------------------------------------------


def node(node_id: int, *tries: AddressTry, settings: dict[str, Any] | None = None, **view: Any) -> NodeView:
    told = NodeFacts(
        node=node_id,
        roles=["controller", "broker"],
        machine=view.pop("machine", MACHINE),
        settings=[SettingFacts(key, value, "file x") for key, value in (settings or {}).items()],
    )
    report = CheckupReport(node=node_id, addresses=list(tries), controllers=view.pop("controllers", []))
    return NodeView(**{"where": f"broker {node_id}", "told": told, "report": report, **view})


def reach(outcome: Any = "ok", node_id: int = 2, kind: Any = "kafka") -> AddressTry:
    return AddressTry(kind=kind, node=node_id, address="h:9092", outcome=outcome, detail=f"it is {outcome}")


def cluster(*nodes: NodeView, **view: Any) -> Provoke:
    status = {"nodes": [{"id": each.id} for each in nodes], "problems": view.pop("problems", [])}
    asked = ClusterView(bootstrap="h:1", status=status, **view)
    return lambda: judge(Facts(nodes=list(nodes), cluster=asked, now_ms=NOW_MS))


def clocks(*offsets_ms: int, round_trip_ms: int = 10) -> dict[str, Any]:
    return {
        "clocks": [
            NodeClock(f"broker {at}", ClockSample(NOW_MS, NOW_MS + offset + round_trip_ms // 2, NOW_MS + round_trip_ms))
            for at, offset in enumerate(offsets_ms, 1)
        ]
    }


def levels(level: int, target: int, newest: int) -> dict[str, Any]:
    members = [
        {"kind": "broker", "id": 1, "newest": newest, "problem": ""},
        {"kind": "broker", "id": 2, "newest": target, "problem": ""},
    ]
    return {"levels": {"level": level, "target": target, "newest": newest, "members": members}}


def controller(node_id: int, error: str = "", **more: Any) -> ControllerTry:
    return ControllerTry(node=node_id, address="h:9193", error=error, **more)


OLDER = replace(MACHINE, release="0.9")
OLD_NODE = NodeView(where="broker 2", asked_id=2, is_older=True)

PROVOKED: list[tuple[str, Provoke]] = [
    ("config.unreadable", lambda: judge_errors(_errors_of_file(), "here")),
    ("config.unknown-key", configured(wal__flsh="sync")),
    ("config.invalid-value", configured(kafka__port=70_000)),
    ("config.at-bound", configured(wal__flush_interval_ms=60_000)),
    ("config.at-bound", configured(cache__log_bytes=4 << 20, upload__size_bytes=1 << 20)),
    ("config.memory-wal", configured(wal__kind="memory")),
    ("config.async-flush", configured(wal__flush="async")),
    ("config.replicas-need-disk", configured(replication__total_replicas=3, wal__kind="s3")),
    ("config.secret-missing", configured(replication__total_replicas=3)),
    ("config.secret-missing", configured(controller__members=MEMBERS)),
    ("config.secret-missing", configured(admin__host="10.0.0.1")),
    ("config.quorum-too-large", configured(replication__total_replicas=3, replication__in_sync_replicas=4)),
    ("config.single-ack", configured(replication__total_replicas=3, replication__in_sync_replicas=1)),
    ("config.even-replicas", configured(replication__total_replicas=2)),
    (
        "config.degrades-to-one",
        configured(replication__total_replicas=3, replication__enable_auto_in_sync_replicas=True),
    ),
    ("config.quorum-size", configured(controller__members="1@h:1,2@h:2")),
    ("config.heartbeat", configured(controller__session_timeout_ms=2_000)),
    ("config.memory-exceeded", configured(GIB // 2)),
    ("config.memory-tight", configured(2 * GIB)),
    ("config.upload-larger-than-cache", configured(cache__log_bytes=64 << 20)),
    ("config.wal-too-small", configured(wal__max_bytes=64 << 20)),
    ("config.message-too-large", configured(kafka__message_max_bytes=200 << 20)),
    ("config.any-address", configured(kafka__host="0.0.0.0")),
    ("config.loopback-advertised", configured(controller__members=MEMBERS)),
    ("config.admin-unreachable", configured(kafka__host="10.0.0.1")),
    ("config.plain-http", configured(s3__endpoint="http://10.0.0.9:9000", s3__bucket="b")),
    ("config.tracing-plain-http", configured(tracing__endpoint="http://10.0.0.9:4318")),
    ("config.tracing-much", configured(tracing__endpoint="https://c:4318", tracing__sample_ratio=1)),
    (
        "config.tracing-mixed",
        cluster(node(1, settings={"tracing.endpoint": "http://c:4318"}), node(2, settings={"wal.kind": "disk"})),
    ),
    ("config.tracing-library", lambda: judge_tracing(NodeView(where="here", tracing_needs="opentelemetry.sdk"))),
    (
        "tracing.unreachable",
        lambda: judge_tracing(NodeView(where="here", collector=reach("refused", kind="collector"))),
    ),
    ("config.embedded-shared", configured(controller__members=MEMBERS)),
    ("config.orphan-age", configured(clean__orphan_age_ms=0)),
    ("config.exposed-secret", configured(s3__secret_access_key="hidden")),
    ("config.relative-directory", configured(controller__members=MEMBERS)),
    ("config.temporary-directory", configured(node__data_dir="/tmp/tidelog")),
    (
        "config.tls-mixed",
        cluster(node(1, settings={"replication.tls_cert_file": "/c.pem"}), node(2, settings={"wal.kind": "disk"})),
    ),
    ("config.differs", cluster(node(1, settings={"balancer.mode": "on"}), node(2, settings={"balancer.mode": "off"}))),
    ("config.buckets-differ", cluster(node(1, settings={"s3.bucket": "a"}), node(2, settings={"s3.bucket": "b"}))),
    ("disk.unusable", disk(error="Read-only file system")),
    ("disk.in-memory", disk(file_system="tmpfs", p50_ms=0.001)),
    ("disk.container-layer", disk(file_system="overlay")),
    ("disk.network", disk(file_system="nfs4")),
    ("disk.network", disk(file_system="fuse.sshfs")),
    ("disk.sync-slow", disk(p99_ms=80.0)),
    ("disk.sync-very-slow", disk(p99_ms=900.0)),
    ("disk.sync-implausible", disk(p50_ms=0.002)),
    ("disk.full", disk(free_bytes=1 << 20)),
    ("disk.nearly-full", disk(free_bytes=GIB)),
    ("disk.few-files", disk(free_files=3)),
    ("disk.open-to-others", disk(mode=0o755)),
    ("data.damaged", directory(damage="identity.json at byte 0: it is damaged", hint="restore it")),
    ("data.other-node", directory(examine(flags=[("node.id", 7)])[0].config, node=3)),
    ("port.in-use", lambda: judge_port("here", replace(PORT, error="Address already in use", is_taken=True))),
    ("port.host", lambda: judge_port("here", replace(PORT, error="Cannot assign requested address"))),
    ("secret.unreadable", file(error="No such file or directory")),
    ("secret.unreadable", file(is_readable=False)),
    ("secret.short", file(size=3)),
    ("secret.short", file(setting="s3.secret_access_key_file", size=0)),
    ("secret.open", file(mode=0o644)),
    ("secret.key-open", file(setting="s3.secret_access_key_file", mode=0o640)),
    ("tls.unusable", certificate(error="the key does not belong to it", hint="take the key that does")),
    ("tls.expired", certificate(error="certificate has expired")),
    ("tls.expired", certificate(ca_expires_ms=NOW_MS - DAY_MS)),
    ("tls.expires-soon", certificate(expires_ms=NOW_MS + 3 * DAY_MS)),
    ("limits.open-files", machine(open_files_limit=4_096, open_files_hard_limit=4_096)),
    ("limits.open-files-low", machine(open_files_limit=256, open_files_hard_limit=256)),
    ("limits.open-files-used", machine(open_files=65_000)),
    ("limits.memory-used", machine(memory_limit_bytes=GIB)),
    ("bucket.settings", lambda: judge(Facts(nodes=[NodeView(where="here", bucket_error="s3.bucket is not set")]))),
    ("bucket.denied", tried("list", "denied")),
    ("bucket.missing", tried(outcome="no-bucket")),
    ("bucket.to-be-created", tried(outcome="no-bucket", may_create=True)),
    ("bucket.wrong-region", tried(outcome="wrong-region")),
    ("bucket.unreachable", tried(outcome="unreachable")),
    ("bucket.timeout", tried(outcome="timeout")),
    ("bucket.refused", tried(outcome="refused")),
    ("bucket.short", tried("get", "short")),
    ("bucket.wrong-bytes", tried("ranged get", "wrong-bytes")),
    ("bucket.stale", tried("list", "stale")),
    ("bucket.unsupported", tried("ranged get", "unsupported")),
    ("bucket.cannot-fence", tried("conditional put", "unsupported", wal_in_bucket=True)),
    ("bucket.no-conditions", tried("conditional put", "unsupported")),
    ("bucket.no-clean-up", tried("multipart list", "denied")),
    ("bucket.no-clean-up", tried("multipart abort", "denied")),
    ("bucket.slow", tried(took_ms=2_500)),
    ("bucket.clock", tried(server_ms=NOW_MS, here_ms=NOW_MS + 600_000)),
    ("bucket.leftover", tried(left_behind=["probe/doctor-1"])),
    ("cluster.unreachable", lambda: judge(Facts(cluster=ClusterView(bootstrap="h:1", error="refused")))),
    ("cluster.not-asked", lambda: judge(Facts(cluster=ClusterView(bootstrap="h:1", error="refused", is_named=False)))),
    ("cluster.no-token", cluster(node(1, no_token=True))),
    ("node.silent", cluster(node(1), silent={2: "connection refused"})),
    ("node.older", cluster(OLD_NODE)),
    ("node.not-examined", cluster(node(1, missing=["its checkup: timed out"]))),
    ("clock.apart", cluster(node(1), node(2), **clocks(0, -3_000))),
    ("clock.far-apart", cluster(node(1), node(2), **clocks(90_000, 0))),
    ("reach.refused", cluster(node(1, reach("refused")), node(2))),
    ("reach.timeout", cluster(node(1, reach("timeout")), node(2))),
    ("reach.unresolved", cluster(node(1, reach("unresolved")), node(2))),
    ("reach.unreachable", cluster(node(1, reach("unreachable")), node(2))),
    ("reach.silent", cluster(node(1, reach("silent")), node(2))),
    ("reach.wrong", cluster(node(1, reach("wrong", kind="admin")), node(2))),
    ("reach.refused", cluster(node(2), from_here=[reach("refused")])),
    ("reach.from-here", cluster(node(1, reach()), node(2), from_here=[reach("timeout")])),
    (
        "reach.controller",
        cluster(node(1, controllers=[controller(3, "refused")]), node(2, controllers=[controller(3)])),
    ),
    ("members.versions", cluster(node(1), node(2, machine=OLDER))),
    ("members.versions", cluster(node(1, controllers=[controller(9, release="0.9")]))),
    ("members.versions", cluster(node(1), OLD_NODE)),
    ("members.level", cluster(node(1), **levels(3, 4, 4))),
    ("members.level-unknown", cluster(node(1), levels_error="broker 1: there is no method cluster.levels")),
    ("members.unable", cluster(node(1), **levels(3, 3, 4))),
    ("health.problem", cluster(node(1), problems=["broker 3 at h:9094 is dead"])),
]


def _errors_of_file() -> list[Any]:
    from pathlib import Path

    from tidelog.runtime.errors import ConfigError

    with pytest.raises(ConfigError) as missing:
        examine(Path("no-such-file.toml"))
    return [missing.value]


@pytest.mark.parametrize(("check", "provoke"), PROVOKED, ids=[check for check, _ in PROVOKED])
def test_each_finding_is_made_with_its_reason_and_its_cure(check: str, provoke: Provoke) -> None:
    made = [each for each in provoke() if each.check == check and each.level != "ok"]
    assert made, [each.check for each in provoke()]
    for each in made:
        assert each.level == ADVICE[check].level
        assert each.seen and each.where and each.why and each.cure


def test_every_finding_that_there_is_was_provoked() -> None:
    assert {check for check, _ in PROVOKED} == set(ADVICE)


WELL: list[Provoke] = [
    configured(8 * GIB),
    configured(
        8 * GIB,
        controller__members=MEMBERS,
        controller__secret_file="/etc/secret",
        kafka__host="10.0.0.1",
        admin__host="10.0.0.1",
        node__data_dir="/var/lib/tidelog",
        s3__endpoint="https://s3.example.org",
        s3__bucket="b",
        replication__total_replicas=3,
    ),
    disk(),
    disk(free_files=-1),
    file(),
    machine(),
    machine(is_running=False, open_files=65_000),
    certificate(),
    directory(node=3),
    directory(examine(flags=[("node.id", 3)])[0].config),
    lambda: judge_port("here", PORT),
    tried(),
    tried("get", "not-tried"),
    tried(server_ms=NOW_MS, here_ms=NOW_MS + 2_000),
    cluster(node(1, reach()), node(2), from_here=[reach()], **clocks(0, 40), **levels(4, 4, 4)),
    cluster(node(1, settings={"balancer.mode": "on"}), node(2, settings={"balancer.mode": "on"})),
    configured(8 * GIB, tracing__endpoint="http://127.0.0.1:4318"),
    lambda: judge_tracing(NodeView(where="here", config=Config(), collector=reach(kind="collector"))),
    cluster(node(1, settings={"tracing.endpoint": "c"}), node(2, settings={"tracing.endpoint": "c"})),
]


@pytest.mark.parametrize("provoke", WELL)
def test_what_is_well_is_told_as_such(provoke: Provoke) -> None:
    assert [each for each in provoke() if each.level != "ok"] == []


def test_a_clock_is_not_called_off_by_less_than_the_round_trips_prove() -> None:
    """A broker that answers after four seconds may have told its time at any moment of these."""
    slow = NodeClock("broker 2", ClockSample(NOW_MS, NOW_MS + 3_900, NOW_MS + 4_000))
    quick = NodeClock("broker 1", ClockSample(NOW_MS, NOW_MS + 1, NOW_MS + 2))
    findings = cluster(node(1), node(2), clocks=[quick, slow])()
    (told,) = [each for each in findings if each.check.startswith("clock.")]
    assert (told.check, told.level) == ("clock.together", "ok")
    assert "at most 3901 ms apart" in told.seen


def test_a_controller_alone_in_its_process_is_compared_by_way_of_a_broker() -> None:
    told = ClockSample(NOW_MS, NOW_MS + 70_000, NOW_MS + 2)
    first = node(1, controllers=[controller(9, clock=told)])
    findings = cluster(first, clocks=clocks(0)["clocks"])()
    (far,) = [each for each in findings if each.check == "clock.far-apart"]
    assert "controller 9" in far.seen and "broker 1" in far.seen


def test_an_address_that_several_do_not_reach_is_one_finding_that_names_them() -> None:
    findings = cluster(node(1, reach("refused")), node(3, reach("refused")), node(2), from_here=[reach("refused")])()
    (refused,) = [each for each in findings if each.check == "reach.refused"]
    assert "broker 1, broker 3" in refused.seen
    assert refused.where == "broker 2"


def test_an_older_broker_is_not_called_wrong_because_its_admin_http_knows_no_clock() -> None:
    for answering in (OLD_NODE, node(2, is_older=True)):
        findings = cluster(node(1, reach("wrong", kind="admin")), answering)()
        assert [each.check for each in findings if each.check.startswith("reach.") and each.level != "ok"] == []
    findings = cluster(node(1, reach("wrong", kind="admin")), node(2))()
    assert [each.check for each in findings if each.check.startswith("reach.") and each.level != "ok"]


def test_a_controller_that_nobody_reaches_is_told_by_the_cluster_itself_only() -> None:
    nodes = [node(each, controllers=[controller(3, "refused")]) for each in (1, 2)]
    findings = cluster(*nodes, problems=["controller 3 at h:9193 is away: refused"])()
    assert [each.check for each in findings if each.level == "problem"] == ["health.problem"]
    assert "start that process" in findings[0].cure


def test_a_secret_is_never_part_of_a_finding() -> None:
    told = configured(s3__secret_access_key="do-not-show-me", s3__access_key_id="id")()
    assert "do-not-show-me" not in str(told)


def test_the_gravest_findings_come_first_and_equal_ones_once() -> None:
    made = [
        ok("x", "here", "well"),
        found("cluster.not-asked", "here", "?"),
        found("disk.full", "here", "!"),
        found("disk.full", "here", "!"),
        found("disk.sync-slow", "here", "~"),
    ]
    assert [each.level for each in in_order(made)] == ["problem", "warning", "unknown", "ok"]
    assert count(in_order(made)) == {"problem": 1, "warning": 1, "unknown": 1, "ok": 1}


def test_the_hint_of_a_denial_beats_the_policy_where_it_says_more() -> None:
    denied = RightTry(right="put", outcome="denied", detail="403", hint="set this machine's clock")
    (made,) = judge_rights("here", RightsFacts(url="s3://b/", tries=[denied]))
    assert made.cure == "set this machine's clock"
    denied = replace(denied, hint="check the credentials and that their policy allows the bucket")
    (made,) = judge_rights("here", RightsFacts(url="s3://b/", tries=[denied]))
    assert "s3:PutObject" in made.cure
