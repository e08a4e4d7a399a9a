"""Copying a cluster from bucket to bucket while it runs: what `tidelog cluster backup` and `restore` do.

A backup is a bucket like the cluster's own, in a directory or on an S3 server: the same keys, some metadata states, and
the objects that these name. Nothing but the source's bucket is read; brokers notice nothing. What is not uploaded yet
is not in it, nor are changes after the state, which is seconds old (docs/design/0014).

Invariants: a state is written after all that it names, so whatever is interrupted, each state of a backup is whole; an
object is copied only if its size and all its checksums are right; nothing in the source is changed.

A cluster replaces objects while they are copied, and deletes the old ones after `upload.delete_delay_ms`. If one is
gone, a newer state tells what took its place: the copy goes on with that one.

A target is marked as a backup before anything is put there, and only what is marked, and not used by a cluster, is
pruned.
Several copies to one target at the same time leave the newest state whole: a copy deletes only what was there before it
looked for its state, or what it copied itself, and what newer metadata does not name is in none that is newer still.
An older state is not put beside a newer one: its objects may have been pruned, and so would it be.

Entry: `back_up`, `restore`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import msgspec

from tidelog.controller.machine.state import ControllerState
from tidelog.controller.model.bucket_state import (
    BucketState,
    backup_key,
    decode_state,
    encode_state,
    metadata_prefix,
    parse_claim_key,
    parse_state_key,
    state_key,
)
from tidelog.controller.rebuild.source import newest_state
from tidelog.runtime.clock import Clock
from tidelog.runtime.errors import CorruptData, InvalidInput, NotFound, Unavailable
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.objects.key import all_quarantined_prefix, object_key, object_prefix
from tidelog.storage.objects.report import verify_bytes

COPIES = 4
"""Objects copied at a time: each is in memory as a whole."""
MAX_ROUNDS = 20
"""How often the copy goes on with a newer state."""
LOOK_S = 1.0
WAIT_S = 180.0
"""How long a newer state is waited for: an owner writes one within `controller.state_interval_ms` of a change."""

IN_SOURCE = "`tidelog object verify` shows all damage; earlier backups stay as they are"
IN_BACKUP = (
    "another copy of the backup may have it whole. Without one, copy the backup to DIR/bucket of a new data directory,"
    " but not its object metadata/backup, and run `tidelog cluster rebuild --data-dir DIR`: it takes what is left"
)

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and their total."""


class BackupReport(msgspec.Struct, frozen=True):
    """What a copy contains and what it cost."""

    cluster_id: str
    state_written_ms: int
    """Wall clock of the controller that wrote the metadata: the backup is of this time."""
    objects: int
    """Objects that the metadata names."""
    size_bytes: int
    """Their size."""
    copied: int
    """Objects that the target did not have."""
    copied_bytes: int
    removed: int
    """Objects that no state of the target names any more, and were deleted there."""


async def back_up(
    source: ObjectStore,
    target: ObjectStore,
    cluster_id: str,
    clock: Clock,
    *,
    kept: int,
    wait_s: float = WAIT_S,
    progress: Progress = lambda done, total: None,
) -> BackupReport:
    """Copy a cluster; `kept` states stay in the target. May be repeated: what the target has is not copied again.

    Raises `NotFound`, `InvalidInput` for a target that is no backup, or of a cluster that was rebuilt from this one,
    `CorruptData` for a damaged object, `Unavailable`.
    """
    if source.url == target.url:
        raise InvalidInput(f"the copy would be written over its source, {source.url}", hint="give another place")
    await _require_metadata(source, cluster_id)
    await _mark(target, cluster_id)
    copy = _Copy(source, target, cluster_id, progress)
    await copy.look()
    base = await _newest(source, cluster_id)
    await _refuse_newer(target, base)
    for _ in range(MAX_ROUNDS):
        objects = _named(base)
        gone = await copy.copy(objects)
        if not gone:
            break
        base = await _newer(source, base, gone, clock, wait_s)
    else:
        raise Unavailable(
            f"objects of {source.url} are deleted sooner than they are copied",
            hint="raise upload.delete_delay_ms for the time of the backup, or try again: what is copied stays",
        )
    await _refuse_newer(target, base)
    await copy.finish(base)
    return copy.report(base, objects, await _prune(target, cluster_id, kept, copy.there))


