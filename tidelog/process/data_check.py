"""Offline check of every checksummed file of a data directory, for `tidelog wal verify`.

Checks the identity, the controller's journal and snapshot, the WAL segments and the epoch file; for a WAL in the
bucket, its objects. The check is read-only and may run beside the node's process. A torn tail is a note, not an error:
recovery truncates it. In the directory of a `tidelog up --brokers N` the check covers each node and the layout.

Entry: `check_all`, `check_data` for one process.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from tidelog.config import Config
from tidelog.controller.directory_check import ControllerFiles, check_directory
from tidelog.process import cluster_layout
from tidelog.process.data_dir import CONTROLLER_FOLDER, IDENTITY_FILE, LONE_NODE_ID, WAL_FOLDER, read_identity
from tidelog.process.replica_disks import PREFIX as REPLICA_PREFIX
from tidelog.process.replica_disks import replicas_in
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.disk import FileDisk
from tidelog.runtime.errors import CorruptData, DamagedFile, NotFound
from tidelog.storage.bucket.open import EMBEDDED_BUCKET, open_store
from tidelog.storage.wal.disk import inspect as wal_tool
from tidelog.storage.wal.disk.identity import ID_FILE, ForeignWal, check_wal_set, stored_wal_id
from tidelog.storage.wal.disk.inspect import OnRecord, Progress, WalFinding, WalInfo
from tidelog.storage.wal.s3 import inspect as wal_s3_tool
from tidelog.storage.wal.s3.inspect import BucketWalInfo


class DataReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `check_data`. A part is None if the directory does not have it or it cannot be read."""

    node: str = ""
    """The node's folder in the directory of a cluster."""
    identity: dict[str, Any] | None
    controller: ControllerFiles | None
    info: WalInfo | BucketWalInfo | None
    """The WAL."""
    replicas: dict[int, WalInfo] = {}
    """The WALs of other brokers' replica sets of which the broker has a replica."""
    findings: list[WalFinding]
    """Names of files are relative to the data directory; objects are named by their key."""

    @property
    def is_sound(self) -> bool:
        """Whether a process would start with this directory."""
        return not any(finding.is_error for finding in self.findings)


def has_wal_on_disk(data_dir: Path) -> bool:
    """Whether any file of a WAL is on disk."""
    return (data_dir / WAL_FOLDER).is_dir()


async def check_all(config: Config, cluster_id: str, progress: Progress | None = None) -> list[DataReport]:
    """Check the configured data directory. For a cluster, return one report for the layout and one for each node.

    Raises the errors of `check_data`.
    """
    if not cluster_layout.is_cluster(config):
        return [await check_data(config, cluster_id, progress)]
    directory = Path(config.node.data_dir)
    findings: list[WalFinding] = []
    try:
        nodes = cluster_layout.nodes(config)
    except CorruptData as error:
        findings.append(_finding(directory, error))
        nodes = cluster_layout.nodes_found(config)
    reports = [DataReport(identity=None, controller=None, info=None, findings=findings)]
    for node in nodes:
        name = Path(node.node.data_dir).name
        try:
            report = await check_data(node, cluster_id, progress)
        except NotFound as error:
            report = DataReport(identity=None, controller=None, info=None, findings=[_absent(error)])
        findings = [msgspec.structs.replace(one, file=f"{name}/{one.file}".rstrip("/")) for one in report.findings]
        reports.append(msgspec.structs.replace(report, node=name, findings=findings))
    return reports


def _absent(error: NotFound) -> WalFinding:
    return WalFinding(kind="missing", file="", file_offset=-1, wal_offset=-1, message=error.message)


async def check_data(config: Config, cluster_id: str, progress: Progress | None = None) -> DataReport:
    """Check all files of the configured data directory, and the WAL.

    `cluster_id` is used for a WAL in the bucket; empty: the id in the identity file. Raises `NotFound` when there is
    nothing to check, `OSError`, `Unavailable`.
    """
    data_dir = Path(config.node.data_dir)
    findings: list[WalFinding] = []
    identity = _check_identity(data_dir, findings)
    controller = _check_controller(data_dir, findings)
    info: WalInfo | BucketWalInfo | None = None
    if config.wal.kind == "s3" and "broker" in config.node.roles:
        if not cluster_id and identity is None and findings:
            findings.append(_not_checked())
        else:
            report = await _check_bucket(config, cluster_id or _cluster_of(identity), progress)
            info = report.info
            findings += report.findings
    elif has_wal_on_disk(data_dir):
        own = config.node.id if config.node.id >= 0 or identity is None else int(identity["broker_id"])
        info = await _check_folder(data_dir, WAL_FOLDER, own, findings, progress)
    replicas = {
        each: await _check_folder(data_dir, f"{REPLICA_PREFIX}{each}", each, findings, progress)
        for each in replicas_in(data_dir)
    }
    if identity is None and controller is None and info is None and not findings:
        raise nothing_there(data_dir)
    return DataReport(identity=identity, controller=controller, info=info, replicas=replicas, findings=findings)


