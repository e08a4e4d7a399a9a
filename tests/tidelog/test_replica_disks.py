"""WALs that are set aside are kept, never overwritten, and not without bound; one that is removed is gone at once."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tidelog.process.replica_disks import MAX_REJECTED, DirectoryReplicaDisks
from tidelog.runtime.errors import StorageFailed
from tidelog.storage.settings import WalSettings


def names(path: Path) -> list[str]:
    return [each.name for each in path.iterdir()]


@pytest.mark.parametrize(("replica_set", "name"), [(1, "wal"), (7, "replica-7")])
async def test_what_is_set_aside_is_kept_and_an_empty_wal_takes_its_place(
    tmp_path: Path, replica_set: int, name: str
) -> None:
    disks = DirectoryReplicaDisks(tmp_path, 1, WalSettings(), random.Random(1))
    for number in range(1, MAX_REJECTED + 1):
        opened = disks.open(replica_set)
        await opened.wal.recover(lambda _record: None)
        assert not (tmp_path / name / "mark").exists(), "it begins without the files of the one before"
        await opened.wal.close()
        await opened.disk.close()
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "mark").write_text(str(number))
        place = await disks.set_aside(replica_set)
        assert place == str(tmp_path / f"rejected-{name}-{number}")
        assert not (tmp_path / name).exists()
    (tmp_path / name).mkdir()
    with pytest.raises(StorageFailed, match="are kept beside"):
        await disks.set_aside(replica_set)
    assert (tmp_path / name).is_dir()
    kept = await disks.rejected()
    assert [Path(each).joinpath("mark").read_text() for each in kept] == ["1", "2", "3"]
    assert disks.kept() == ([] if replica_set == 1 else [7]), "none of them is taken for a replica"


async def test_files_that_a_wal_kept_when_it_started_over_are_seen(tmp_path: Path) -> None:
    disks = DirectoryReplicaDisks(tmp_path, 1, WalSettings(), random.Random(1))
    assert not await disks.keeps_earlier(7)
    opened = disks.open(7)
    await opened.wal.recover(lambda _record: None)
    await opened.wal.begin_epoch(1)
    assert not await disks.keeps_earlier(7)
    await opened.wal.promise(2)
    await opened.wal.restart_at(512, master_epoch=2, kept_as=".replaced-2-64")
    assert await disks.keeps_earlier(7) and not await disks.keeps_earlier(1)
    await opened.wal.close()
    await opened.disk.close()


async def test_a_replica_whose_removal_was_interrupted_is_not_opened_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disks = DirectoryReplicaDisks(tmp_path, 1, WalSettings(), random.Random(1))

    async def begun() -> None:
        opened = disks.open(7)
        await opened.wal.recover(lambda _record: None)
        assert opened.wal.promised_epoch < 3, "it begins with nothing of the one before"
        await opened.wal.promise(3)
        await opened.wal.close()
        await opened.disk.close()

    def in_part(path: Path) -> None:
        (path / "id").unlink(missing_ok=True)
        raise OSError(5, "Input/output error")

    await begun()
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", in_part)
        with pytest.raises(StorageFailed, match="cannot be deleted"):
            await disks.remove(7)
    assert disks.kept() == [7], "it is still to be deleted"
    await begun()
    assert names(tmp_path) == ["replica-7"]
    for _ in range(2):
        await disks.remove(7)
        assert disks.kept() == [] and names(tmp_path) == []
