"""Whether the newest metadata in a bucket is the last that there was, and what a rebuild says if it may not be."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from tests.controller.controller_helpers import Driver
from tests.tidelog.test_backup_copy import Bucket
from tidelog.cli.options import load_config
from tidelog.cli.subcommands.cluster_rebuild import render_report
from tidelog.controller.model import commands as c
from tidelog.controller.model.bucket_state import BucketState, encode_state, owner_key, owner_text, state_key
from tidelog.controller.model.wal_notes import WalNote
from tidelog.process.backup import back_up
from tidelog.process.rebuild import RebuildReport, prepare
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore

CLUSTER = "cluster"


class CommittedCluster(MemoryObjectStore):
    """The bucket of a cluster of one broker, with its WAL on disk, of which the state says that all is committed."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.epoch = self.driver.broker()
        [first] = self.driver.topic()
        self.driver.run(c.OpenStreams(0, self.epoch, ((first + 1, self.epoch),)))
        self.driver.run(c.NoteWal(0, WalNote("disk", "", self.epoch, 1, 0, False)))

    async def write_state(self, *, closed: bool, term: int = 1) -> str:
        """As a controller does: its sign of life first."""
        state = self.driver.state
        body = BucketState(CLUSTER, 1, state.applied_index, state.version, term, 0, closed, state.dump())
        await self.put(owner_key(CLUSTER), [owner_text(1, term, 0)])
        key = state_key(CLUSTER, 1, state.applied_index)
        await self.put(key, [encode_state(body)])
        self.driver.run(c.PutKv("later", b"change"))
        return key


async def report(
    bucket: MemoryObjectStore | LocalObjectStore, place: Path, *, of_backup: bool = False
) -> RebuildReport:
    config = load_config(None, (), node__data_dir=str(place)).config
    return (await prepare(config, bucket, 1, CLUSTER, of_backup=of_backup)).report


def lost(found: RebuildReport) -> list[tuple[str, str, int, int]]:
    return [(one.what, one.topic, one.from_offset, one.to_offset) for one in found.lost]


async def test_what_a_wal_may_have_got_after_the_metadata_is_named(tmp_path: Path) -> None:
    """A broker tells of its first record after a pause at once; the state follows up to 60 s later."""
    bucket = CommittedCluster()
    await bucket.write_state(closed=False)
    assert lost(await report(bucket, tmp_path)) == [("not uploaded", "t", 0, -1)]
    copy = LocalObjectStore(tmp_path / "copy")
    await back_up(bucket, copy, CLUSTER, SystemClock(), kept=1)
    assert lost(await report(copy, tmp_path, of_backup=True)) == [("not uploaded", "t", 0, -1)]
    await copy.close()


@pytest.mark.parametrize("what", ["the last", "a damaged one follows", "another controller became active"])
async def test_the_metadata_of_a_clean_stop_is_the_last_only_if_nobody_followed(what: str, tmp_path: Path) -> None:
    bucket = CommittedCluster()
    await bucket.write_state(closed=True)
    if what == "a damaged one follows":
        key = await bucket.write_state(closed=False, term=2)
        await bucket.put(key, [b"damaged"])
    elif what == "another controller became active":
        await bucket.put(owner_key(CLUSTER), [owner_text(1, 2, 0)])  # and died before its state
    found = await report(bucket, tmp_path)
    is_last = what == "the last"
    assert found.state_is_last == is_last
    assert (found.living_owner == "") == is_last
    assert lost(found) == ([] if is_last else [("not uploaded", "t", 0, -1)])


class UploadedCluster(Bucket):
    """The bucket of a cluster that has uploaded three objects and stopped cleanly."""

    async def stop(self) -> list[str]:
        """Return the keys of the objects."""
        uploaded = [await self.upload() for _ in range(3)]
        self.driver.run(c.NoteWal(0, WalNote("disk", "", self.epoch, 1, 0, False)))
        state = self.driver.state
        body = BucketState(CLUSTER, 1, state.applied_index, state.version, 1, 0, True, state.dump())
        await self.put(state_key(CLUSTER, 1, state.applied_index), [encode_state(body)])
        return uploaded


@pytest.mark.parametrize("what", ["missing", "damaged"])
async def test_an_object_that_a_foreign_hand_took_costs_nothing_but_its_own_records(what: str, tmp_path: Path) -> None:
    """What precedes it was given up, and deleted from the bucket; a truncated one was not told at all."""
    bucket = UploadedCluster()
    uploaded = await bucket.stop()
    if what == "missing":
        await bucket.delete([uploaded[1]])
    else:
        await bucket.put(uploaded[1], [(await bucket.get(uploaded[1]))[:100]])
    config = load_config(None, (), node__data_dir=str(tmp_path)).config
    prepared = await prepare(config, bucket, 1, CLUSTER)
    assert prepared.report.objects == 3
    assert lost(prepared.report) == [(what, "t", 1, 2)]
    stream = prepared.state.tables.streams.rows[bucket.stream]
    assert (stream.start_offset, stream.end_offset) == (0, 3)
    accepted = await prepare(config, bucket, 1, CLUSTER, accept_loss=True)
    assert lost(accepted.report) == ([("trimmed", "t", 0, 2)] if what == "missing" else [("damaged", "t", 1, 2)])


async def test_brokers_that_are_left_out_are_named(tmp_path: Path) -> None:
    """Their settings go with them, and `--brokers` is 1 unless it is given."""
    bucket = CommittedCluster()
    bucket.driver.broker(1)
    bucket.driver.broker(7)
    await bucket.write_state(closed=True)
    found = await report(bucket, tmp_path)
    assert (found.brokers, found.removed_brokers) == ([1], [0, 7])
    assert "whose own settings are gone: 0, 7" in render_report(msgspec.to_builtins(found))


async def test_an_owner_that_was_seen_later_than_now_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To wait for two minutes, as is advised, does not help then."""
    bucket = CommittedCluster()
    await bucket.write_state(closed=False)
    now = time.time()
    monkeypatch.setattr("tidelog.process.rebuild.time.time", lambda: now - 3 * 24 * 3600)
    assert "later than now, by the bucket's clock" in (await report(bucket, tmp_path)).living_owner
