"""Looks at this machine as a node with a given configuration would find it; no process of it needs to run.

Nothing is changed: the probe of a disk has no name, ports are bound and released, and the bucket is only written to
below the prefix of `tidelog.storage.bucket.rights`. An embedded bucket of another user is not tried, because what is
made there would be this user's.

Entry: `look_here`, `is_cluster`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tidelog.broker.settings import TracingSettings
from tidelog.broker.telemetry.tracing_setup import missing_library
from tidelog.config import Config, Loaded
from tidelog.controller.checkup import CheckupReport
from tidelog.controller.model.addresses import split_address
from tidelog.controller.raft.quorum import parse_members
from tidelog.doctor.facts import DirectoryFacts, NodeView, PortFacts
from tidelog.process import cluster_layout
from tidelog.process.data_dir import IDENTITY_FILE, read_identity
from tidelog.process.node_base import own_folders, setting_facts
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.facts.disk import DiskProbes
from tidelog.runtime.facts.node import OwnFacts, own_facts
from tidelog.runtime.facts.reach import AddressTry, NodeAddress, Tries
from tidelog.runtime.network import TcpNetwork
from tidelog.runtime.ports import check_free
from tidelog.storage.bucket.open import EMBEDDED_BUCKET, open_backend
from tidelog.storage.bucket.rights import RightsFacts, try_rights

LOCKS: Final = Path("/proc/locks")
LOCK_FILE: Final = "lock"


async def look_here(loaded: Loaded, clock: Clock) -> list[NodeView]:
    """Look at the node that the configuration describes or, over the directory of a `tidelog up`, at each of its."""
    config = loaded.config
    if not is_cluster(config):
        return [await _look(config, loaded.sources, "this configuration", clock)]
    path = Path(config.node.data_dir)
    try:
        nodes = cluster_layout.nodes(config)
    except CorruptData as error:
        damaged = DirectoryFacts(path=str(path), damage=error.message, hint=error.hint or "")
        return [NodeView(where="this configuration", config=config, directory=damaged, is_running=False)]
    views: list[NodeView] = []
    for node in nodes:
        where = f"node {node.node.id} in {path}"
        views.append(await _look(node, loaded.sources, where, clock, tries_bucket=not views))
    return views


def is_cluster(config: Config) -> bool:
    """As of `cluster_layout`; False of a directory that may not be looked into, which `directory_facts` tells."""
    try:
        return cluster_layout.is_cluster(config)
    except OSError:
        return False


async def _look(
    config: Config, sources: Mapping[str, str], where: str, clock: Clock, *, tries_bucket: bool = True
) -> NodeView:
    settings = setting_facts(Loaded(config, dict(sources)))
    directory = await asyncio.to_thread(directory_facts, Path(config.node.data_dir))
    disks = await DiskProbes(_folders(config), clock).run()
    rights, error = await _try_bucket(config, clock) if tries_bucket else (None, None)
    told = await asyncio.to_thread(
        own_facts, directory.node, config.node.roles, OwnFacts(lambda: settings), clock, directory.cluster_id, {}
    )
    traces = config.tracing if "broker" in config.node.roles and config.tracing.endpoint else None
    return NodeView(
        where=where,
        config=config,
        sources=dict(sources),
        told=told,
        report=CheckupReport(node=directory.node, disks=disks, rights=rights),
        directory=directory,
        ports=[] if directory.holder else port_facts(config),
        collector=await _try_collector(traces, clock) if traces is not None else None,
        tracing_needs=missing_library() if traces is not None else "",
        is_running=False,
        bucket_error=error.message if error is not None else "",
        bucket_hint=(error.hint or "") if error is not None else "",
    )


def _folders(config: Config) -> list[Path]:
    """The folders of a node; of a directory that may not be looked into only that."""
    try:
        return own_folders(config)
    except OSError:
        return [Path(config.node.data_dir)]


def directory_facts(path: Path) -> DirectoryFacts:
    """Read whose a data directory is, and which process has it."""
    facts = DirectoryFacts(path=str(path), holder=_holder(path / LOCK_FILE))
    try:
        identity = read_identity(path / IDENTITY_FILE)
    except CorruptData as error:
        return msgspec.structs.replace(facts, damage=error.message, hint=error.hint or "")
    except OSError as error:
        told = f"{path / IDENTITY_FILE} cannot be read: {error.strerror}"
        hint = "run this as the user of the node; if that is who you are, correct owner and mode of the directory"
        return msgspec.structs.replace(facts, damage=told, hint=hint)
    if identity is None:
        return facts
    return msgspec.structs.replace(facts, node=identity["broker_id"], cluster_id=identity["cluster_id"])


def _holder(file: Path) -> int:
    """Return the process that holds a lock file; 0 for none. It is asked of the system: nothing is locked for it."""
    try:
        inode, locks, pid = file.stat().st_ino, LOCKS.read_text(encoding="ascii"), file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return 0
    if inode not in locked_inodes(locks):
        return 0
    return int(pid) if pid.strip().isdecimal() else 0


def locked_inodes(locks: str) -> set[int]:
    """Return the inodes that the text of `/proc/locks` names as locked with flock(2)."""
    found = set()
    for line in locks.splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and (inode := fields[5].rpartition(":")[2]).isdecimal():
            found.add(int(inode))
    return found


def port_facts(config: Config) -> list[PortFacts]:
    """Try each port that the node would listen on, and that the configuration names."""
    wanted = []
    if "broker" in config.node.roles:
        wanted.append(("kafka.port", config.kafka.host, config.kafka.port))
        wanted.append(("admin.port", config.admin.host, max(0, config.admin.port)))
        wanted.append(("kafka.peer_port", config.kafka.host, config.kafka.peer_port))
    if "controller" in config.node.roles:
        wanted.append(("controller.port", *_controller_address(config)))
    return [_try_port(*each) for each in wanted if each[2]]


def _controller_address(config: Config) -> tuple[str, int]:
    settings = config.controller
    try:
        members = parse_members(settings.members)
    except TidelogError:
        return settings.host, settings.port  # told by the start, which refuses it
    if settings.port == 0 and config.node.id in members:
        return split_address(members[config.node.id])
    return settings.host, settings.port


def _try_port(setting: str, host: str, port: int) -> PortFacts:
    try:
        check_free(host, port, lingering=True)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        return PortFacts(setting=setting, host=host, port=port, error=error.strerror or str(error), is_taken=taken)
    return PortFacts(setting=setting, host=host, port=port)


async def _try_collector(settings: TracingSettings, clock: Clock) -> AddressTry:
    """Connect to the collector of traces; nothing is sent to it."""
    endpoint = urlsplit(settings.endpoint)
    port = endpoint.port or (443 if endpoint.scheme == "https" else 80)
    address = NodeAddress("collector", -1, endpoint.hostname or "", port)
    return (await Tries(TcpNetwork(), clock).run([address]))[0]


async def _try_bucket(config: Config, clock: Clock) -> tuple[RightsFacts | None, TidelogError | None]:
    """Try the bucket; nothing of it is created. Returns the error that keeps it from being opened."""
    path = Path(config.node.data_dir)
    if config.s3.is_embedded:
        try:
            owner = (path / EMBEDDED_BUCKET).stat().st_uid
        except OSError:
            return None, None  # made at the first start
        if owner != os.getuid():
            return None, None
    settings = msgspec.structs.replace(config.s3, create_bucket=False)
    try:
        store = open_backend(settings, path, clock, random.Random())
    except TidelogError as error:
        return None, error
    try:
        return await try_rights(store, clock), None
    finally:
        await store.close()
