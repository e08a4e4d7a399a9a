"""A data directory from the bucket alone: what `tidelog cluster rebuild` does.

docs/design/0014-rebuild-from-the-bucket.md has the reasons.

    DIR/rebuild-unfinished    while the directory is being written; the next rebuild starts over, `tidelog up` refuses

`prepare` reads the bucket, computes the whole new state in memory and reports what is lost: that is a dry run.
`carry_out` claims the bucket and writes the directory.

Entry: `prepare`, `carry_out`.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.config import Config, Loaded
from tidelog.controller.machine.state import ControllerState
from tidelog.controller.machine.tables import Tables
from tidelog.controller.model.bucket_state import backup_key
from tidelog.controller.model.records import BUCKET_WAL, STREAMS_PER_PARTITION, ObjectState
from tidelog.controller.model.wal_notes import DATA_STREAM, is_committed, losses_in, note_in
from tidelog.controller.raft.files import sync_directory
from tidelog.controller.raft.quorum import parse_members
from tidelog.controller.rebuild.adopt import Adoption, adopt
from tidelog.controller.rebuild.directory import write_directories
from tidelog.controller.rebuild.plan import RebuildPlan, make_plan, missing_objects
from tidelog.controller.rebuild.source import BucketContent, claim, only_cluster, read_bucket, require_unchanged
from tidelog.process import cluster_layout
from tidelog.process.data_dir import IDENTITY_FILE, LONE_NODE_ID, UP_LOCK_FILE, WrongDataDirectory, lock_file
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound, StorageFailed, Unavailable
from tidelog.storage.bucket.store import ObjectStore, exists
from tidelog.storage.wal.s3.inspect import inspect_bucket

META_STREAM = 0
"""The meta stream's place among the streams of a partition."""
UNFINISHED_FILE = "rebuild-unfinished"
NO_BACKUP = (
    "check --from, or --from-s3-endpoint, --from-bucket and s3.prefix; a backup that was cut off is made whole by"
    " making it again"
)
OWNER_SILENCE = 2
"""Intervals of the owner's sign of life after which the bucket is taken for abandoned."""


class LostRange(msgspec.Struct, frozen=True):
    """Records that the rebuilt cluster does not have, or may not have."""

    what: str
    """`not uploaded`: known or presumed to have been only in a broker's WAL; `after a gap`: in the bucket, in an object
    that does not begin where what is taken ends; `trimmed`: their objects are gone, because they were deleted after the
    metadata was written, or by a foreign hand; `no topic`: of a stream that the metadata does not know; `missing`: in
    an object that is gone, although the cluster changed nothing after the metadata; `damaged`: in an object that has
    not its size. The last two stay in the metadata, and are read again when the object is put back. If the object has
    what a partition must read to open, these are all offsets of the partition."""
    topic: str
    partition: int
    from_offset: int
    to_offset: int
    """-1: not known."""
    object_id: int = -1


class RebuildReport(msgspec.Struct, frozen=True):
    """What a rebuild takes, and what is lost."""

    cluster_id: str
    generation: int
    """Of the new cluster."""
    state_written_ms: int
    """Wall clock of the controller that wrote the metadata; later changes of topics and settings are lost."""
    state_is_last: bool
    """The metadata is that of a clean stop: nothing was changed after it."""
    brokers: list[int]
    topics: int
    partitions: int
    objects: int
    """Objects that the rebuilt metadata names."""
    new_objects: int
    """Those of them that are newer than the metadata, and were found by their indexes."""
    lost: list[LostRange]
    damaged: list[str]
    living_owner: str
    """Why the bucket seems to have a living owner; empty: it does not."""
    removed_brokers: list[int] = []
    """Brokers of the metadata that will not exist: their own settings are gone, and others have their partitions."""
    lost_snapshots: list[str] = []
    """Snapshots of the metadata whose objects are gone: they were deleted after it was written."""


class Prepared(NamedTuple):
    """A rebuild that can be carried out."""

    report: RebuildReport
    state: ControllerState
    seen: frozenset[str]
    """The metadata in the bucket that it was computed from."""