def nothing_there(data_dir: Path) -> NotFound:
    """Return the error for a directory that is empty or contains the nodes of a cluster."""
    hint = "give the --data-dir that was given to `tidelog up`"
    if (data_dir / cluster_layout.LAYOUT_FILE).exists():
        hint = f"it belongs to a cluster: use --data-dir {data_dir / 'node-1'} for the first node"
    return NotFound(f"there is no write-ahead log in {data_dir}", hint=hint)


def own_replica_set(config: Config) -> int:
    """Return the id of the broker's own replica set, that is the broker's: the configured id, else the directory's."""
    if config.node.id >= 0:
        return config.node.id
    identity = read_identity(Path(config.node.data_dir) / IDENTITY_FILE)
    return int(identity["broker_id"]) if identity is not None and identity["broker_id"] >= 0 else LONE_NODE_ID


async def inspect_bucket_wal(
    config: Config, cluster_id: str, progress: Progress | None = None, on_record: OnRecord | None = None
) -> BucketWalInfo:
    """Describe the WAL in the bucket; see `tidelog.storage.wal.s3.inspect.inspect_bucket`. Raises `NotFound`,
    `Unavailable`."""
    if not cluster_id:
        cluster_id = _cluster_of(read_identity(Path(config.node.data_dir) / IDENTITY_FILE))
    store = _open(config)
    try:
        return await wal_s3_tool.inspect_bucket(
            store, cluster_id, own_replica_set(config), on_record=on_record, progress=progress
        )
    finally:
        await store.close()


def _not_checked() -> WalFinding:
    message = "not checked: the identity file contains no cluster id; add --cluster-id"
    return WalFinding(kind="missing", file="the WAL in the bucket", file_offset=-1, wal_offset=-1, message=message)


def _open(config: Config) -> Any:
    data_dir = Path(config.node.data_dir)
    embedded = data_dir / EMBEDDED_BUCKET
    if config.s3.is_embedded and not embedded.is_dir():
        raise NotFound(
            f"there is no embedded bucket in {data_dir}",
            hint="give the bucket as for `tidelog up`: --s3-endpoint and --bucket, or --config",
        )
    config.s3.create_bucket = False
    return open_store(config.s3, data_dir, SystemClock(), random.Random())


def _cluster_of(identity: dict[str, Any] | None) -> str:
    cluster_id = identity["cluster_id"] if identity is not None else ""
    if not cluster_id:
        raise NotFound(
            "the data directory contains no cluster id",
            hint="add --cluster-id: it is the first part of every key in the bucket",
        )
    return str(cluster_id)


async def _check_bucket(config: Config, cluster_id: str, progress: Progress | None) -> wal_s3_tool.BucketWalReport:
    store = _open(config)
    try:
        return await wal_s3_tool.verify_bucket(store, cluster_id, own_replica_set(config), progress=progress)
    finally:
        await store.close()


async def _check_folder(
    data_dir: Path, folder: str, replica_set: int, findings: list[WalFinding], progress: Progress | None
) -> WalInfo:
    """Check the WAL in one folder, which is that of a replica set; -1: it is not known of which."""
    disk = FileDisk(data_dir / folder)
    try:
        report = await wal_tool.verify(disk, progress=progress)
        findings += [msgspec.structs.replace(one, file=f"{folder}/{one.file}") for one in report.findings]
        await (check_wal_set(disk, replica_set) if replica_set >= 0 else stored_wal_id(disk))
    except ForeignWal as error:
        where = f"{folder}/{ID_FILE}"
        findings.append(WalFinding(kind="foreign", file=where, file_offset=-1, wal_offset=-1, message=error.message))
    except DamagedFile as error:
        what = f"{folder}/{ID_FILE}"
        findings.append(
            WalFinding(kind="corrupt", file=what, file_offset=error.position, wal_offset=-1, message=error.what)
        )
    finally:
        await disk.close()
    return report.info


def _check_identity(data_dir: Path, findings: list[WalFinding]) -> dict[str, Any] | None:
    try:
        return read_identity(data_dir / IDENTITY_FILE)
    except CorruptData as error:
        findings.append(_finding(data_dir, error))
        return None


def _check_controller(data_dir: Path, findings: list[WalFinding]) -> ControllerFiles | None:
    files, damage = check_directory(data_dir / CONTROLLER_FOLDER)
    findings += [_finding(data_dir, error) for error in damage]
    if files is not None and files.torn_bytes:
        findings.append(
            WalFinding(
                kind="torn",
                file=f"{CONTROLLER_FOLDER}/journal",
                file_offset=files.journal_bytes,
                wal_offset=-1,
                message=f"{files.torn_bytes} bytes of an incomplete write; recovery truncates them",
            )
        )
    return files


def _finding(data_dir: Path, error: CorruptData) -> WalFinding:
    if not isinstance(error, DamagedFile):
        return WalFinding(kind="corrupt", file=CONTROLLER_FOLDER, file_offset=-1, wal_offset=-1, message=error.message)
    file = Path(error.path).relative_to(data_dir).as_posix()
    return WalFinding(kind="corrupt", file=file, file_offset=error.position, wal_offset=-1, message=error.what)
