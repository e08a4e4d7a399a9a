"""What is to be thought of a configuration: unusable values, values at their bounds, dangerous combinations.

Entry: `judge_config`, `judge_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tidelog.config import SECRETS, Config
from tidelog.controller.model.addresses import is_address, split_address
from tidelog.doctor.findings import DoctorFinding, found, ok
from tidelog.process.listener import ANY_ADDRESS
from tidelog.process.node_base import LOOPBACK
from tidelog.runtime.errors import ConfigError

MIB: Final = 1 << 20
PROCESS_BYTES: Final = 100 * MIB
"""What a process takes besides its bounded parts (docs/operations.md)."""
GROWTH: Final = 1.2
"""The allocator keeps what was freed: the process is as large as it once was."""
TEMPORARY: Final = ("/tmp", "/var/tmp", "/run", "/dev/shm")
LEAST_BOUND: Final = 1_000
"""Bounds below this are switches and small counts, which may well be at their end."""
SHOWN_SETTINGS: Final = 12
MUCH_TRACED: Final = 0.1
"""Share of traced requests from which their cost is worth a word."""

Look = Callable[[], Iterator[tuple[str, str]]]
"""Yields the name of a finding, and what was seen."""


def judge_errors(errors: Iterable[ConfigError], where: str) -> list[DoctorFinding]:
    """Judge what keeps a configuration from being loaded."""
    findings = []
    for error in errors:
        if error.message.startswith("unknown configuration key"):
            check = "config.unknown-key"
        elif error.message.startswith("configuration key"):
            check = "config.invalid-value"
        else:
            check = "config.unreadable"
        findings.append(found(check, where, error.message, cure=error.hint or ""))
    return findings


def judge_config(where: str, config: Config, sources: Mapping[str, str], memory_bytes: int = 0) -> list[DoctorFinding]:
    """Judge one node's configuration. `memory_bytes`: what its machine has; 0: not known."""
    rules = _Rules(config, sources)
    looks: list[Look] = [
        rules.bounds,
        rules.wal,
        rules.replicas,
        rules.controllers,
        lambda: rules.memory(memory_bytes),
        rules.addresses,
        rules.bucket,
        rules.tracing,
        rules.secrets,
        rules.directory,
    ]
    findings = [found(check, where, seen) for look in looks for check, seen in look()]
    return [ok("config.settings", where, _changed(config, sources)), *findings]


def _changed(config: Config, sources: Mapping[str, str]) -> str:
    """Describe the settings that are no defaults, and where they came from."""
    shown = []
    for key, source in list(sources.items())[:SHOWN_SETTINGS]:
        section, _, name = key.partition(".")
        value = "********" if key in SECRETS else getattr(getattr(config, section), name)
        shown.append(f"{key} = {value} ({source})")
    more = len(sources) - len(shown)
    if not shown:
        return "every setting has its default"
    return "; ".join(shown) + (f"; and {more} more: `tidelog config --changed`" if more > 0 else "")