async def restore(
    backup: ObjectStore,
    target: ObjectStore,
    cluster_id: str,
    progress: Progress = lambda done, total: None,
    *,
    had_claimed: bool = False,
) -> BackupReport:
    """Copy the newest state of a backup and its objects to a bucket without that cluster. May be repeated if cut off.

    `had_claimed`: an attempt that was cut off may have claimed the bucket; its data directory is not finished.
    Raises `NotFound`, `InvalidInput` if the target holds metadata of the cluster, `CorruptData`, `Unavailable`.
    """
    copy = _Copy(backup, target, cluster_id, progress, damage_hint=IN_BACKUP)
    await copy.look()
    base = await _newest(backup, cluster_id)
    await _refuse_cluster(target, base, had_claimed=had_claimed)
    objects = _named(base)
    gone = await copy.copy(objects)
    if gone:
        raise CorruptData(f"the backup {backup.url} lacks object {object_key(cluster_id, min(gone))}", hint=IN_BACKUP)
    await _refuse_cluster(target, base, had_claimed=had_claimed)  # another restore may have ended meanwhile
    await copy.finish(base)
    return copy.report(base, objects, 0)


async def check_target(backup: ObjectStore, target: ObjectStore, cluster_id: str, *, had_claimed: bool) -> None:
    """Raise what `restore` would for a target that it does not restore to."""
    await _refuse_cluster(target, await _newest(backup, cluster_id), had_claimed=had_claimed)


async def _refuse_cluster(target: ObjectStore, base: BucketState, *, had_claimed: bool) -> None:
    """Refuse a target that is a cluster's, or a backup; but not one with what a restore has left that was cut off.

    That is a state of the backup, and `had_claimed` a claim: a cluster's own first object there is its sign of life.
    Raises `InvalidInput`.
    """
    async for info in target.list(metadata_prefix(base.cluster_id)):
        name = parse_state_key(info.key)
        if name is not None and name <= (base.generation, base.index):
            continue
        if had_claimed and parse_claim_key(info.key) is not None:
            continue
        raise InvalidInput(
            f"{target.url} already holds cluster {base.cluster_id}: {info.key}",
            hint="restore into another bucket or prefix; `tidelog cluster rebuild` uses what is in this one",
        )


async def _require_metadata(source: ObjectStore, cluster_id: str) -> None:
    """Raise `NotFound` without any: the target would be marked for a cluster that does not exist."""
    async for info in source.list(metadata_prefix(cluster_id)):
        if parse_state_key(info.key) is not None:
            return
    raise NotFound(
        f"there is no metadata of a cluster {cluster_id!r} in {source.url}",
        hint="check --cluster-id; a cluster that was just made writes it within seconds",
    )


async def _mark(target: ObjectStore, cluster_id: str) -> None:
    """Mark an empty target as a backup. Raises `InvalidInput` for one that holds something else."""
    metadata = {info.key async for info in target.list(metadata_prefix(cluster_id))}
    marker = backup_key(cluster_id)
    used = sorted(key for key in metadata if parse_state_key(key) is None and key != marker)
    if used or (metadata and marker not in metadata):
        raise InvalidInput(
            f"{target.url} is the bucket of a cluster, not a backup: {(used or sorted(metadata))[0]}",
            hint="give an empty place, or one that an earlier backup made",
        )
    if metadata:
        return
    async for info in target.list(object_prefix(cluster_id)):
        raise InvalidInput(f"{target.url} holds objects of the cluster already: {info.key}", hint="give an empty place")
    await target.put(marker, [f"backup of cluster {cluster_id}\n".encode()])


async def _refuse_newer(target: ObjectStore, base: BucketState) -> None:
    """Refuse a target with newer metadata than is to be put there.

    Raises `InvalidInput` if that is of a rebuilt cluster, else `Unavailable`.
    """
    cluster_id = base.cluster_id
    listed = [parse_state_key(info.key) async for info in target.list(metadata_prefix(cluster_id))]
    newest = max((one for one in listed if one is not None), default=None)
    if newest is None or newest <= (base.generation, base.index):
        return
    if newest.generation > base.generation:
        raise InvalidInput(
            f"{target.url} holds backups of generation {newest.generation} of cluster {cluster_id}, which was rebuilt"
            f" from this one; this one is of generation {base.generation}",
            hint="give each of the two clusters a place of its own",
        )
    raise Unavailable(
        f"{target.url} holds a backup of newer metadata (log index {newest.log_index}) than this one's ({base.index})",
        hint="one that was made at the same time has ended: nothing is to be done. If there was none, the source's"
        " newest metadata is damaged: `tidelog cluster rebuild --dry-run` names it",
    )


