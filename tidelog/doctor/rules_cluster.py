"""What is to be thought of a running cluster: health, clocks, addresses, versions, settings that must agree.

Entry: `judge_cluster`; one function for each kind of fact.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from tidelog.doctor.cures import cure_of
from tidelog.doctor.facts import ClusterView, NodeClock, NodeView
from tidelog.doctor.findings import DoctorFinding, found, ok
from tidelog.runtime.facts.reach import AddressTry, ClockSample

APART_MS: Final = 1_000
FAR_APART_MS: Final = 60_000
SAME_ON_CONTROLLERS: Final = frozenset(
    f"controller.{name}"
    for name in (
        "session_timeout_ms",
        "startup_timeout_ms",
        "reelect_timeout_ms",
        "replica_repair_after_ms",
        "preferred_master_enable",
        "replica_balance_enable",
        "read_grace_ms",
        "lease_max_hold_ms",
    )
)
SAME_SECTIONS: Final = ("balancer.", "scale.")
BUCKET_KEYS: Final = ("s3.endpoint", "s3.bucket", "s3.prefix")
CLUSTER: Final = "cluster"
HERE: Final = "this machine"
OLDER: Final = "an older release"


def judge_cluster(cluster: ClusterView, nodes: Sequence[NodeView]) -> list[DoctorFinding]:
    """Judge a cluster, by what one of its brokers and all nodes that answered have told."""
    if cluster.error:
        check = "cluster.unreachable" if cluster.is_named else "cluster.not-asked"
        return [found(check, cluster.bootstrap, cluster.error, cure=cluster.hint)]
    running = [each for each in nodes if each.is_running]
    return [
        *judge_status(cluster.status),
        *judge_silence(cluster, running),
        *judge_clocks(cluster.clocks, running),
        *judge_addresses(cluster, running),
        *judge_controllers(running),
        *judge_members(cluster, running),
        *judge_agreement(running),
    ]


def judge_status(status: dict[str, Any]) -> list[DoctorFinding]:
    """Take over what the cluster tells of itself."""
    problems = status.get("problems", [])
    if not problems:
        return [ok("health.status", CLUSTER, f"{len(status.get('nodes', []))} nodes, no problems")]
    return [found("health.problem", CLUSTER, each, cure=cure_of(each)) for each in problems]


def judge_silence(cluster: ClusterView, nodes: Iterable[NodeView]) -> list[DoctorFinding]:
    """Tell what could not be asked."""
    findings = [found("node.silent", f"broker {node}", error) for node, error in cluster.silent.items()]
    nodes = list(nodes)
    if (without := [each.where for each in nodes if each.no_token]) and without:
        findings.append(found("cluster.no-token", CLUSTER, f"no token for {', '.join(without)}"))
    for node in nodes:
        if node.is_older:
            findings.append(found("node.older", node.where, "it does not know the question"))
        findings += [found("node.not-examined", node.where, each) for each in node.missing]
    return findings


class _Interval(NamedTuple):
    """Between what a clock is ahead of this machine's, in ms: the time that the question took makes it uncertain."""

    least: int
    most: int

    @classmethod
    def of(cls, sample: ClockSample, base: _Interval | None = None) -> _Interval:
        start = base or cls(0, 0)
        return cls(start.least + sample.told_ms - sample.after_ms, start.most + sample.told_ms - sample.before_ms)

    @property
    def width(self) -> int:
        return self.most - self.least


def judge_clocks(clocks: Iterable[NodeClock], nodes: Sequence[NodeView]) -> list[DoctorFinding]:
    """Compare the clocks of all nodes with each other, as certainly as the round trips allow."""
    known = {each.node: _Interval.of(each.sample) for each in clocks}
    brokers = {each.id for each in nodes if each.told is not None and "broker" in each.told.roles}
    for node in nodes:
        base = known.get(node.where)
        for one in node.report.controllers if node.report is not None and base is not None else ():
            if one.clock is None or one.node in brokers:
                continue
            name, seen = f"controller {one.node}", _Interval.of(one.clock, base)
            if name not in known or seen.width < known[name].width:
                known[name] = seen
    if len(known) < 2:
        return []
    ahead = max(known, key=lambda each: known[each].least)
    behind = min(known, key=lambda each: known[each].most)
    apart_ms = known[ahead].least - known[behind].most
    if apart_ms >= APART_MS:
        check = "clock.far-apart" if apart_ms >= FAR_APART_MS else "clock.apart"
        return [found(check, CLUSTER, f"the clock of {ahead} is {apart_ms / 1000:.1f} s ahead of that of {behind}")]
    most_ms = max(one.most - other.least for one, other in itertools.permutations(known.values(), 2))
    return [ok("clock.together", CLUSTER, f"the clocks of {len(known)} nodes are at most {most_ms} ms apart")]


def judge_addresses(cluster: ClusterView, nodes: Sequence[NodeView]) -> list[DoctorFinding]:
    """Judge each broker's addresses as the others see them, and as this machine does."""
    older = {each.id for each in nodes if each.is_older}
    seen_by: dict[tuple[str, int, str], dict[str, AddressTry]] = defaultdict(dict)
    for node in nodes:
        for one in node.report.addresses if node.report is not None else ():
            seen_by[one.kind, one.node, one.address][node.where] = one
    findings: list[DoctorFinding] = []
    for (kind, node_id, address), by_node in seen_by.items():
        bad = {where: one for where, one in by_node.items() if not _is_well(one, older)}
        if not bad:
            continue
        first = next(iter(bad.values()))
        told = f"{', '.join(bad)}: the {kind} address {address} of broker {node_id}: {first.detail or first.outcome}"
        findings.append(found(f"reach.{first.outcome}", f"broker {node_id}", told))
    findings += _from_here(cluster.from_here, seen_by, older)
    tried = sum(map(len, seen_by.values())) + len(cluster.from_here)
    if tried and not findings:
        findings.append(ok("reach.addresses", CLUSTER, f"{tried} tries of advertised addresses, all answered"))
    return findings


