"""Inspection of a WAL in the bucket without a broker, for `tidelog wal inspect|verify --wal s3`.

Everything here is read-only, and may be used beside a running broker: objects that are trimmed while they are listed
are
left out, and an object that seems to be missing is looked up again before it is reported as lost. An object that fails
its check is read a second time first.

The report covers what a broker would recover: the chain from the first seq on (`tidelog.storage.wal.s3.chain`). Damage
in an object that is trimmed already, or dead after a fence, is reported as a note.

Entry: `inspect_bucket`, `verify_bucket`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from tidelog.runtime.errors import CorruptData, Unavailable
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.wal.disk.inspect import OnRecord, Progress, WalFinding
from tidelog.storage.wal.format import WalHeader, record_of
from tidelog.storage.wal.s3.chain import Chain, missing_object
from tidelog.storage.wal.s3.format import (
    DamagedWalObject,
    ObjectType,
    WalObject,
    decode,
    parse_seq,
    wal_key,
    wal_prefix,
)

_READS_AT_ONCE = 16
_LOOKS = 3
_PAUSE_S = 0.2
_NO_BODY = memoryview(b"")


class WalObjectInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One object of the log. Offsets are WAL offsets in bytes (int64)."""

    key: str
    kind: Literal["data", "fence", "damaged"]
    size_bytes: int
    start_offset: int
    """-1 in a fence."""
    end_offset: int
    records: int
    master_epoch: int
    is_live: bool
    """Whether recovery would read it: it is in the chain, not trimmed and not dead after a fence."""


class BucketWalInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A WAL in the bucket."""

    prefix: str
    objects: list[WalObjectInfo]
    start_offset: int
    end_offset: int
    last_epoch: int
    """Master epoch of the last writer; -1 for none."""


class BucketWalReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `verify_bucket`."""

    info: BucketWalInfo
    findings: list[WalFinding]


async def inspect_bucket(
    store: ObjectStore,
    cluster_id: str,
    replica_set_id: int,
    *,
    on_record: OnRecord | None = None,
    progress: Progress | None = None,
) -> BucketWalInfo:
    """Describe the log; `on_record` is called for each whole record, in order of the objects. Raises `Unavailable`."""
    examination = _Examination(store, wal_prefix(cluster_id, replica_set_id), replica_set_id, on_record, progress)
    return (await examination.run(looks=1)).info


async def verify_bucket(
    store: ObjectStore, cluster_id: str, replica_set_id: int, *, progress: Progress | None = None
) -> BucketWalReport:
    """Check every object, every record in it, and that none is missing. Changes nothing. Raises `Unavailable`."""
    examination = _Examination(store, wal_prefix(cluster_id, replica_set_id), replica_set_id, None, progress)
    return await examination.run(looks=_LOOKS)


@dataclass(slots=True)
class _Seen:
    """An object without its body, or the error of reading it."""

    size: int
    found: WalObject | CorruptData