def broker_ids(config: Config, brokers: int) -> list[int]:
    """Return the ids of the brokers that `tidelog up` will run over the directory. Raises `ConfigError`."""
    if not 1 <= brokers <= cluster_layout.MAX_BROKERS:
        raise ConfigError(f"--brokers {brokers}: `tidelog up` runs 1 to {cluster_layout.MAX_BROKERS} on one machine")
    if brokers == 1:
        return [config.node.id if config.node.id >= 0 else LONE_NODE_ID]
    return list(range(1, brokers + 1))


async def prepare(
    config: Config,
    store: ObjectStore,
    brokers: int,
    cluster_id: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    of_backup: bool = False,
    accept_loss: bool = False,
) -> Prepared:
    """Read the bucket and compute the new state. Raises `NotFound`, `InvalidInput`, `CorruptData`, `Unavailable`.

    `of_backup`: the bucket is a copy, which has no WAL: what only that had is lost, wherever it was. `accept_loss`:
    what is missing is given up, with what precedes it, also if it cannot have been trimmed.
    """
    try:
        chosen = cluster_id or await only_cluster(store)
        if not of_backup:
            await _refuse_backup(store, chosen)
        content = await read_bucket(store, chosen, progress)
    except NotFound as error:
        raise NotFound(error.message, hint=NO_BACKUP if of_backup else error.hint) from error
    tables = content.state.tables
    if not of_backup:
        await _refuse_bucket_wal(store, content)
    ids = broker_ids(config, brokers)
    removed = sorted(set(tables.brokers.rows) - set(ids))
    keeps = content.is_last and not accept_loss
    plan = make_plan(tables, content.listed, content.found, is_last=keeps)
    lost = [*_unreadable(tables, content, is_last=keeps), *_left_out(tables, plan)]
    known = {key for key in tables.kv.rows if key.startswith("wal-loss/")}
    now_ms = int(time.time() * 1000)
    largest = max([0, *content.listed])
    unsure, age_ms = _unsure_wals(content, of_backup=of_backup), now_ms - content.base.written_ms
    state = adopt(content.state, plan, Adoption(ids, content.generation + 1, largest, now_ms, age_ms, unsure))
    lost = [*_not_uploaded(state.tables, known), *lost]
    checked = ControllerState()
    checked.load(state.dump())  # what a controller will do; and the indexes are those of the rows alone
    report = _report(config, content, plan, checked, ids, lost, now_ms)
    return Prepared(msgspec.structs.replace(report, removed_brokers=removed), checked, content.seen)


async def _refuse_backup(store: ObjectStore, cluster_id: str) -> None:
    """Refuse a bucket that `tidelog cluster backup` made: the cluster would delete from its only copy."""
    if not await exists(store, backup_key(cluster_id)):
        return
    raise InvalidInput(
        f"{store.url} is a backup of cluster {cluster_id}: the rebuilt cluster would change it",
        hint="`tidelog cluster restore` copies it to a bucket for the cluster, and makes the data directory",
    )


async def _refuse_bucket_wal(store: ObjectStore, content: BucketContent) -> None:
    """Refuse a WAL in the bucket that is not committed: it holds acknowledged records, which are not read here.

    What a broker told of its WAL may have changed since the state was written, also if a controller wrote that as its
    last act: a broker that no controller answers goes on. So the WAL's objects are looked at, too.
    """
    tables, cluster_id = content.state.tables, content.base.cluster_id
    for broker in tables.brokers.values():
        record = tables.replica_sets.get(broker.id)
        if broker.wal_kind != BUCKET_WAL or record is None or not tables.index.partition_counts.get(broker.id, 0):
            continue
        note, committed = note_in(tables.kv.rows, broker.id), record.committed_wal_offset
        if note is not None and is_committed(note, committed):
            if not await _has_records(store, cluster_id, broker.id, committed):
                continue
            why = f"the WAL has records beyond WAL offset {committed}, up to which the metadata knows it as committed"
        else:
            why = "the metadata does not say that everything in it is committed"
        raise InvalidInput(
            f"the WAL of broker {broker.id} of cluster {cluster_id} is in the bucket (wal.kind s3), and {why}:"
            " it may hold acknowledged records, which a rebuild does not read",
            hint="if any controller's directory is left, start it and a broker: they recover that WAL;"
            " `tidelog wal drain` and a clean stop make such a cluster ready for a rebuild",
        )


