"""The `Disk` interface on a real directory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.runtime import disk as disk_module
from tidelog.runtime.disk import FileDisk, FileDiskFile
from tidelog.runtime.types import Buffer


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[FileDisk]:
    disk = FileDisk(path)
    try:
        yield disk
    finally:
        await disk.close()


def written(
    file: FileDiskFile, offset: int, buffers: Sequence[Buffer], *, sync: bool = True
) -> asyncio.Future[OSError | None]:
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    file.write(offset, buffers, sync=sync, done=done.set_result)
    return done


async def spare(disk: FileDisk, name: str = "a", size: int = 1 << 16) -> FileDiskFile:
    file = await disk.open(name, create=True)
    await file.fill_zeros(0, size)
    return file


def code_of(error: OSError | None) -> int | None:
    return error.errno if error is not None else None


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_what_was_written_is_read_back_at_its_place(tmp_path: Path) -> None:
    async with opened(tmp_path / "made" / "on the way") as disk:
        file = await spare(disk)
        assert file.size == 1 << 16
        assert await written(file, 100, [b"abc", memoryview(b"de"), bytearray(b"f")]) is None
        assert await file.read(99, 8) == b"\0abcdef\0"
        assert await file.read((1 << 16) - 2, 10) == b"\0\0"
        await file.settle()
        assert await file.read(100, 3) == b"abc"
        await file.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait without giving the loop a turn."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def test_groups_that_end_in_one_turn_of_the_loop_are_reported_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    fdatasync = os.fdatasync

    syncing = threading.Event()

    def gated(fd: int) -> None:
        syncing.set()
        assert gate.wait(20)
        fdatasync(fd)

    async with opened(tmp_path) as disk:
        file = await spare(disk)
        monkeypatch.setattr(os, "fdatasync", gated)
        reported: list[int] = []

        def note(number: int, error: OSError | None) -> None:
            assert error is None
            reported.append(number)
            assert number != 2, "one that raises does not keep the others from hearing"

        def write(number: int) -> None:
            file.write(number, [b"x"], sync=True, done=partial(note, number))

        write(0)
        wait_until(syncing.is_set)
        for number in (1, 2, 3):
            write(number)  # these wait for the first, and become one group
        gate.set()
        wait_until(lambda: disk.groups == 2)
        write(4)
        wait_until(lambda: disk.groups == 3)
        assert reported == []
        await file.close()
        assert reported == [0, 1, 2, 3, 4]


class Meter:
    """Stands in for the clock and the sync of the module: each sync takes `sync_s`; nothing else takes time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sync_s: float = 0.0002) -> None:
        self.now = 100.0
        self.sync_s = sync_s
        self.threads: list[int] = []
        self._real = os.fdatasync
        monkeypatch.setattr(disk_module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        self.threads.append(threading.get_ident())
        self.now += self.sync_s
        self._real(fd)

    def rest(self) -> None:
        self.now += disk_module.REST * max(self.sync_s, disk_module.QUICK_S * 2)


async def metered(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> tuple[FileDiskFile, Meter]:
    """A file, and a meter after one sync by the writer thread that shows the disk to be quick."""
    file = await spare(disk, size=1 << 18)
    meter = Meter(monkeypatch)
    monkeypatch.setattr(disk_module, "WAIT_S", 60.0)  # the machine may be busy
    assert await lent(file, 0, [b"first"]) is None
    assert disk.groups_here == 0, "nothing is known of the disk before the first group"
    meter.threads.clear()
    return file, meter


def lent(
    file: FileDiskFile, offset: int, buffers: Sequence[Buffer], *, sync: bool = True
) -> asyncio.Future[OSError | None]:
    done: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
    file.write(offset, buffers, sync=sync, done=done.set_result, may_block=True)
    return done


async def test_a_lone_small_write_to_a_quick_disk_is_durable_when_it_was_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)
        for number in range(3):
            meter.rest()
            done = lent(file, 100 * number, [b"ab", b"c%d" % number])
            assert done.done() and done.result() is None
            assert len(meter.threads) == number + 1
        assert (disk.groups_here, disk.groups) == (3, 4)
        assert await file.read(200, 4) == b"abc2"
        await file.close()


async def test_a_disk_that_hangs_after_a_quick_sync_does_not_stop_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)
        monkeypatch.setattr(disk_module, "WAIT_S", 0.005)
        answers, real = threading.Event(), os.fdatasync

        def hang(fd: int) -> None:
            answers.wait(20)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", hang)
        meter.rest()
        late = lent(file, 0, [b"late"])
        assert not late.done() and not answers.is_set()  # this is the loop's thread, and it goes on
        meter.rest()
        behind = lent(file, 4, [b"behind"])
        assert not behind.done() and disk.groups_here == 0
        answers.set()
        assert await late is None and await behind is None
        assert await file.read(0, 10) == b"latebehind"
        meter.rest()
        assert await lent(file, 0, [b"quick"]) is None
        await file.close()