class _Rules:
    def __init__(self, config: Config, sources: Mapping[str, str]) -> None:
        self._config = config
        self._sources = sources

    def _told(self, key: str) -> str:
        """`key = value (source)`."""
        section, _, name = key.partition(".")
        value = getattr(getattr(self._config, section), name)
        return f"{key} = {value} ({self._sources.get(key, 'default')})"

    @property
    def _is_broker(self) -> bool:
        return "broker" in self._config.node.roles

    def bounds(self) -> Iterator[tuple[str, str]]:
        """Values that were set to an end of their range."""
        for key in self._sources:
            section, _, name = key.partition(".")
            struct = getattr(self._config, section, None)
            fields = {each.name: each for each in msgspec.structs.fields(type(struct))} if struct is not None else {}
            if name not in fields:
                continue
            kind = msgspec.inspect.type_info(fields[name].type)
            value = getattr(struct, name)
            if value == fields[name].default or not isinstance(kind, msgspec.inspect.IntType):
                continue
            if kind.ge is not None and kind.ge >= LEAST_BOUND and value == kind.ge:
                yield "config.at-bound", f"{self._told(key)} is the smallest value"
            if kind.le is not None and kind.le >= LEAST_BOUND and value == kind.le:
                yield "config.at-bound", f"{self._told(key)} is the largest value"

    def wal(self) -> Iterator[tuple[str, str]]:
        """The write-ahead log, and what waits in it."""
        wal, upload, cache = self._config.wal, self._config.upload, self._config.cache
        if not self._is_broker:
            return
        if wal.kind == "memory":
            yield "config.memory-wal", self._told("wal.kind")
        if wal.kind == "disk" and wal.flush == "async" and self._config.replication.total_replicas == 1:
            yield "config.async-flush", f"{self._told('wal.flush')}, and each WAL is on one broker"
        if upload.size_bytes * 2 > cache.log_bytes:
            yield (
                "config.upload-larger-than-cache",
                f"{self._told('upload.size_bytes')}, {self._told('cache.log_bytes')}",
            )
        if wal.kind == "disk" and wal.max_bytes < 2 * max(wal.segment_bytes, upload.size_bytes):
            told = ", ".join(self._told(key) for key in ("wal.max_bytes", "wal.segment_bytes", "upload.size_bytes"))
            yield "config.wal-too-small", told
        if self._config.kafka.message_max_bytes > self._config.kafka.max_request_bytes:
            told = f"{self._told('kafka.message_max_bytes')}, {self._told('kafka.max_request_bytes')}"
            yield "config.message-too-large", told

    def replicas(self) -> Iterator[tuple[str, str]]:
        """The hot tier."""
        settings, total = self._config.replication, self._told("replication.total_replicas")
        quorum = settings.in_sync_replicas or settings.total_replicas // 2 + 1
        if not self._is_broker or settings.total_replicas == 1:
            return
        if self._config.wal.kind != "disk":
            yield "config.replicas-need-disk", f"{total}, {self._told('wal.kind')}"
        if not self._config.controller.secret_file:
            yield "config.secret-missing", f"{total}, and controller.secret_file is not set"
        if quorum > settings.total_replicas:
            yield "config.quorum-too-large", f"{self._told('replication.in_sync_replicas')}, {total}"
        elif quorum == 1:
            yield "config.single-ack", f"{self._told('replication.in_sync_replicas')}, {total}"
        if settings.enable_auto_in_sync_replicas:
            if settings.min_in_sync_replicas == 1 < quorum:
                told = self._told("replication.min_in_sync_replicas")
                yield "config.degrades-to-one", f"{told}, {self._told('replication.enable_auto_in_sync_replicas')}"
        elif settings.total_replicas == quorum == 2:
            yield "config.even-replicas", total

    def controllers(self) -> Iterator[tuple[str, str]]:
        """The quorum, and how soon it takes a broker for dead."""
        settings = self._config.controller
        if settings.members and len(settings.members) not in (1, 3, 5):
            yield "config.quorum-size", f"controller.members names {len(settings.members)} controllers"
        if settings.session_timeout_ms < 3 * settings.heartbeat_interval_ms:
            told = f"{self._told('controller.session_timeout_ms')}, {self._told('controller.heartbeat_interval_ms')}"
            yield "config.heartbeat", told
        remote = [
            self._told(key)
            for role, key, host in (
                ("controller", "controller.host", settings.host),
                ("broker", "admin.host", self._config.admin.host),
            )
            if role in self._config.node.roles and host not in LOOPBACK
        ]
        if not settings.secret_file and (settings.members or remote):
            named = "controller.members is set" if settings.members else ", ".join(remote)
            yield "config.secret-missing", f"{named}, and controller.secret_file is not"

    def memory(self, memory_bytes: int) -> Iterator[tuple[str, str]]:
        """The bounds of all parts, and the machine's memory."""
        if not memory_bytes or not self._is_broker:
            return
        caches = self._config.cache.log_bytes + self._config.cache.block_bytes + PROCESS_BYTES
        everything = int((caches + other_bounds(self._config)) * GROWTH)
        if caches * GROWTH > memory_bytes:
            told = f"{self._told('cache.log_bytes')}, {self._told('cache.block_bytes')}"
            yield "config.memory-exceeded", f"{told}; there are {memory_bytes // MIB} MiB"
        elif everything > memory_bytes:
            yield "config.memory-tight", f"all bounds are {everything // MIB} MiB; there are {memory_bytes // MIB} MiB"

    def addresses(self) -> Iterator[tuple[str, str]]:
        """What clients and other nodes are told."""
        if not self._is_broker:
            return
        kafka, admin = self._config.kafka, self._config.admin
        told, admin_told = kafka.advertised_host or kafka.host, admin.advertised_host or admin.host
        if told in ANY_ADDRESS:
            yield "config.any-address", f"{self._told('kafka.host')}, and kafka.advertised_host is not set"
        if told in LOOPBACK and self._remote_controllers():
            remote = ", ".join(self._remote_controllers())
            yield "config.loopback-advertised", f"clients are told {told}; controllers are on {remote}"
        if told not in LOOPBACK and admin_told in LOOPBACK + ANY_ADDRESS:
            yield "config.admin-unreachable", f"clients are told {told}, and of the admin HTTP {admin_told}"

    def _remote_controllers(self) -> list[str]:
        """The hosts of controllers that are not on this machine."""
        members = [text.rpartition("@")[2] for text in self._config.controller.members]
        hosts = [split_address(each)[0] for each in members if is_address(each)]
        return [host for host in dict.fromkeys(hosts) if host not in LOOPBACK]

    def bucket(self) -> Iterator[tuple[str, str]]:
        """The bucket."""
        s3 = self._config.s3
        if s3.is_embedded and len(self._remote_controllers()) > 1:
            yield "config.embedded-shared", f"controllers are on {', '.join(self._remote_controllers())}"
        endpoint = urlsplit(s3.endpoint)
        if endpoint.scheme == "http" and endpoint.hostname not in LOOPBACK:
            yield "config.plain-http", self._told("s3.endpoint")
        if self._config.clean.orphan_age_ms < self._config.upload.prepare_ttl_ms:
            told = f"{self._told('clean.orphan_age_ms')}, {self._told('upload.prepare_ttl_ms')}"
            yield "config.orphan-age", told

    def tracing(self) -> Iterator[tuple[str, str]]:
        """Traces, and the way to their collector."""
        settings = self._config.tracing
        if not settings.endpoint or not self._is_broker:
            return
        endpoint = urlsplit(settings.endpoint)
        if endpoint.scheme == "http" and endpoint.hostname not in LOOPBACK:
            yield "config.tracing-plain-http", self._told("tracing.endpoint")
        if settings.sample_ratio > MUCH_TRACED:
            yield "config.tracing-much", self._told("tracing.sample_ratio")

    def secrets(self) -> Iterator[tuple[str, str]]:
        """Secrets that are in the configuration itself."""
        for key in sorted(SECRETS & self._sources.keys()):
            yield "config.exposed-secret", f"{key} is set by {self._sources[key]}"

    def directory(self) -> Iterator[tuple[str, str]]:
        """Where the data directory is."""
        path = PurePosixPath(self._config.node.data_dir)
        if not path.is_absolute() and self._config.controller.members:
            yield "config.relative-directory", self._told("node.data_dir")
        if any(str(path) == each or PurePosixPath(each) in path.parents for each in TEMPORARY):
            yield "config.temporary-directory", self._told("node.data_dir")


def other_bounds(config: Config) -> int:
    """Return the bytes that a broker's parts may take besides its caches."""
    kafka, upload, compaction = config.kafka, config.upload, config.compaction
    return (
        config.cache.cold_in_flight_bytes
        + kafka.max_in_flight_bytes
        + kafka.max_unread_bytes
        + upload.max_in_flight * upload.size_bytes
        + 3 * compaction.target_bytes * compaction.concurrency
    )
