"""What the local store promises beyond the common contract: crashes, full disks, several processes."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import ConfigError, InvalidInput, Unavailable
from tidelog.runtime.types import Buffer
from tidelog.storage.bucket.common import StoreAccessDenied, StoreFull
from tidelog.storage.bucket.gate import PriorityGate
from tidelog.storage.bucket.guarded import GuardedObjectStore
from tidelog.storage.bucket.local import TMP_NAME, LocalObjectStore
from tidelog.storage.bucket.store import ObjectExists, ObjectNotFound

ROOT = Path(__file__).resolve().parents[2]

CRASHING_PUT = """
import asyncio, os, pathlib, sys
from tidelog.storage.bucket.local import LocalObjectStore

directory, crash_at, if_absent = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "create"
is_open = sys.argv[4] == "open"
step = 0

def crashing(real):
    def call(*args, **kwargs):
        global step
        step += 1
        if step == crash_at:
            os._exit(9)
        return real(*args, **kwargs)
    return call

store = LocalObjectStore(directory)
if is_open:
    asyncio.run(store.put("dir/sub/before", [b"before"]))
for name in ("open", "writev", "pwrite", "ftruncate", "fsync", "link", "unlink", "rename", "mkdir", "close"):
    setattr(os, name, crashing(getattr(os, name)))
size = int(sys.argv[5])
asyncio.run(store.put("dir/sub/key", [b"new " * size, b"body" * size], if_absent=if_absent))
print("acknowledged", flush=True)
os._exit(0)
"""


def run_child(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.processes
@pytest.mark.parametrize(("directory_is", "size"), [("closed", 1000), ("open", 1000), ("open", 300_000)])
@pytest.mark.parametrize("mode", ["create", "replace"])
async def test_a_crash_at_any_step_of_a_put_leaves_the_old_object_or_the_new_one(
    tmp_path: Path, mode: str, directory_is: str, size: int
) -> None:
    new = b"new " * size + b"body" * size
    before = ["dir/sub/before"] if directory_is == "open" else []

    async def look(directory: Path) -> bytes | None:
        store = LocalObjectStore(directory)
        assert list((directory / TMP_NAME).iterdir()) == []
        try:
            found = await store.get("dir/sub/key")
        except ObjectNotFound:
            found = None
        listed = [info.key async for info in store.list("")]
        assert listed == before + ([] if found is None else ["dir/sub/key"])
        await store.put("dir/sub/key", [b"after"], if_absent=found is None)
        await store.close()
        return found

    async def prepare(directory: Path) -> None:
        store = LocalObjectStore(directory)
        if mode == "replace":
            await store.put("dir/sub/key", [b"old"])
        await store.close()

    seen: set[bytes | None] = set()
    for crash_at in range(1, 60):
        directory = tmp_path / str(crash_at)
        await prepare(directory)
        child = run_child(CRASHING_PUT, directory, crash_at, mode, directory_is, size)
        assert child.returncode in (0, 9), child.stderr
        found = await look(directory)
        seen.add(found)
        assert found in ({None, new} if mode == "create" else {b"old", new})
        if child.returncode == 0:
            assert found == new
            break
    else:
        pytest.fail("the put never came to its end")
    assert len(seen) == 2  # the crashes did fall on both sides of the point where the object appears
    assert crash_at > 5


RACING_CREATE = """
import asyncio, sys
from tidelog.storage.bucket.store import ObjectExists
from tidelog.storage.bucket.local import LocalObjectStore

async def main():
    store = LocalObjectStore(sys.argv[1])
    for number in range(60):
        try:
            await store.put(f"race/{number}", [sys.argv[2].encode()], if_absent=True)
            print(number)
        except ObjectExists:
            pass
        if number % 3 == 0:
            await store.put(f"own/{sys.argv[2]}", [b"x"])
            await store.delete([f"own/{sys.argv[2]}"])  # removes the directory under the others' feet
    await store.close()