def _is_well(one: AddressTry, older: set[int]) -> bool:
    return one.outcome == "ok" or (one.outcome == "wrong" and one.kind == "admin" and one.node in older)


def _from_here(
    tries: Iterable[AddressTry], seen_by: dict[tuple[str, int, str], dict[str, AddressTry]], older: set[int]
) -> list[DoctorFinding]:
    findings = []
    for one in tries:
        others = seen_by.get((one.kind, one.node, one.address), {}).values()
        if _is_well(one, older) or any(not _is_well(each, older) for each in others):
            continue  # what the other nodes do not reach is told as that
        told = f"from {HERE}: the {one.kind} address {one.address}: {one.detail or one.outcome}"
        findings.append(found("reach.from-here" if others else f"reach.{one.outcome}", f"broker {one.node}", told))
    return findings


def judge_controllers(nodes: Iterable[NodeView]) -> list[DoctorFinding]:
    """Judge whether each node reaches each controller; one that nobody reaches is in the cluster's own problems."""
    reached: dict[int, list[str]] = defaultdict(list)
    missed: dict[int, dict[str, str]] = defaultdict(dict)
    for node in nodes:
        for one in node.report.controllers if node.report is not None else ():
            if one.error:
                missed[one.node][node.where] = one.error
            else:
                reached[one.node].append(node.where)
    return [
        found("reach.controller", where, f"controller {controller}: {error}")
        for controller, by_node in missed.items()
        if reached[controller]
        for where, error in by_node.items()
    ]


def judge_members(cluster: ClusterView, nodes: Sequence[NodeView]) -> list[DoctorFinding]:
    """Judge versions and the feature level."""
    releases: dict[str, str] = {}
    for node in nodes:
        if node.is_older:
            releases[node.where] = OLDER
        elif node.told is not None and node.told.machine is not None:
            releases[node.where] = node.told.machine.release
        for one in node.report.controllers if node.report is not None else ():
            if one.release:
                releases.setdefault(f"controller {one.node}", one.release)
    findings = []
    if len(set(releases.values())) > 1:
        told = ", ".join(f"{name}: {release}" for name, release in releases.items())
        findings.append(found("members.versions", CLUSTER, told))
    elif releases:
        release = next(iter(releases.values()))
        findings.append(ok("members.versions", CLUSTER, f"{len(releases)} members run {release}"))
    if cluster.levels_error:
        return [*findings, found("members.level-unknown", CLUSTER, cluster.levels_error)]
    return findings + _levels(cluster.levels)


def _levels(levels: dict[str, Any]) -> list[DoctorFinding]:
    if not levels:
        return []
    level, target, newest = levels["level"], levels["target"], levels["newest"]
    if target > level:
        return [found("members.level", CLUSTER, f"level {level}; all members support {target}")]
    if newest > target:
        below = [f"{one['kind']} {one['id']}" for one in levels["members"] if one["problem"] or one["newest"] < newest]
        return [found("members.unable", CLUSTER, f"level {level} of {newest}; not supported by {', '.join(below)}")]
    return [ok("members.level", CLUSTER, f"level {level}, the newest")]


def judge_agreement(nodes: Sequence[NodeView]) -> list[DoctorFinding]:
    """Judge settings that must be the same on several nodes."""
    told = [each for each in nodes if each.told is not None and each.told.settings]
    values = {node.where: {each.key: each.value for each in node.told.settings} for node in told if node.told}
    controllers = [node.where for node in told if node.told is not None and "controller" in node.told.roles]
    brokers = [node.where for node in told if node.told is not None and "broker" in node.told.roles]
    findings = []
    for key in sorted({key for where in controllers for key in values[where] if _is_same(key)}):
        by_node = {where: values[where].get(key) for where in controllers}
        if len(set(map(str, by_node.values()))) > 1:
            shown = ", ".join(f"{where}: {value}" for where, value in by_node.items())
            findings.append(found("config.differs", CLUSTER, f"{key}: {shown}"))
    with_tls = [where for where in brokers if values[where].get("replication.tls_cert_file")]
    if with_tls and len(with_tls) < len(brokers):
        without = [where for where in brokers if where not in with_tls]
        findings.append(
            found("config.tls-mixed", CLUSTER, f"with TLS {', '.join(with_tls)}; without {', '.join(without)}")
        )
    traced = [where for where in brokers if values[where].get("tracing.endpoint")]
    if traced and len(traced) < len(brokers):
        without = [where for where in brokers if where not in traced]
        findings.append(
            found("config.tracing-mixed", CLUSTER, f"with traces {', '.join(traced)}; without {', '.join(without)}")
        )
    buckets = {where: tuple(str(values[where].get(key, "")) for key in BUCKET_KEYS) for where in values}
    if len(set(buckets.values())) > 1:
        shown = ", ".join(
            f"{where}: {' '.join(filter(None, bucket)) or 'embedded'}" for where, bucket in buckets.items()
        )
        findings.append(found("config.buckets-differ", CLUSTER, shown))
    return findings


def _is_same(key: str) -> bool:
    return key in SAME_ON_CONTROLLERS or key.startswith(SAME_SECTIONS)
