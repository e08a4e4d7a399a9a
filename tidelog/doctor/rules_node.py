"""What is to be thought of one node's machine: disks, files with secrets, certificates, limits, ports.

Entry: `judge_node`; one function for each kind of fact.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import Final

from tidelog.config import Config
from tidelog.controller.rpc.secret import MIN_SECRET_BYTES
from tidelog.doctor.facts import DirectoryFacts, NodeView, PortFacts
from tidelog.doctor.findings import DoctorFinding, found, ok
from tidelog.runtime.facts.certificates import CertificateFacts
from tidelog.runtime.facts.disk import DiskFacts
from tidelog.runtime.facts.files import FileFacts
from tidelog.runtime.facts.machine import MachineFacts
from tidelog.runtime.open_files import RESERVED, connections_that_fit
from tidelog.runtime.tls import EXPIRY_WARNING_S

MIB: Final = 1 << 20
IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
CONTAINER_LAYERS: Final = frozenset({"overlay", "aufs"})
NETWORKED: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre"})
SLOW_P99_MS: Final = 50.0
VERY_SLOW_P99_MS: Final = 500.0
IMPLAUSIBLE_P50_MS: Final = 0.01
"""The write to the device and its answer take longer; what is faster was never sent."""
FULL_BYTES: Final = 128 * MIB
"""Room for a file of the WAL, and for the controller's journal and snapshot."""
NO_ROOM: Final = frozenset(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))
"""What a disk says that takes nothing more, or nothing more of this user."""
FEW_FILES: Final = 1_000
LEAST_OPEN_FILES: Final = 2 * RESERVED
USED_SHARE: Final = 0.9
CLUSTER_SECRET: Final = "controller.secret_file"
DAY_MS: Final = 86_400_000


def judge_node(node: NodeView, now_ms: int) -> list[DoctorFinding]:
    """Judge everything that is known of one node but its configuration, its bucket and its neighbours."""
    findings: list[DoctorFinding] = []
    config = node.config
    if node.directory is not None:
        findings += judge_directory(node.where, node.directory, config, is_running=node.is_running)
    for disk in node.report.disks if node.report is not None else ():
        findings += judge_disk(node.where, disk, config)
    for port in node.ports:
        findings += judge_port(node.where, port)
    if node.told is not None:
        findings += judge_files(node.where, node.told.files)
        for certificate in node.told.certificates:
            findings += judge_certificate(node.where, certificate, now_ms)
        if node.told.machine is not None:
            findings += judge_limits(node.where, node.told.machine, config, is_running=node.is_running)
    return findings


def judge_tracing(node: NodeView) -> list[DoctorFinding]:
    """Judge whether a node that is not running could trace; of a running one the status tells."""
    endpoint = node.config.tracing.endpoint if node.config is not None else ""
    findings = []
    if node.tracing_needs:
        told = f"tracing.endpoint is {endpoint}, and {node.tracing_needs} is not installed"
        findings.append(found("config.tracing-library", node.where, told))
    if node.collector is not None:
        if node.collector.outcome == "ok":
            findings.append(ok("tracing.collector", node.where, f"the collector at {endpoint} accepts connections"))
        else:
            told = f"the collector at {endpoint}: {node.collector.detail or node.collector.outcome}"
            findings.append(found("tracing.unreachable", node.where, told))
    return findings


def judge_directory(
    where: str, facts: DirectoryFacts, config: Config | None, *, is_running: bool = False
) -> list[DoctorFinding]:
    """Judge the files that say whose a data directory is."""
    if facts.damage:
        return [found("data.damaged", where, facts.damage, cure=facts.hint)]
    if config is not None and config.node.id >= 0 and facts.node not in (-1, config.node.id):
        return [found("data.other-node", where, f"{facts.path} is broker {facts.node}'s, node.id is {config.node.id}")]
    held = f", in use by process {facts.holder}" if facts.holder else ", not in use"
    if facts.node < 0:
        return [ok("data.identity", where, f"{facts.path} is new{held}")]
    cluster = facts.cluster_id or "no cluster yet"
    return [ok("data.identity", where, f"{facts.path} is broker {facts.node}'s, of {cluster}{held}")]


def judge_disk(where: str, disk: DiskFacts, config: Config | None) -> list[DoctorFinding]:
    """Judge one file system that a node keeps data on."""
    name = disk.path if len(disk.holds) < 2 else f"{disk.path} (with {', '.join(disk.holds[1:])})"
    if disk.error in NO_ROOM:
        few = [each for each in _room(where, name, disk, config) if each.check == "disk.few-files"]
        return [found("disk.full", where, f"{name}: {disk.error}"), *few]
    if disk.error:
        return [found("disk.unusable", where, f"{name}: {disk.error}")]
    findings = _kind_of_disk(where, name, disk) + _room(where, name, disk, config)
    told = f"{name}, {disk.file_system or 'unknown'}: sync p50 {disk.p50_ms:.2f} ms, p99 {disk.p99_ms:.2f} ms"
    told += f" ({disk.syncs} syncs)"
    if disk.file_system in IN_MEMORY:
        pass  # its syncs say nothing
    elif disk.p99_ms >= VERY_SLOW_P99_MS:
        findings.append(found("disk.sync-very-slow", where, told))
    elif disk.p99_ms >= SLOW_P99_MS:
        findings.append(found("disk.sync-slow", where, told))
    elif disk.syncs and disk.p50_ms < IMPLAUSIBLE_P50_MS:
        findings.append(found("disk.sync-implausible", where, told))
    else:
        findings.append(ok("disk.sync", where, told))
    if disk.exists and disk.mode & 0o077:
        findings.append(found("disk.open-to-others", where, f"{disk.path} has mode {disk.mode & 0o777:o}"))
    return findings