async def test_what_the_loop_should_not_wait_for_goes_to_the_writer_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)
        meter.rest()
        unasked = written(file, 0, [b"x"])
        assert not unasked.done()
        await unasked
        meter.rest()
        large = lent(file, 0, [bytes(disk_module.INLINE_BYTES), b"x"])
        assert not large.done()
        await large
        soon = lent(file, 0, [b"x"])  # the lane has not rested since the one before
        assert not soon.done()
        behind = lent(file, 1, [b"y"])
        meter.rest()
        assert not behind.done()  # the one before is under way: the order is kept
        await behind
        assert soon.done() and disk.groups_here == 0
        meter.now += 1.0  # a group in whose midst the meter rested seemed slow: its rest is long,
        await written(file, 1, [b"y"])  # and only another one shows that the disk is quick
        meter.rest()
        assert lent(file, 2, [b"z"]).done()
        await file.close()


async def test_after_a_slow_sync_the_writer_thread_finds_out_whether_the_disk_is_quick_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)
        meter.rest()
        meter.sync_s = disk_module.QUICK_S * 2
        assert lent(file, 0, [b"slow, once"]).done()
        for _ in range(3):
            meter.rest()
            done = lent(file, 0, [b"slow still"])
            assert not done.done()
            await done
        meter.sync_s = disk_module.QUICK_S / 2
        meter.rest()
        assert not lent(file, 0, [b"quick"]).done()
        await written(file, 0, [b"x"])
        meter.rest()
        assert lent(file, 0, [b"quick"]).done()
        await file.close()


async def test_the_loop_gives_at_most_a_fifth_of_its_time_to_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)
        began, here_s = meter.now, 0.0
        for number in range(1000):
            meter.now += 0.001 * (number % 7)
            meter.sync_s = 0.0001 * (1 + number % 9 + 50 * (number % 17 == 0))
            done = lent(file, 0, [b"x"])
            here_s += meter.sync_s * done.done()
            await done
        meter.rest()
        assert disk.groups_here > 20
        assert here_s <= (meter.now - began) / 5
        await file.close()


async def test_a_sync_that_fails_on_the_loops_thread_fails_everything_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)
        other = await spare(disk, "other")
        syncs: list[int] = []

        def broken(fd: int) -> None:
            syncs.append(fd)
            raise OSError(errno.EIO, "broken")

        meter.rest()
        monkeypatch.setattr(os, "fdatasync", broken)
        failed = lent(file, 0, [b"x"])
        assert failed.done() and code_of(failed.result()) == errno.EIO
        monkeypatch.undo()
        assert (await lent(file, 0, [b"x"])) is failed.result()
        assert (await written(other, 0, [b"x"])) is failed.result()
        assert len(syncs) == 1 and await other.read(0, 1) == b"\0"
        await file.close()
        await other.close()
    assert open_descriptors() == before


async def test_a_callback_that_raises_in_the_midst_of_a_write_is_not_the_writers_to_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file, meter = await metered(disk, monkeypatch)

        def raising(_error: OSError | None) -> None:
            raise ArithmeticError("a mistake of the caller")

        meter.rest()
        file.write(0, [b"kept"], sync=True, done=raising, may_block=True)
        assert disk.groups_here == 1
        meter.rest()
        assert lent(file, 4, [b"too"]).done()
        assert await file.read(0, 7) == b"kepttoo"
        await file.close()


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["write", "lent", "unsynced", "sync", "publish"]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=30,
)