asyncio.run(main())
"""


@pytest.mark.processes
def test_of_several_processes_exactly_one_creates_each_key(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    children = [
        subprocess.Popen([sys.executable, "-c", RACING_CREATE, bucket, name], cwd=ROOT, stdout=subprocess.PIPE)
        for name in "abcd"
    ]
    won: dict[int, str] = {}
    for name, child in zip("abcd", children, strict=True):
        output, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        for line in output.split():
            assert int(line) not in won
            won[int(line)] = name
    assert sorted(won) == list(range(60))
    for number, name in won.items():
        assert (bucket / "race" / str(number)).read_text() == name


def failing(error: int, times: int = 1_000_000) -> Any:
    left = times

    def call(*_: object, **__: object) -> int:
        nonlocal left
        if left <= 0:
            raise AssertionError("asked more often than the test expects")
        left -= 1
        raise OSError(error, os.strerror(error))

    return call


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
async def test_a_full_disk_is_a_clear_retriable_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    store = LocalObjectStore(tmp_path / "bucket")
    await store.put("kept", [b"old"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", failing(error))
        with pytest.raises(StoreFull, match="full") as caught:
            await store.put("kept", [b"new"])
    assert caught.value.retriable
    assert isinstance(caught.value, Unavailable)
    assert list((tmp_path / "bucket" / TMP_NAME).iterdir()) == []
    assert await store.get("kept") == b"old"
    await store.put("kept", [b"new"])
    assert await store.get("kept") == b"new"
    await store.close()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EPERM])
async def test_the_files_of_another_user_are_denied_and_no_failure_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    store = GuardedObjectStore(LocalObjectStore(tmp_path / "bucket"), PriorityGate(4), SystemClock())
    await store.put("a/1", [b"x"])

    async def listed() -> None:
        assert [info.key async for info in store.list("")] == ["a/2"]

    requests: dict[str, Callable[[], Awaitable[Any]]] = {
        "open": lambda: store.get("a/1"),
        "rename": lambda: store.put("a/1", [b"x"]),
        "link": lambda: store.put("a/2", [b"x"], if_absent=True),
        "unlink": lambda: store.delete(["a/1"]),
        "scandir": listed,
    }
    for call, request in requests.items():
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(error))
            with pytest.raises(StoreAccessDenied, match="denies access") as caught:
                await request()
        assert "chown -R" in str(caught.value.hint)
        assert "denies access" in store.health.problems()[0]
        await request()
        assert store.health.problems() == []
    await store.close()


async def test_what_a_failed_fsync_covered_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalObjectStore(tmp_path / "bucket")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(errno.EIO, times=1))
        with pytest.raises(Unavailable, match="Input/output error"):
            await store.put("k", [b"x"], if_absent=True)
    with pytest.raises(ObjectNotFound):
        await store.get("k")
    await store.put("k", [b"y"], if_absent=True)
    await store.close()


async def test_a_name_is_durable_before_anybody_is_told_that_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put whose directory could not be synced is tried again, and its object found: it counts as stored then."""
    store = LocalObjectStore(tmp_path / "bucket")
    await store.put("a/other", [b"x"])
    failures = 2
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal failures
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.name == "a":
            if failures:
                failures -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            synced.append(path.name)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        with pytest.raises(Unavailable, match="Input/output error"):
            await store.put("a/k", [b"x"], if_absent=True)
    assert not synced
    with pytest.raises(ObjectExists):
        await store.put("a/k", [b"x"], if_absent=True)
    assert synced == ["a"]
    await store.close()


