"""The command line's part in looking at a node and a cluster: which of the two is meant, and how the cluster is asked.

Entry: `gather_facts`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tidelog.cli.client import AdminTokenNeeded, ClusterConnection, http_json, http_text
from tidelog.cli.options import BOOTSTRAP_ENV, DEFAULT_BOOTSTRAP, given_secret_file
from tidelog.cli.subcommands.status import gather
from tidelog.config import Config, Loaded, examine, parse_set
from tidelog.doctor.bundle import MAX_ENTRY_BYTES
from tidelog.doctor.cluster import NoToken, look_at_cluster
from tidelog.doctor.facts import ClusterView, Facts, NodeView
from tidelog.doctor.here import is_cluster, look_here
from tidelog.doctor.masking import MAX_FILE_BYTES, known_secrets
from tidelog.doctor.parts import secrets_in_files
from tidelog.process import cluster_layout
from tidelog.process.listener import ANY_ADDRESS
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, CorruptData

SHORT_S: Final = 5.0
CHECKUP_S: Final = 120.0
"""More than the parts of a checkup take together at the most."""
_QUICK: Final = ("/healthz", "/clock")
ANSWER_S: Final = 15.0
"""Longer than a broker takes that waits for its bucket or controllers; one that hangs holds the others up so long."""


class Gathered(NamedTuple):
    """What was found, and what it was found with."""

    facts: Facts
    loaded: Loaded
    ask: AdminAsk


class DoctorTarget(NamedTuple):
    """What is to be looked at, as the options say it."""

    config_file: Path | None
    assignments: tuple[str, ...]
    data_dir: Path | None
    bootstrap: str | None
    """None: not given."""
    offline: bool

    @property
    def names_configuration(self) -> bool:
        """Whether a configuration or data directory was named, so that this machine is meant."""
        return self.config_file is not None or bool(self.assignments) or self.data_dir is not None


class AdminAsk:
    """`tidelog.doctor.cluster.Ask` with the token of the secret that the command line finds."""

    def __init__(self, cluster: ClusterConnection) -> None:
        self._cluster = cluster

    def get(self, url: str, path: str, broker: int | None = None) -> Any:
        """See `Ask.get`."""
        return self._cluster.ask(url, path, timeout_s=SHORT_S if path in _QUICK else ANSWER_S, broker=broker)

    def text(self, url: str, path: str) -> str:
        """See `tidelog.doctor.parts.AskText`."""
        return http_text(url, path, limit_bytes=MAX_ENTRY_BYTES, timeout_s=ANSWER_S, cluster=self._cluster.cluster_id)

    def post(self, url: str, path: str) -> Any:
        """See `Ask.post`."""
        try:
            return http_json(
                url,
                path,
                method="POST",
                token=lambda: self._cluster.admin_token,
                timeout_s=CHECKUP_S,
                cluster=self._cluster.cluster_id,
            )
        except (AdminTokenNeeded, ConfigError) as error:
            raise NoToken(error.message, hint=error.hint) from error


def load_target(target: DoctorTarget) -> tuple[Loaded, list[ConfigError]]:
    """Return the configuration that is meant, without what is wrong in it, and all that is."""
    flags: list[tuple[str, str | int | bool]] = []
    errors: list[ConfigError] = []
    for text in target.assignments:
        try:
            flags.append(parse_set(text))
        except ConfigError as error:
            errors.append(error)
    if target.data_dir is not None:
        flags.append(("node.data_dir", str(target.data_dir)))
    try:
        loaded, more = examine(target.config_file, os.environ, flags)
    except ConfigError as error:  # the file as a whole
        loaded, more = examine(None, os.environ, flags)
        more = [error, *more]
    return loaded, [*errors, *more]


def gather_facts(target: DoctorTarget) -> Gathered:
    """Gather what can be had of the configuration, of this machine, and of the cluster."""
    logging.getLogger("tidelog").addHandler(logging.NullHandler())  # what parts would log is told as findings
    loaded, errors = load_target(target)
    bootstrap, is_named = bootstrap_of(target, loaded.config)
    connection = ClusterConnection(bootstrap)
    ask = AdminAsk(connection)
    views: list[NodeView] = []
    cluster: ClusterView | None = None
    if not target.offline:
        cluster, views = _cluster(connection, ask, is_named=is_named)
    if target.names_configuration or cluster is None or cluster.error or os.path.exists(loaded.config.node.data_dir):
        views = [*asyncio.run(look_here(loaded, SystemClock())), *views]
    if cluster is not None and cluster.error and any(each.directory and each.directory.holder for each in views):
        cluster = ClusterView(bootstrap=cluster.bootstrap, error=cluster.error, hint=cluster.hint, is_named=True)
    file = str(target.config_file) if target.config_file is not None else ""
    now_ms = SystemClock().time_ms()
    return Gathered(Facts(errors=errors, config_file=file, nodes=views, cluster=cluster, now_ms=now_ms), loaded, ask)


def secrets_of(loaded: Loaded) -> set[str]:
    """Return the secrets that are known here: of the configuration and its files, the command line, the environment."""
    files = secrets_in_files(loaded)
    given = given_secret_file()
    if given is not None and given.is_file():
        with given.open("rb") as opened:
            files.append(opened.read(MAX_FILE_BYTES))
    return known_secrets(loaded.config, files, os.environ)


def bootstrap_of(target: DoctorTarget, config: Config) -> tuple[str, bool]:
    """Return the address of the cluster, and whether it was named: else it is what the configuration says."""
    named = target.bootstrap or os.environ.get(BOOTSTRAP_ENV)
    if named:
        return named, True
    if not target.names_configuration:
        return DEFAULT_BOOTSTRAP, False
    try:
        nodes = cluster_layout.nodes(config) if is_cluster(config) else [config]
    except CorruptData:
        nodes = [config]
    addresses = []
    for node in nodes:
        host = node.kafka.advertised_host or node.kafka.host
        port = node.kafka.advertised_port or node.kafka.port
        if "broker" in node.node.roles and port:
            addresses.append(f"{'127.0.0.1' if host in ANY_ADDRESS else host}:{port}")
    return ",".join(addresses) or DEFAULT_BOOTSTRAP, False


def _cluster(connection: ClusterConnection, ask: AdminAsk, *, is_named: bool) -> tuple[ClusterView, list[NodeView]]:

    def status() -> Mapping[str, Any]:
        return gather(connection.get("/status"), lambda url, broker: ask.get(url, "/status", broker), ANSWER_S)

    return look_at_cluster(connection.bootstrap, status, ask, is_named=is_named)