@settings(max_examples=examples(60), deadline=None)
@given(operations=OPERATIONS)
def test_whichever_thread_commits_the_order_of_submission_is_kept(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, bool, bool]]
) -> None:
    async def work() -> None:
        async with opened(tmp_path_factory.mktemp("disk")) as disk:
            await check(disk)

    async def check(disk: FileDisk) -> None:
        files = [await spare(disk, "a"), await spare(disk, "b")]
        order: list[int] = []
        expected: list[int] = []
        ends = [bytearray(1 << 16), bytearray(1 << 16)]
        for number, (kind, second, turn) in enumerate(operations):
            file = files[second]

            def done(error: OSError | None, number: int = number) -> None:
                assert error is None
                order.append(number)

            expected.append(number)
            if kind == "sync":
                file.sync(done)
            elif kind == "publish":
                file.publish(f"{file.name[0]}{number}", done)
            else:
                data = bytes([1 + number]) * 3  # over part of what the one before it wrote
                ends[second][number * 2 : number * 2 + 3] = data
                file.write(number * 2, [data], sync=kind != "unsynced", done=done, may_block=kind == "lent")
            if turn:
                deadline = time.monotonic() + 20
                while len(order) < len(expected):
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0)
        for file, end in zip(files, ends, strict=True):
            await file.close()
            reader = await disk.open(file.name)
            assert await reader.read(0, 100) == end[:100]
            await reader.close()
        assert order == expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_module, "QUICK_S", 60.0)
        patch.setattr(disk_module, "REST", 0)
        asyncio.run(work())


async def test_more_buffers_than_one_vectored_write_takes(tmp_path: Path) -> None:
    async with opened(tmp_path) as disk:
        file = await spare(disk)
        pieces = [bytes([i % 251]) * (i % 7) for i in range(5000)]
        results = [written(file, 0, pieces[:10])]
        at = sum(map(len, pieces[:10]))
        results.append(written(file, at, pieces[10:]))
        assert [await result for result in results] == [None, None]
        whole = b"".join(pieces)
        assert await file.read(0, len(whole)) == whole
        await file.close()


async def test_a_write_that_stops_short_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real(fd, [b"".join(buffers)[:5]], at))

    async with opened(tmp_path) as disk:
        file = await disk.open("a", create=True)
        assert await written(file, 0, [b"abc", b"", b"defgh", b"ij"]) is None
        assert await file.read(0, 100) == b"abcdefghij"
        await file.close()


async def test_operations_end_in_the_order_they_were_submitted_over_all_files(tmp_path: Path) -> None:
    async with opened(tmp_path) as disk:
        a, b = await spare(disk, "a"), await spare(disk, "b")
        order: list[tuple[int | str, OSError | None]] = []
        last: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()

        def note(what: int | str, error: OSError | None) -> None:
            order.append((what, error))

        for i in range(50):
            file = (a, b)[i % 3 == 0]
            file.write(i * 10, [b"x" * 10], sync=i % 2 == 0, done=partial(note, i))
        a.sync(partial(note, "sync"))
        b.publish("c", partial(note, "publish"))
        b.write(0, [b"y"], sync=True, done=last.set_result)
        assert await last is None
        assert order == [(i, None) for i in range(50)] + [("sync", None), ("publish", None)]
        assert b.name == "c"
        assert [info.name for info in await disk.entries()] == ["a", "c"]
        await a.close()
        await b.close()


async def test_what_arrives_during_a_sync_shares_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begun, gate = os.fdatasync, threading.Event(), threading.Event()
    syncs: list[int] = []

    def slow(fd: int) -> None:
        syncs.append(fd)
        if len(syncs) == 1:
            begun.set()
            gate.wait(10)
        real(fd)

    async with opened(tmp_path) as disk:
        file = await spare(disk)
        monkeypatch.setattr(os, "fdatasync", slow)
        results = [written(file, 0, [b"first"])]
        assert await asyncio.to_thread(begun.wait, 10)
        results += [written(file, 10 + i, [b"x"]) for i in range(100)]
        gate.set()
        assert [await result for result in results] == [None] * 101
        await file.close()
        assert len(syncs) == 2


async def test_after_a_failed_sync_everything_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    before = open_descriptors()
    async with opened(tmp_path) as disk:
        a, b = await spare(disk, "a"), await spare(disk, "b")
        monkeypatch.setattr(os, "fdatasync", broken)
        assert code_of(await written(a, 0, [b"x"])) == errno.EIO
        monkeypatch.undo()
        assert code_of(await written(a, 0, [b"x"])) == errno.EIO
        assert code_of(await written(b, 0, [b"x"])) == errno.EIO
        published: asyncio.Future[OSError | None] = asyncio.get_running_loop().create_future()
        b.publish("c", published.set_result)
        assert code_of(await published) == errno.EIO
        await a.close()
        await b.close()
        assert [info.name for info in await disk.entries()] == ["a", "b"]
    assert open_descriptors() == before


