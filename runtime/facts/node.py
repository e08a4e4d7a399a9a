"""What a node of a cluster tells of itself.

Entry: `NodeFacts`, `own_facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import ConfigError
from tidelog.runtime.facts.certificates import CertificateFacts, certificate_facts
from tidelog.runtime.facts.files import FileFacts, file_facts
from tidelog.runtime.facts.machine import MachineFacts, machine_facts
from tidelog.runtime.tls import TlsFiles

_FILE_SUFFIX: Final = "_file"
_NO_SECRET: Final = ("_cert_file", "_ca_file")
"""Settings that name files which everybody may read."""


class SettingFacts(msgspec.Struct, frozen=True):
    """One setting in force; a secret is shown as `********`."""

    key: str
    value: Any
    source: str
    """`default`, `file PATH`, `environment NAME`, `flag`, or what else set it."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process, as it tells it itself."""

    node: int
    roles: list[str] = []
    cluster_id: str = ""
    time_ms: int = 0
    """Its clock."""
    machine: MachineFacts | None = None
    settings: list[SettingFacts] = []
    files: list[FileFacts] = []
    """Files with secrets."""
    certificates: list[CertificateFacts] = []
    metadata: dict[str, int] = {}
    """The version of its metadata, and the rows of each table."""


def no_settings() -> list[SettingFacts]:
    """Default of `OwnFacts.settings`: a node that was made without a configuration, in a test or a simulation."""
    return []


@dataclass(frozen=True, slots=True)
class OwnFacts:
    """What a process knows of itself and its parts do not: its configuration, and where its folders are."""

    settings: Callable[[], list[SettingFacts]] = no_settings
    folders: Sequence[Path] = ()
    """The data directory first, then those in it that may be on other devices."""


def secret_files(settings: Mapping[str, Any]) -> list[FileFacts]:
    """Look at each file with a secret that the settings name, by dotted key."""
    return [
        file_facts(key, value)
        for key, value in settings.items()
        if key.endswith(_FILE_SUFFIX) and not key.endswith(_NO_SECRET) and isinstance(value, str) and value
    ]


def tls_certificates(settings: Mapping[str, Any]) -> list[CertificateFacts]:
    """Try the certificates that the settings name, by dotted key."""
    cert, key, ca = (str(settings.get(f"replication.tls_{name}_file", "")) for name in ("cert", "key", "ca"))
    check = bool(settings.get("replication.tls_check_host_names", True))
    try:
        files = TlsFiles.of("replication", cert, key, ca, check_host_names=check)
    except ConfigError as error:
        return [
            CertificateFacts(
                section="replication", cert_file=cert, ca_file=ca, error=error.message, hint=error.hint or ""
            )
        ]
    return [] if files is None else [certificate_facts(files)]


def own_facts(
    node: int, roles: Iterable[str], own: OwnFacts, clock: Clock, cluster_id: str, metadata: dict[str, int]
) -> NodeFacts:
    """Gather the facts of this process."""
    settings = own.settings()
    values = {each.key: each.value for each in settings}
    return NodeFacts(
        node=node,
        roles=list(roles),
        cluster_id=cluster_id,
        time_ms=clock.time_ms(),
        machine=machine_facts(),
        settings=settings,
        files=secret_files(values),
        certificates=tls_certificates(values),
        metadata=metadata,
    )
