"""Large bodies of the local store: written past the page cache, or through it where that is refused."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from tidelog.storage.bucket.direct import BLOCK_BYTES, BUFFER_BYTES, DIRECT_BYTES, BodyWriter

SIZES = [
    0,
    1,
    DIRECT_BYTES - 1,
    DIRECT_BYTES,
    DIRECT_BYTES + 1,
    BUFFER_BYTES - BLOCK_BYTES,
    BUFFER_BYTES - 1,
    BUFFER_BYTES,
    BUFFER_BYTES + 1,
    3 * BUFFER_BYTES,
    3 * BUFFER_BYTES + BLOCK_BYTES + 7,
]


def pieces(data: bytes, rng: random.Random) -> list[memoryview]:
    view, found = memoryview(data), []
    while view:
        size = rng.choice([0, 1, 5, 4095, 4096, 70_000, 3_000_000])
        found.append(view[:size])
        view = view[size:]
    return found


def write(writer: BodyWriter, path: Path, body: list[memoryview]) -> bytes:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        writer.write(descriptor, body)
    finally:
        os.close(descriptor)
    return path.read_bytes()


def refuse(monkeypatch: pytest.MonkeyPatch, first: int, number: int) -> None:
    """Make direct writes fail from the call `first` (1, 2, …) on: a file system may want larger blocks than ours."""
    real, calls = os.pwrite, 0

    def pwrite(descriptor: int, view: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls >= first:
            raise OSError(number, os.strerror(number))
        return real(descriptor, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_file_holds_exactly_its_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    rng, writer = random.Random(3), BodyWriter()
    if refused:
        refuse(monkeypatch, refused, errno.EINVAL)
    for number, size in enumerate(SIZES * 2):
        data = rng.randbytes(size)
        assert write(writer, tmp_path / str(number), pieces(data, rng)) == data
    assert writer.is_direct == (not refused)


def test_an_early_end_of_a_write_is_continued_at_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, rng = os.pwrite, random.Random(4)
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, view, offset: real(descriptor, view[: rng.randrange(1, 200) * 4096], offset)
    )
    data = rng.randbytes(2 * BUFFER_BYTES + 99)
    writer = BodyWriter()
    assert write(writer, tmp_path / "file", [memoryview(data)]) == data
    assert writer.is_direct
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, offset: 512)
    with pytest.raises(OSError, match="less than a block"):
        write(writer, tmp_path / "other", [memoryview(data)])


def test_a_full_disk_is_no_reason_to_give_direct_writes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, data = BodyWriter(), bytes(DIRECT_BYTES)
    with monkeypatch.context() as patch:
        refuse(patch, 1, errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            write(writer, tmp_path / "file", [memoryview(data)])
    assert write(writer, tmp_path / "other", [memoryview(data)]) == data
    assert writer.is_direct