@pytest.mark.parametrize("raised", [ValueError("released"), MemoryError(), RuntimeError("a bug")])
async def test_an_exception_that_nobody_listed_fails_what_was_submitted_and_everything_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    async with opened(tmp_path) as disk:
        file = await spare(disk)
        real = os.pwritev

        def pwritev(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
            raise raised

        monkeypatch.setattr(os, "pwritev", pwritev)
        first = written(file, 0, [b"a"])
        second = written(file, 1, [b"b"])
        async with asyncio.timeout(30):
            errors = [await first, await second]
        monkeypatch.setattr(os, "pwritev", real)
        errors.append(await written(file, 2, [b"c"]))
        assert [code_of(error) for error in errors] == [errno.EIO] * 3
        assert type(raised).__name__ in str(errors[0])
        await file.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_after_its_writer_thread_has_ended_the_disk_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> bool:
        raise RuntimeError("the thread ends")

    others = set(threading.enumerate())  # those of another test's disk may not have ended yet
    async with opened(tmp_path) as disk:
        file = await spare(disk)
        async with asyncio.timeout(30):
            with monkeypatch.context() as patched:
                patched.setattr(disk_module, "wake_promptly", end)
                first = written(file, 0, [b"a"])
                while any(each.name == "wal-writer" for each in set(threading.enumerate()) - others):  # noqa: ASYNC110
                    await asyncio.sleep(0)
            second = written(file, 1, [b"b"])
            errors = [await first, await second]
        assert [code_of(error) for error in errors] == [errno.EIO] * 2
        assert await file.read(0, 2) == bytes(2)
        await file.close()


async def test_a_descriptor_that_cannot_be_closed_does_not_keep_its_closer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as disk:
        file = await spare(disk)
        real = os.close
        closed = list[int]()

        def close(fd: int) -> None:
            real(fd)
            if threading.current_thread().name == "wal-writer":
                closed.append(fd)
                raise OSError(errno.EIO, "not written back")

        monkeypatch.setattr(os, "close", close)
        async with asyncio.timeout(30):
            await file.close()
        assert len(closed) == 1


async def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    async with opened(tmp_path / "new") as disk:
        assert await disk.load("small") is None
        await disk.replace("small", b"one")
        await disk.replace("small", memoryview(b"two!"))
        assert await disk.load("small") == b"two!"
        assert await disk.entries() == [("small", 4)]
        await disk.remove("small")
        with pytest.raises(FileNotFoundError):
            await disk.remove("small")


async def test_files_are_created_once_and_renamed(tmp_path: Path) -> None:
    before = open_descriptors()
    async with opened(tmp_path) as disk:
        with pytest.raises(FileNotFoundError):
            await disk.open("a")
        file = await disk.open("a", create=True)
        with pytest.raises(FileExistsError):
            await disk.open("a", create=True)
        await file.rename("b")
        assert file.name == "b"
        reader = await disk.open("b", read_only=True)
        assert reader.size == 0
        assert await disk.free_bytes() > 0
        for one in (file, reader, reader):
            await one.close()
    assert open_descriptors() == before


async def test_a_file_is_not_linked_where_its_directory_has_become_a_file(tmp_path: Path) -> None:
    place = tmp_path / "wal"
    place.mkdir()
    async with opened(place) as disk:
        file = await disk.open("a", create=True)
        place.rename(tmp_path / "moved")
        assert not await file.is_linked()
        place.touch()
        assert not await file.is_linked()
        await file.close()


async def test_a_file_is_linked_until_its_name_is_gone_or_leads_to_another(tmp_path: Path) -> None:
    async with opened(tmp_path) as disk:
        file = await disk.open("a", create=True)
        await file.rename("b")
        assert await file.is_linked()
        (tmp_path / "b").rename(tmp_path / "aside")
        assert not await file.is_linked()
        (tmp_path / "b").write_bytes(b"a copy")
        assert not await file.is_linked()
        (tmp_path / "aside").rename(tmp_path / "b")
        assert await file.is_linked()
        await file.close()


async def test_a_directory_that_is_not_there_is_empty(tmp_path: Path) -> None:
    async with opened(tmp_path / "nothing") as disk:
        assert await disk.entries() == []
    assert not (tmp_path / "nothing").exists()


async def test_a_cancelled_open_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    async with opened(tmp_path) as disk:
        gate, really = threading.Event(), os.open

        def gated(path: str, flags: int, mode: int = 0o777) -> int:
            assert not flags & os.O_EXCL or gate.wait(20)
            return really(path, flags, mode)

        monkeypatch.setattr(os, "open", gated)
        for turns in range(6):
            gate.clear()
            task = asyncio.create_task(disk.open(f"file{turns}", create=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            asyncio.get_running_loop().call_soon(gate.set)
            with pytest.raises(asyncio.CancelledError):
                await task
    assert open_descriptors() == before