def _unsure_wals(content: BucketContent, *, of_backup: bool) -> set[int]:
    """Return the replica sets whose WALs may have got records since the state, which knows them as committed.

    A state is up to an interval old. Of one in the bucket it was seen that it has none (`_refuse_bucket_wal`).
    """
    if content.is_last:
        return set()
    tables = content.state.tables
    in_bucket = {one.id for one in tables.brokers.values() if one.wal_kind == BUCKET_WAL and not of_backup}
    return {record.id for record in tables.replica_sets.values()} - in_bucket


async def _has_records(store: ObjectStore, cluster_id: str, broker_id: int, committed: int) -> bool:
    """Return whether a WAL in the bucket holds records beyond an offset, or objects that cannot be read."""
    info = await inspect_bucket(store, cluster_id, broker_id)
    live = [one for one in info.objects if one.is_live]
    return any(one.kind == "damaged" or (one.records and one.end_offset > committed) for one in live)


def _name(tables: Tables, stream_id: int) -> tuple[str, int]:
    key = tables.index.partition_key(stream_id)
    topic = tables.topics.get(key[0]) if key is not None else None
    return (topic.name, key[1]) if topic is not None and key is not None else ("", -1)


def _unreadable(tables: Tables, content: BucketContent, *, is_last: bool) -> list[LostRange]:
    """Return what committed objects have that stay in the metadata, and cannot be read as a whole."""
    gone = missing_objects(tables, content.listed) if is_last else set()
    kinds = dict.fromkeys(gone, "missing")
    for row in tables.objects.values():
        if row.state == ObjectState.COMMITTED and content.listed.get(row.id, row.size) != row.size:
            kinds[row.id] = "damaged"
    found: dict[tuple[int, int], LostRange] = {}
    for object_id, what in sorted(kinds.items()):
        for one in tables.objects.rows[object_id].ranges if object_id in tables.index.live_slices else ():
            place = one.stream_id % STREAMS_PER_PARTITION
            data_id = one.stream_id - place + DATA_STREAM
            data, key = tables.streams.get(data_id), (object_id, data_id)
            start, end = one.start_offset, one.end_offset
            if place == META_STREAM and data is not None:
                start, end = data.start_offset, data.end_offset
            elif place != DATA_STREAM or key in found:
                continue
            found[key] = LostRange(what, *_name(tables, data_id), start, end, object_id)
    return list(found.values())


def _left_out(tables: Tables, plan: RebuildPlan) -> list[LostRange]:
    found = [
        LostRange("trimmed", *_name(tables, stream_id), stream.start_offset, chain.start)
        for stream_id, chain in plan.streams.items()
        if stream_id % STREAMS_PER_PARTITION == DATA_STREAM
        and (stream := tables.streams.get(stream_id)) is not None
        and stream.start_offset < min(chain.start, stream.end_offset)
    ]
    found += [
        LostRange("after a gap", *_name(tables, one.stream_id), one.start, one.end, one.object_id)
        for one in plan.gaps
        if one.stream_id % STREAMS_PER_PARTITION == DATA_STREAM
    ]
    found += [
        LostRange("no topic", "", -1, one.start, one.end, one.object_id)
        for one in plan.unknown
        if one.stream_id % STREAMS_PER_PARTITION == DATA_STREAM
    ]
    return found


def _not_uploaded(tables: Tables, known: set[str]) -> list[LostRange]:
    """Return what `adopt` has recorded as lost with the WALs."""
    rows = {key: row for key, row in tables.kv.rows.items() if key not in known}
    return [
        LostRange("not uploaded", one.topic, one.partition, one.from_offset, one.to_offset)
        for loss in losses_in(rows)
        for one in loss.partitions
    ]


def _report(
    config: Config,
    content: BucketContent,
    plan: RebuildPlan,
    state: ControllerState,
    brokers: list[int],
    lost: list[LostRange],
    now_ms: int,
) -> RebuildReport:
    tables = state.tables
    return RebuildReport(
        cluster_id=content.base.cluster_id,
        generation=content.generation + 1,
        state_written_ms=content.base.written_ms,
        state_is_last=content.is_last,
        brokers=brokers,
        topics=len(tables.topics),
        partitions=len(tables.partitions),
        objects=len(tables.index.live_slices),
        new_objects=sum(object_id in tables.index.live_slices for object_id in plan.found),
        lost=lost,
        damaged=[f"{one.key}: {one.problem}" for one in content.damaged],
        living_owner=_living_owner(config, content, now_ms),
        lost_snapshots=list(plan.lost_snapshots),
    )