async def test_every_name_is_synced_up_to_the_root_unless_it_was_and_still_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    synced: list[tuple[str, bool]] = []
    """Directories, and whether the object had its name by then."""
    real_fsync = os.fsync

    def spy(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_dir():
            synced.append((str(path.relative_to(bucket)), (bucket / "a/b" / key[-1]).exists()))
        real_fsync(descriptor)

    key = "a/b/1"
    store = LocalObjectStore(bucket)
    monkeypatch.setattr(os, "fsync", spy)
    await store.put(key, [b"x"])
    assert synced == [("a", False), (".", False), ("a/b", True)]
    synced.clear()
    key = "a/b/2"
    await store.put(key, [b"x"], if_absent=True)
    assert synced == [("a/b", True)]  # its way up is known to be durable
    other = LocalObjectStore(bucket)
    await other.delete(["a/b/1", "a/b/2"])
    assert not (bucket / "a").exists()
    (bucket / "a/b").mkdir(parents=True)  # by a process that has not synced their names yet
    synced.clear()
    key = "a/b/3"
    await store.put(key, [b"x"])
    assert synced == [("a", False), (".", False), ("a/b", True)]
    assert await other.get(key) == b"x"
    await store.close()
    await other.close()


async def test_a_body_is_written_whole_in_however_many_pieces_the_kernel_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[list[Buffer]] = [
        [b"one"],
        [],
        [b"", b"a", b"", bytearray(b"bc"), memoryview(b"defghijkl"), b""],
        [b"%d," % number for number in range(3_000)],
    ]
    real_writev, taken = os.writev, 0

    def writev(descriptor: int, buffers: list[memoryview]) -> int:
        nonlocal taken
        taken = taken % 11 + 1
        return real_writev(descriptor, [b"".join(buffers)[: taken * 97 % 13 + 1]])

    async def main() -> None:
        store = LocalObjectStore(tmp_path / "bucket")
        for pieces in (False, True):
            if pieces:
                monkeypatch.setattr(os, "writev", writev)
            for number, body in enumerate(bodies):
                assert (await store.put(f"k{number}", body)).size == len(b"".join(body))
                assert await store.get(f"k{number}") == b"".join(body)
        await store.close()

    await main()


async def test_opening_removes_what_a_dead_writer_left_and_spares_what_a_living_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = tmp_path / "bucket"
    store = LocalObjectStore(bucket)
    left_over = bucket / TMP_NAME / "left-over"
    left_over.write_bytes(b"half")
    writing, go_on = threading.Event(), threading.Event()
    real_fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            writing.set()
            assert go_on.wait(30)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    put = asyncio.ensure_future(store.put("k", [b"body"], if_absent=True))
    assert await asyncio.to_thread(writing.wait, 30)
    other = LocalObjectStore(bucket)
    assert not left_over.exists()
    assert len(list((bucket / TMP_NAME).iterdir())) == 1
    go_on.set()
    await put
    assert await other.get("k") == b"body"
    assert list((bucket / TMP_NAME).iterdir()) == []
    await store.close()
    await other.close()


async def test_no_key_leads_out_of_the_directory_or_into_the_store_s_own_folder(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "bucket")
    (tmp_path / "outside").write_bytes(b"secret")
    for key in ("../outside", "a/../../outside", "/etc/passwd", f"{TMP_NAME}/x", TMP_NAME):
        for call in (store.get(key), store.head(key), store.put(key, [b"x"]), store.delete([key])):
            with pytest.raises(InvalidInput):
                await call
    assert [info.key async for info in store.list("")] == []
    assert [info.key async for info in store.list("../")] == []
    assert (tmp_path / "outside").read_bytes() == b"secret"
    await store.close()


async def test_a_key_that_is_also_a_prefix_of_another_is_refused(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "bucket")
    await store.put("a/b", [b"x"])
    for if_absent in (True, False):
        with pytest.raises(InvalidInput, match="also a directory"):
            await store.put("a", [b"x"], if_absent=if_absent)
        with pytest.raises(InvalidInput, match="itself a key"):
            await store.put("a/b/c", [b"x"], if_absent=if_absent)
        with pytest.raises(InvalidInput, match="itself a key"):
            await store.put("a/b/c/d", [b"x"], if_absent=if_absent)
    assert await store.get("a/b") == b"x"
    await store.close()


async def test_puts_and_deletes_in_one_directory_do_not_disturb_each_other(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "bucket")

    async def come_and_go(name: str) -> None:
        for _ in range(40):
            await store.put(f"d/e/{name}", [name.encode()], if_absent=True)
            with pytest.raises(ObjectExists):
                await store.put(f"d/e/{name}", [b"other"], if_absent=True)
            assert await store.get(f"d/e/{name}") == name.encode()
            await store.delete([f"d/e/{name}"])

    await asyncio.gather(*(come_and_go(f"k{number}") for number in range(6)))
    assert [path.name for path in (tmp_path / "bucket").iterdir()] == [TMP_NAME]
    await store.close()


async def test_objects_land_where_they_belong_though_few_directories_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidelog.storage.bucket.local.OPEN_DIRECTORIES", 2)
    bucket = tmp_path / "bucket"

    store = LocalObjectStore(bucket)

    async def fill(directory: str) -> None:
        for number in range(6):
            await store.put(f"{directory}/{number}", [directory.encode()], if_absent=number % 2 == 0)
        await store.delete([f"{directory}/0"])

    await asyncio.gather(*(fill(f"d{number}") for number in range(30)))
    for number in range(30):
        paths = sorted((bucket / f"d{number}").iterdir())
        assert [(path.name, path.read_text()) for path in paths] == [(each, f"d{number}") for each in "12345"]
    await store.close()


def test_a_directory_that_cannot_be_used_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot be used"):
        LocalObjectStore(tmp_path / "file")


async def test_a_store_whose_directory_is_away_does_not_say_that_its_objects_do_not_exist(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "bucket")
    await store.put("a/b", [b"x"])
    (tmp_path / "bucket").rename(tmp_path / "away")
    ways: list[Callable[[], None]] = [lambda: None, (tmp_path / "bucket").touch]
    for put_in_place in ways:
        put_in_place()
        with pytest.raises(Unavailable):
            await store.get("a/b")
        with pytest.raises(Unavailable):
            await store.delete(["a/b"])
        with pytest.raises(Unavailable):
            [info async for info in store.list("a/")]
    (tmp_path / "bucket").unlink()
    (tmp_path / "away").rename(tmp_path / "bucket")
    assert await store.get("a/b") == b"x"
    await store.close()


def modes(root: Path) -> dict[str, int]:
    """Permissions of every file and directory under `root`, itself included."""
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in [root, *root.rglob("*")]}


async def test_only_the_owner_can_read_objects_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = LocalObjectStore(tmp_path / "data" / "bucket")
        await store.put("a/b/c", [b"body"])
        await store.put("a/b/d", [b"body"], if_absent=True)
        await store.close()
    finally:
        os.umask(before)
    found = modes(tmp_path / "data")
    assert {name for name, mode in found.items() if mode != 0o700} == {"bucket/a/b/c", "bucket/a/b/d"}, found
    assert found["bucket/a/b/c"] == found["bucket/a/b/d"] == 0o600


async def test_a_directory_that_others_could_read_is_closed_to_them_when_it_is_opened(tmp_path: Path) -> None:
    root = tmp_path / "bucket"
    root.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    await LocalObjectStore(tmp_path / "link").close()
    assert root.stat().st_mode & 0o777 == 0o700