class _Examination:
    """One examination of the whole log."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        replica_set_id: int,
        on_record: OnRecord | None,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._replica_set_id = replica_set_id
        self._on_record = on_record
        self._progress = progress
        self._seen: dict[int, _Seen] = {}

    async def run(self, looks: int) -> BucketWalReport:
        while True:
            await self._read_new()
            chain, damage = self._chain()
            lost = self._lost(chain, damage)
            looks -= 1
            if lost is None or looks <= 0:
                return self._report(chain, damage, lost)
            await asyncio.sleep(_PAUSE_S)  # a put may be in flight, or a trim in progress: check again

    # -- reading

    async def _read_new(self) -> None:
        """List, and read the objects not read before. Drop those trimmed since."""
        listed = {
            seq: info.size
            async for info in self._store.list(self._prefix)
            if (seq := parse_seq(self._prefix, info.key)) is not None
        }
        for seq in self._seen.keys() - listed.keys():
            del self._seen[seq]
        todo = sorted(listed.keys() - self._seen.keys())
        total, done = sum(listed[seq] for seq in todo), 0
        for first in range(0, len(todo), _READS_AT_ONCE):
            group = todo[first : first + _READS_AT_ONCE]
            for seq, found in zip(
                group, await asyncio.gather(*(self._read(each, listed[each]) for each in group)), strict=True
            ):
                if found is not None:
                    self._seen[seq] = _Seen(listed[seq], self._without_body(found))
                done += listed[seq]
            if self._progress is not None:
                self._progress(done, total)

    async def _read(self, seq: int, size: int) -> WalObject | CorruptData | None:
        key = wal_key(self._prefix, seq)
        damage: CorruptData | None = None
        for _look in range(2):
            try:
                data = await self._store.get(key)
                if len(data) < size:
                    raise Unavailable(
                        f"{len(data)} of the {size} bytes of {key} came", hint="look for a proxy before the bucket"
                    )
                found = decode(self._prefix, key, data, self._replica_set_id)
                for _ in _records(found):
                    continue
                return found
            except ObjectNotFound:
                return None
            except CorruptData as error:
                damage = error
        return damage

    def _without_body(self, found: WalObject | CorruptData) -> WalObject | CorruptData:
        if isinstance(found, CorruptData):
            return found
        if self._on_record is not None:
            for header, position in _records(found):
                self._on_record(record_of(header, found.body, position))
        return replace(found, body=_NO_BODY)

    # -- evaluation

    def _whole(self) -> list[WalObject]:
        return [seen.found for seen in self._seen.values() if isinstance(seen.found, WalObject)]

    def _chain(self) -> tuple[Chain, CorruptData | None]:
        """Return the chain that recovery would read, and the damage that ends it, if any."""
        chain = Chain(max((one.first_seq for one in self._whole()), default=min(self._seen, default=0)))
        while (seen := self._seen.get(chain.hole)) is not None:
            if isinstance(seen.found, CorruptData):
                return chain, seen.found
            try:
                chain.extend(seen.found)
            except CorruptData as error:
                return chain, error
        return chain, None

    def _lost(self, chain: Chain, damage: CorruptData | None) -> WalFinding | None:
        """Return the acknowledged object that is missing, if any."""
        if damage is not None or not self._seen:
            return None
        if not chain.objects:
            proof = "the first seq of the newest object"
        else:
            witness = chain.missing(one for one in self._whole() if one.seq > chain.hole)
            if witness is None:
                return None
            proof = f"the durable offset in {witness.key}"
        key = wal_key(self._prefix, chain.hole)
        message = missing_object(key, chain.end_offset, proof).message
        return WalFinding(kind="lost", file=key, file_offset=-1, wal_offset=chain.end_offset, message=message)

    def _report(self, chain: Chain, damage: CorruptData | None, lost: WalFinding | None) -> BucketWalReport:
        on_chain = {one.seq for one in chain.objects}
        findings = [lost] if lost is not None else []
        if damage is not None and not any(seen.found is damage for seen in self._seen.values()):
            findings.append(_finding("corrupt", damage, chain.end_offset))
        for seq, seen in sorted(self._seen.items()):
            if not isinstance(seen.found, CorruptData):
                continue
            if seq < chain.first_seq or (damage is None and seq not in on_chain):
                findings.append(_finding("leftover", seen.found, -1))
            else:
                findings.append(_finding("corrupt", seen.found, chain.end_offset if seq == chain.hole else -1))
        info = BucketWalInfo(
            prefix=self._prefix,
            objects=[self._info(seq, seen, seq in on_chain) for seq, seen in sorted(self._seen.items())],
            start_offset=chain.start_offset,
            end_offset=chain.end_offset,
            last_epoch=chain.epoch,
        )
        return BucketWalReport(info=info, findings=findings)

    def _info(self, seq: int, seen: _Seen, is_live: bool) -> WalObjectInfo:
        one = seen.found
        if isinstance(one, CorruptData):
            return WalObjectInfo(
                key=wal_key(self._prefix, seq),
                kind="damaged",
                size_bytes=seen.size,
                start_offset=-1,
                end_offset=-1,
                records=0,
                master_epoch=-1,
                is_live=is_live,
            )
        return WalObjectInfo(
            key=one.key,
            kind="fence" if one.kind is ObjectType.FENCE else "data",
            size_bytes=seen.size,
            start_offset=one.wal_start,
            end_offset=one.wal_end,
            records=one.records,
            master_epoch=one.master_epoch,
            is_live=is_live,
        )


def _records(one: WalObject) -> Iterator[tuple[WalHeader, int]]:
    """Yield the checked headers of an object's records; a fence has none. Raises `CorruptData`."""
    return one.headers() if one.kind is ObjectType.DATA else iter(())


def _finding(kind: Literal["corrupt", "leftover"], error: CorruptData, wal_offset: int) -> WalFinding:
    assert isinstance(error, DamagedWalObject)
    message = error.reason if kind == "corrupt" else f"{error.reason}; it is no longer part of the log"
    return WalFinding(kind=kind, file=error.key, file_offset=error.position, wal_offset=wal_offset, message=message)