class _Copy:
    """The objects of one copy. `look` comes first."""

    def __init__(
        self,
        source: ObjectStore,
        target: ObjectStore,
        cluster_id: str,
        progress: Progress,
        *,
        damage_hint: str = IN_SOURCE,
    ) -> None:
        self._source = source
        self._damage_hint = damage_hint
        self._target = target
        self._cluster_id = cluster_id
        self._progress = progress
        self.there: dict[str, int] = {}
        """Sizes of the target's objects, by key: those that `look` found, and those that were copied."""
        self.copied = 0
        self.copied_bytes = 0

    async def look(self) -> None:
        """List the target's objects, before the state of the source is read."""
        self.there = {info.key: info.size async for info in self._target.list(object_prefix(self._cluster_id))}

    async def copy(self, objects: dict[int, int]) -> list[int]:
        """Copy objects (sizes by id) that the target lacks; return those that the source does not have any more."""
        keys = {object_id: object_key(self._cluster_id, object_id) for object_id in objects}
        wanted = [one for one in sorted(objects) if self.there.get(keys[one]) != objects[one]]
        total = self.copied_bytes + sum(objects[one] for one in wanted)
        gone: list[int] = []
        for first in range(0, len(wanted), COPIES):
            some = wanted[first : first + COPIES]
            answers = await asyncio.gather(
                *(self._copy_one(keys[one], objects[one]) for one in some), return_exceptions=True
            )
            for object_id, answer in zip(some, answers, strict=True):
                if isinstance(answer, BaseException):
                    raise answer
                if not answer:
                    gone.append(object_id)
            self._progress(self.copied_bytes, total)
        return gone

    async def _copy_one(self, key: str, size: int) -> bool:
        try:
            data = await self._source.get(key)
        except ObjectNotFound:
            return False
        if len(data) != size:
            raise CorruptData(f"object {key} has {len(data)} bytes; the metadata say {size}", hint=self._damage_hint)
        problems = await asyncio.to_thread(verify_bytes, data, key)
        if problems:
            raise CorruptData(
                f"object {key} is damaged and was not copied: {problems[0].message}",
                hint=self._damage_hint,
            )
        await self._target.put(key, [data])
        self.there[key] = size
        self.copied, self.copied_bytes = self.copied + 1, self.copied_bytes + size
        return True

    async def finish(self, base: BucketState) -> None:
        """Copy the rest, and last the state, which makes the copy whole."""
        await self._copy_quarantined()
        await self._target.put(state_key(self._cluster_id, base.generation, base.index), [encode_state(base)])

    def report(self, base: BucketState, objects: dict[int, int], removed: int) -> BackupReport:
        """Return what was done; `objects` are those that `base` names."""
        size, written_ms = sum(objects.values()), base.written_ms
        return BackupReport(self._cluster_id, written_ms, len(objects), size, self.copied, self.copied_bytes, removed)

    async def _copy_quarantined(self) -> None:
        """Copy records that were set aside; operators may take them away at any time."""
        prefix = all_quarantined_prefix(self._cluster_id)
        there = {info.key: info.size async for info in self._target.list(prefix)}
        async for info in self._source.list(prefix):
            if there.get(info.key) == info.size:
                continue
            try:
                data = await self._source.get(info.key)
            except ObjectNotFound:
                continue
            await self._target.put(info.key, [data])


async def _newest(source: ObjectStore, cluster_id: str) -> BucketState:
    infos = [info async for info in source.list(metadata_prefix(cluster_id))]
    base, _ = await newest_state(source, cluster_id, infos, [])
    return base


async def _newer(source: ObjectStore, base: BucketState, gone: list[int], clock: Clock, wait_s: float) -> BucketState:
    """Wait for a state that tells what took the place of objects that are gone."""
    until = clock.monotonic() + wait_s
    while True:
        found = await _newest(source, base.cluster_id)
        if (found.generation, found.index) > (base.generation, base.index):
            return found
        if clock.monotonic() >= until:
            raise CorruptData(
                f"{len(gone)} objects that the metadata name are not in {source.url}, the first being"
                f" {object_key(base.cluster_id, min(gone))}, and no newer metadata came within {wait_s:.0f} s",
                hint="`tidelog object verify` shows what is missing",
            )
        await clock.sleep(LOOK_S)


def _named(base: BucketState) -> dict[int, int]:
    """Return the sizes of the objects that a state needs, by id. Raises `CorruptData`."""
    state = ControllerState()
    state.load(base.state)
    return {one: state.tables.objects.rows[one].size for one in state.tables.index.live_slices}


async def _prune(target: ObjectStore, cluster_id: str, kept: int, known: Collection[str]) -> int:
    """Delete all but the newest states, and then what no state names, of the objects known here; return their number.

    Another object may be of a copy that is under way.
    """
    infos = [info.key async for info in target.list(metadata_prefix(cluster_id))]
    names = sorted((name, key) for key in infos if (name := parse_state_key(key)) is not None)
    old = [key for _, key in names[:-kept]]
    if old:
        await target.delete(old)
    named: set[str] = set()
    for _, key in names[-kept:]:
        named |= {object_key(cluster_id, one) for one in _named(decode_state(await target.get(key), key=key))}
    listing = target.list(object_prefix(cluster_id))
    extra = [info.key async for info in listing if info.key in known and info.key not in named]
    if extra:
        await target.delete(extra)
    return len(extra)