def _living_owner(config: Config, content: BucketContent, now_ms: int) -> str:
    """Only a reason to ask the operator; that two clusters do not own the bucket is the claims' task."""
    silence_ms = now_ms - content.owner_seen_ms
    if not content.owner_seen_ms or silence_ms >= OWNER_SILENCE * config.controller.state_interval_ms:
        return ""
    if silence_ms < 0:
        ahead = f"its owner was seen {-silence_ms // 1000} s later than now, by the bucket's clock"
        return f"{ahead}, and has not said that it stopped; one of the two clocks is wrong"
    return f"its owner was seen {silence_ms // 1000} s ago, and has not said that it stopped"


def check_directory(config: Config) -> None:
    """Refuse a directory that holds a cluster. Raises `WrongDataDirectory`."""
    directory = Path(config.node.data_dir)
    if is_unfinished(directory):
        return  # of an earlier attempt, which `carry_out` removes
    for name in (IDENTITY_FILE, cluster_layout.LAYOUT_FILE, "controller", "wal"):
        if (directory / name).exists():
            raise WrongDataDirectory(
                f"{directory} already holds a cluster, or a part of one: {name} exists",
                hint="start it with `tidelog up`; to rebuild it from the bucket nevertheless, move everything but"
                " the folder `bucket` out of it first",
            )


async def carry_out(loaded: Loaded, store: ObjectStore, prepared: Prepared, *, take_over: bool) -> None:
    """Claim the bucket and write the data directory.

    Raises `ConfigError`, `WrongDataDirectory`, `Unavailable` and `StorageFailed`; with the last it may be claimed.
    """
    report, directory = prepared.report, Path(loaded.config.node.data_dir)
    check_directory(loaded.config)
    if report.living_owner and not take_over:
        raise Unavailable(
            f"the bucket seems to be in use: {report.living_owner}",
            hint="stop the old cluster, or make sure that it is gone; then add --take-over",
        )
    lock = lock_file(directory, UP_LOCK_FILE)
    try:
        _start_over(directory)
        nodes = cluster_layout.plan(loaded, len(report.brokers))  # may refuse the settings: nobody has lost the bucket
        await require_unchanged(store, report.cluster_id, prepared.seen)  # an operator may have been asked meanwhile
        text = f"generation {report.generation} of cluster {report.cluster_id}, rebuilt in {directory}\n"
        await claim(store, report.cluster_id, report.generation, text)
        _write(prepared.state, nodes, report.brokers)
        (directory / UNFINISHED_FILE).unlink()
        sync_directory(directory)
    except OSError as error:
        raise StorageFailed(
            f"cannot write {directory}: {error}", hint="check its permissions; then try again"
        ) from error
    finally:
        os.close(lock)


def _start_over(directory: Path) -> None:
    """Remove what an interrupted rebuild has left, and mark the directory."""
    if is_unfinished(directory):
        for name in (cluster_layout.LAYOUT_FILE, cluster_layout.SECRET_FILE):
            (directory / name).unlink(missing_ok=True)
        for folder in (directory / "controller", *directory.glob("node-*")):
            shutil.rmtree(folder, ignore_errors=True)  # the link to the bucket goes, not what it names
    (directory / UNFINISHED_FILE).touch()
    sync_directory(directory)


def _write(state: ControllerState, nodes: Sequence[Loaded], brokers: list[int]) -> None:
    configs = [node.config for node in nodes]
    members = parse_members(configs[0].controller.members)
    directories = {
        config.node.id if members else brokers[0]: Path(config.node.data_dir) / "controller"
        for config in configs
        if not members or config.node.id in members
    }
    write_directories(state, directories, members, random.SystemRandom().random)


def is_unfinished(data_dir: Path) -> bool:
    """Return whether a rebuild, or a restore, of the directory was cut off, perhaps after it had claimed the bucket."""
    return (data_dir / UNFINISHED_FILE).exists()


def check_finished(data_dir: Path) -> None:
    """Refuse to start over a directory that a rebuild has not finished. Raises `WrongDataDirectory`."""
    if is_unfinished(data_dir):
        raise WrongDataDirectory(
            f"the rebuild of {data_dir} was interrupted",
            hint="run `tidelog cluster rebuild`, or `restore`, again: it starts over",
        )