def _kind_of_disk(where: str, name: str, disk: DiskFacts) -> list[DoctorFinding]:
    told = f"{name} is on {disk.file_system}"
    if disk.file_system in IN_MEMORY:
        return [found("disk.in-memory", where, told)]
    if disk.file_system in CONTAINER_LAYERS:
        return [found("disk.container-layer", where, told)]
    if disk.file_system in NETWORKED or disk.file_system.startswith("fuse."):
        return [found("disk.network", where, told)]
    return []


def _room(where: str, name: str, disk: DiskFacts, config: Config | None) -> list[DoctorFinding]:
    findings = []
    told = f"{name}: {disk.free_bytes // MIB} MiB free of {disk.total_bytes // MIB} MiB"
    needed = config.wal.max_bytes if config is not None and config.wal.kind == "disk" else 0
    if disk.free_bytes < FULL_BYTES:
        findings.append(found("disk.full", where, told))
    elif disk.free_bytes < needed:
        findings.append(found("disk.nearly-full", where, f"{told}; wal.max_bytes is {needed // MIB} MiB"))
    else:
        findings.append(ok("disk.room", where, told))
    if 0 <= disk.free_files < FEW_FILES:
        findings.append(found("disk.few-files", where, f"{name}: {disk.free_files} inodes free"))
    return findings


def judge_port(where: str, port: PortFacts) -> list[DoctorFinding]:
    """Judge a port of a node that does not run."""
    told = f"{port.host}:{port.port} ({port.setting})"
    if port.is_taken:
        return [found("port.in-use", where, f"{told}: {port.error}")]
    if port.error:
        return [found("port.host", where, f"{told}: {port.error}")]
    return [ok("port.free", where, told)]


def judge_files(where: str, files: Iterable[FileFacts]) -> list[DoctorFinding]:
    """Judge the files with secrets."""
    findings = []
    for file in files:
        told = f"{file.path} ({file.setting})"
        if file.error or not file.is_readable:
            findings.append(found("secret.unreadable", where, f"{told}: {file.error or 'it may not be read'}"))
        elif file.size < (MIN_SECRET_BYTES if file.setting == CLUSTER_SECRET else 1):
            findings.append(found("secret.short", where, f"{told} has {file.size} bytes"))
        elif file.open_to_others:
            check = "secret.open" if file.setting == CLUSTER_SECRET else "secret.key-open"
            findings.append(found(check, where, f"{told} has mode {file.mode:o}", cure=f"chmod 600 {file.path}"))
        else:
            findings.append(ok("secret.mode", where, f"{told} has mode {file.mode:o}"))
    return findings


def judge_certificate(where: str, facts: CertificateFacts, now_ms: int) -> list[DoctorFinding]:
    """Judge a certificate for connections between brokers, and its authority."""
    if facts.error:
        check = "tls.expired" if "expired" in facts.error else "tls.unusable"
        return [found(check, where, facts.error, cure=facts.hint if check == "tls.unusable" else "")]
    findings = []
    for file, expires_ms in ((facts.cert_file, facts.expires_ms), (facts.ca_file, facts.ca_expires_ms)):
        if not expires_ms:
            continue
        days = (expires_ms - now_ms) / DAY_MS
        if days <= 0:
            findings.append(found("tls.expired", where, f"{file} expired {-days:.1f} days ago"))
        elif days < EXPIRY_WARNING_S * 1000 / DAY_MS:
            findings.append(found("tls.expires-soon", where, f"{file} expires in {days:.1f} days"))
        else:
            findings.append(ok("tls.expiry", where, f"{file} expires in {days:.0f} days"))
    return findings


def judge_limits(
    where: str, machine: MachineFacts, config: Config | None, *, is_running: bool = False
) -> list[DoctorFinding]:
    """Judge what the system allows the process. The memory that the configuration wants is judged with it."""
    findings = []
    limit = machine.open_files_hard_limit  # a broker raises its limit to it
    wanted = config.kafka.max_connections if config is not None and "broker" in config.node.roles else 0
    fitting = connections_that_fit(limit, wanted)
    if limit < LEAST_OPEN_FILES:
        findings.append(found("limits.open-files-low", where, f"at most {limit} open files"))
    elif is_running and machine.open_files > USED_SHARE * machine.open_files_limit:
        told = f"{machine.open_files} of {machine.open_files_limit} open files are used"
        findings.append(found("limits.open-files-used", where, told))
    elif fitting < wanted:
        told = f"at most {limit} open files leave {fitting} connections; kafka.max_connections is {wanted}"
        findings.append(found("limits.open-files", where, told))
    else:
        findings.append(ok("limits.open-files", where, f"at most {limit} open files"))
    memory = machine.usable_memory_bytes
    if is_running and memory and machine.resident_bytes > USED_SHARE * memory:
        told = f"the process has {machine.resident_bytes // MIB} of {memory // MIB} MiB"
        findings.append(found("limits.memory-used", where, told))
    else:
        told = f"{machine.resident_bytes // MIB} of {memory // MIB} MiB" if is_running else f"{memory // MIB} MiB"
        findings.append(ok("limits.memory", where, f"memory: {told}"))
    return findings
