"""The `Disk` door on a real directory."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from functools import partial

import pytest

from runtime import disk as disk_module
from runtime.disk import FileDisk


def run(path, work):
    async def main():
        disk = FileDisk(path)
        try:
            return await work(disk)
        finally:
            await disk.close()

    return asyncio.run(main())


def written(file, offset, buffers, *, sync=True):
    done = asyncio.get_running_loop().create_future()
    file.write(offset, buffers, sync=sync, done=done.set_result)
    return done


async def spare(disk, name="a", size=1 << 16):
    file = await disk.open(name, create=True)
    await file.fill_zeros(0, size)
    return file


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_what_was_written_is_read_back_at_its_place(tmp_path):
    async def work(disk):
        file = await spare(disk)
        assert file.size == 1 << 16
        assert await written(file, 100, [b"abc", memoryview(b"de"), bytearray(b"f")]) is None
        assert await file.read(99, 8) == b"\0abcdef\0"
        assert await file.read((1 << 16) - 2, 10) == b"\0\0"
        await file.settle()
        assert await file.read(100, 3) == b"abc"
        await file.close()

    run(tmp_path / "made" / "on the way", work)


def wait_until(condition):
    """Wait without giving the loop a turn."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_groups_that_end_in_one_turn_of_the_loop_are_reported_in_order(tmp_path, monkeypatch):
    gate = threading.Event()
    fdatasync = os.fdatasync

    def gated(fd):
        assert gate.wait(20)
        fdatasync(fd)

    async def work(disk):
        file = await spare(disk)
        monkeypatch.setattr(os, "fdatasync", gated)
        reported = []

        def note(number, error):
            assert error is None
            reported.append(number)
            assert number != 2, "one that raises does not keep the others from hearing"

        def write(number):
            file.write(number, [b"x"], sync=True, done=partial(note, number))

        write(0)
        wait_until(disk._queue.empty)
        for number in (1, 2, 3):
            write(number)  # these wait for the first, and become one group
        gate.set()
        wait_until(lambda: disk.groups == 2)
        write(4)
        wait_until(lambda: disk.groups == 3)
        assert reported == []
        await file.close()
        assert reported == [0, 1, 2, 3, 4]

    run(tmp_path, work)


def test_more_buffers_than_one_vectored_write_takes(tmp_path):
    async def work(disk):
        file = await spare(disk)
        pieces = [bytes([i % 251]) * (i % 7) for i in range(5000)]
        results = [written(file, 0, pieces[:10])]
        at = sum(map(len, pieces[:10]))
        results.append(written(file, at, pieces[10:]))
        assert [await result for result in results] == [None, None]
        whole = b"".join(pieces)
        assert await file.read(0, len(whole)) == whole
        await file.close()

    run(tmp_path, work)


def test_a_write_that_stops_short_is_finished(tmp_path, monkeypatch):
    real = os.pwritev
    monkeypatch.setattr(disk_module.os, "pwritev", lambda fd, buffers, at: real(fd, [b"".join(buffers)[:5]], at))

    async def work(disk):
        file = await disk.open("a", create=True)
        assert await written(file, 0, [b"abc", b"", b"defgh", b"ij"]) is None
        assert await file.read(0, 100) == b"abcdefghij"
        await file.close()

    run(tmp_path, work)


def test_operations_end_in_the_order_they_were_submitted_over_all_files(tmp_path):
    async def work(disk):
        a, b = await spare(disk, "a"), await spare(disk, "b")
        order, last = [], asyncio.get_running_loop().create_future()
        for i in range(50):
            file = (a, b)[i % 3 == 0]
            file.write(i * 10, [b"x" * 10], sync=i % 2 == 0, done=lambda error, i=i: order.append((i, error)))
        a.sync(lambda error: order.append(("sync", error)))
        b.publish("c", lambda error: order.append(("publish", error)))
        b.write(0, [b"y"], sync=True, done=last.set_result)
        assert await last is None
        assert order == [(i, None) for i in range(50)] + [("sync", None), ("publish", None)]
        assert b.name == "c"
        assert [info.name for info in await disk.entries()] == ["a", "c"]
        await a.close()
        await b.close()

    run(tmp_path, work)


def test_what_arrives_during_a_sync_shares_the_next_one(tmp_path, monkeypatch):
    real, begun, gate, syncs = os.fdatasync, threading.Event(), threading.Event(), []

    def slow(fd):
        syncs.append(fd)
        if len(syncs) == 1:
            begun.set()
            gate.wait(10)
        real(fd)

    async def work(disk):
        file = await spare(disk)
        monkeypatch.setattr(disk_module.os, "fdatasync", slow)
        results = [written(file, 0, [b"first"])]
        assert await asyncio.to_thread(begun.wait, 10)
        results += [written(file, 10 + i, [b"x"]) for i in range(100)]
        gate.set()
        assert [await result for result in results] == [None] * 101
        await file.close()
        assert len(syncs) == 2

    run(tmp_path, work)


def test_after_a_failed_sync_everything_fails(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, "broken")

    async def work(disk):
        a, b = await spare(disk, "a"), await spare(disk, "b")
        monkeypatch.setattr(disk_module.os, "fdatasync", broken)
        assert (await written(a, 0, [b"x"])).errno == errno.EIO
        monkeypatch.undo()
        assert (await written(a, 0, [b"x"])).errno == errno.EIO
        assert (await written(b, 0, [b"x"])).errno == errno.EIO
        published = asyncio.get_running_loop().create_future()
        b.publish("c", published.set_result)
        assert (await published).errno == errno.EIO
        await a.close()
        await b.close()
        assert [info.name for info in await disk.entries()] == ["a", "b"]

    before = open_descriptors()
    run(tmp_path, work)
    assert open_descriptors() == before


def test_small_files_are_replaced_whole(tmp_path):
    async def work(disk):
        assert await disk.load("small") is None
        await disk.replace("small", b"one")
        await disk.replace("small", memoryview(b"two!"))
        assert await disk.load("small") == b"two!"
        assert await disk.entries() == [("small", 4)]
        await disk.remove("small")
        with pytest.raises(FileNotFoundError):
            await disk.remove("small")

    run(tmp_path / "new", work)


def test_files_are_created_once_and_renamed(tmp_path):
    async def work(disk):
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

    before = open_descriptors()
    run(tmp_path, work)
    assert open_descriptors() == before


def test_a_directory_that_is_not_there_is_empty(tmp_path):
    async def work(disk):
        return await disk.entries()

    assert run(tmp_path / "nothing", work) == []
    assert not (tmp_path / "nothing").exists()


def test_a_cancelled_open_leaves_no_descriptor(tmp_path):
    async def work(disk):
        for turns in range(6):
            task = asyncio.create_task(disk.open(f"file{turns}", create=True))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    before = open_descriptors()
    run(tmp_path, work)
    assert open_descriptors() == before
