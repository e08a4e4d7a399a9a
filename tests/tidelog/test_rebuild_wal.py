"""What a rebuild does about a write-ahead log in the bucket (`tidelog.process.rebuild`)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.controller.controller_helpers import Driver, until
from tidelog.cli.options import load_config
from tidelog.controller.model import commands as c
from tidelog.controller.model.bucket_state import BucketState, encode_state, state_key
from tidelog.controller.model.wal_notes import WalNote
from tidelog.process.backup import back_up
from tidelog.process.rebuild import prepare
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import InvalidInput
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.records import StreamAppend
from tidelog.storage.settings import WalSettings
from tidelog.storage.wal.s3.wal import S3Wal

CLUSTER = "cluster"
BROKER = 1


class WalInBucket(MemoryObjectStore):
    """The bucket of a cluster of one broker whose WAL is there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()
        self.driver.run(c.RegisterBroker(BROKER, "check", "a", "host", 9092, "", "", wal_kind="s3"), int)
        self.epoch = int(self.driver.run(c.Elect(BROKER, BROKER))[4])
        [first] = self.driver.topic()
        self.stream = first + 1
        self.wal = S3Wal(
            self, WalSettings(), cluster_id=CLUSTER, replica_set_id=BROKER, clock=SystemClock(), rng=random.Random(1)
        )

    async def begin(self) -> None:
        """Begin the WAL, and note that all in it is committed."""
        await self.wal.recover(lambda record: None)
        await self.wal.begin_epoch(self.epoch)
        self.driver.commit(self.epoch, (0, self.wal.end_offset), replica_set=BROKER)
        self.note(may_grow=False)

    def note(self, *, may_grow: bool) -> None:
        note = WalNote("s3", "", self.epoch, self.driver.index, self.wal.durable_offset, may_grow)
        self.driver.run(c.NoteWal(BROKER, note))

    async def write(self) -> None:
        """Write a record, which the WAL then has for good."""
        end = self.wal.append(StreamAppend(self.stream, self.epoch, 0, 1, (b"acknowledged",)))
        await until(lambda: self.wal.durable_offset == end)

    async def write_state(self, *, closed: bool) -> None:
        state = self.driver.state
        body = BucketState(CLUSTER, 1, state.applied_index, state.version, 1, 0, closed, state.dump())
        await self.put(state_key(CLUSTER, 1, state.applied_index), [encode_state(body)])


@pytest.mark.parametrize("closed", [False, True])
async def test_what_was_acknowledged_without_controllers_is_not_given_up(closed: bool, tmp_path: Path) -> None:
    """A broker that no controller answers goes on; so the last state of a controller is not the end of the WAL."""
    bucket, config = WalInBucket(), load_config(None, (), node__data_dir=str(tmp_path)).config
    await bucket.begin()
    await bucket.write_state(closed=closed)
    assert (await prepare(config, bucket, 1, CLUSTER)).report.lost == []
    await bucket.write()
    with pytest.raises(InvalidInput, match="has records beyond WAL offset"):
        await prepare(config, bucket, 1, CLUSTER)
    await bucket.wal.close()


async def test_a_backup_from_beside_the_work_can_be_restored(tmp_path: Path) -> None:
    """It has no WAL that could be recovered: what only that had is lost, and is named."""
    bucket, config = WalInBucket(), load_config(None, (), node__data_dir=str(tmp_path)).config
    await bucket.begin()
    await bucket.write()
    bucket.note(may_grow=True)
    await bucket.write_state(closed=False)
    with pytest.raises(InvalidInput, match="does not say that everything in it is committed"):
        await prepare(config, bucket, 1, CLUSTER)
    copy = LocalObjectStore(tmp_path / "copy")
    await back_up(bucket, copy, CLUSTER, SystemClock(), kept=1)
    report = (await prepare(config, copy, 1, CLUSTER, of_backup=True)).report
    assert [(one.what, one.topic, one.from_offset, one.to_offset) for one in report.lost] == [
        ("not uploaded", "t", 0, -1)
    ]
    await copy.close()
    await bucket.wal.close()
