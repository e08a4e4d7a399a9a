"""What is read back from disk and bucket, and record batches as clients send them.

Input of `Batches`: a mode byte and a batch; the mode may mend lengths and checksum, so that what lies behind them is
reached. Input of `Files`: a byte that names the format, one that says whether to mend the checksum, then the file. The
oracle: a `TidelogError` (for files `CorruptData`) or a result; bytes under an unmended checksum that are accepted must
be the ones that were written.
"""

from __future__ import annotations

import contextlib
import random
import struct
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from crc32c import crc32c

from tests.fuzz import samples
from tests.fuzz.base import Mutate, flip
from tidelog.batch.batch import (
    check_batch,
    iter_batches,
    iter_records,
    parse_header,
    repack,
    set_base_offset,
    set_leader_epoch,
)
from tidelog.broker.groups.records import parse_group_value, parse_key, parse_offset_value
from tidelog.broker.txn.records import TxnState, TxnValue, encode_txn_value, parse_txn_key, parse_txn_value
from tidelog.controller.raft.journal import Journal
from tidelog.controller.raft.snapshot import Snapshot, read_snapshot, write_snapshot
from tidelog.runtime.errors import CorruptData, TidelogError
from tidelog.runtime.wire import FrameDecoder, encode_frame
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.format import BLOCK_HEADER, FOOTER, FOOTER_CRC_AT, Block, Footer, ObjectIndex
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamAppend, StreamEntry
from tidelog.storage.wal.epochs import (
    EpochHistory,
    ReplicaMarks,
    decode_epoch_file,
    decode_marks,
    encode_epoch_file,
)
from tidelog.storage.wal.format import (
    HEADER_BYTES,
    crc_matches,
    encode_header,
    misplaced,
    read_header,
    record_of,
    unsupported,
)
from tidelog.storage.wal.s3.format import Origin, decode, encode_data, encode_fence, wal_key, wal_prefix

MAX_RECORDS_BYTES = 1 << 20


class Batches:
    """Record batches: the broker's checks and everything that reads records afterwards."""

    def seeds(self) -> list[bytes]:
        """Batches of every codec, with and without mending."""
        rng = random.Random(2)
        return [bytes([mode]) + samples.records(rng) for mode in range(4) for _ in range(12)]

    def mutate(self, data: bytes, limit: int, rng: random.Random, mutate: Mutate) -> bytes:
        """A new batch, a damaged header, or damaged records."""
        choice = rng.randrange(4)
        if choice == 0 or len(data) < 70:
            data = bytes([rng.randrange(256)]) + samples.records(rng)
        elif choice == 1:
            data = bytes([rng.randrange(256)]) + flip(data[1:62], rng) + data[62:]
        elif choice == 2:
            data = data[:62] + mutate(data[62:], limit - 62)
        else:
            data = bytes([data[0]]) + mutate(data[1:], limit - 1)
        return data[:limit]

    def one(self, data: bytes) -> None:
        """Check one batch as Produce does; read, repack and renumber what passes, and what does not, too."""
        if not data:
            return
        batch = bytearray(data[1:])
        if data[0] & 1 and len(batch) >= 61:
            struct.pack_into(">i", batch, 8, len(batch) - 12)
            batch[16] = 2
            struct.pack_into(">I", batch, 17, crc32c(bytes(batch[21:])))
        if data[0] & 2:
            self._read(bytes(batch))
        try:
            check_batch(memoryview(batch), limit_bytes=1 << 20)
        except TidelogError:
            return
        set_base_offset(batch, 77)
        set_leader_epoch(batch, 3)
        header = check_batch(memoryview(batch), limit_bytes=1 << 20)
        assert (header.base_offset, header.partition_leader_epoch) == (77, 3)
        assert [found.base_offset for found, _ in iter_batches(batch)] == [77]
        self._read(bytes(batch))

    @staticmethod
    def _read(batch: bytes) -> None:
        try:
            header = parse_header(batch)
            read = list(islice(iter_records(batch, max_bytes=MAX_RECORDS_BYTES), 10_000))
        except TidelogError:
            return
        if len(read) < header.count or header.count < 1:
            return
        for record in read:
            _group_record(record.key, record.value)
        packed = repack(batch, 4, max_bytes=MAX_RECORDS_BYTES)
        again = list(iter_records(packed, max_bytes=MAX_RECORDS_BYTES))
        assert again == read, "records changed when they were compressed anew"

    def close(self) -> None:
        """Nothing is held."""


def _group_record(key: bytes | None, value: bytes | None) -> None:
    for parse, data in ((parse_key, key), (parse_offset_value, value), (parse_group_value, value)):
        if data is not None:
            try:
                parse(data)
            except CorruptData:
                continue
            except TidelogError:
                continue


def _read_transaction(data: bytes) -> None:
    """The value, and what is read back of it when it is written anew: the same; a key of the same bytes is harmless."""
    with contextlib.suppress(CorruptData):
        parse_txn_key(data)
    value = parse_txn_value(data)
    assert parse_txn_value(encode_txn_value(value)) == value, "a transaction's record changed when it was written"


_TRANSACTION = encode_txn_value(
    TxnValue(
        producer_id=7,
        epoch=3,
        timeout_ms=60_000,
        state=TxnState.PREPARE_COMMIT,
        partitions=frozenset((("orders", 0), ("orders", 5), ("paid", 1))),
        updated_ms=2,
        started_ms=1,
        previous_producer_id=5,
        next_producer_id=9,
        client_version=2,
        last_epoch=2,
        next_epoch=0,
        unknown_tags=((3, b"new"),),
    )
)


# --- files and objects -----------------------------------------------------------------------------------------------

_KEY_PREFIX = wal_prefix("cluster", 1)
_KEY = wal_key(_KEY_PREFIX, 5)


def _wal_records() -> bytes:
    out = b""
    for number in range(3):
        payload = bytes([number]) * (number * 7)
        out += encode_header(1, len(payload), len(out), 0, 2, StreamAppend(4, 1, number, 1, [payload])) + payload
    return out


def _read_wal(data: bytes) -> object:
    """As the scan does, until the first record that is not sound."""
    view = memoryview(data)
    position, found = 0, []
    while position + HEADER_BYTES <= len(data):
        header = read_header(data, position)
        if misplaced(header, position) or header.end_offset > len(data) or not crc_matches(header, view, position):
            raise CorruptData("not a record")
        if reason := unsupported(header):
            raise CorruptData(reason)
        record = record_of(header, view, position)
        found.append((record.stream_id, bytes(record.payload)))
        position = header.end_offset
    return position, found


def _object() -> bytes:
    records = [StreamEntry(n, 1, bytes([n]) * 50) for n in range(10)]
    parts = [(3, records), (9, records[:4])]
    built = build_object(
        object_id=7, kind=ObjectKind.STREAM_SET, cluster_id="c", created_ms=1, parts=parts, block_bytes=200
    )
    return b"".join(bytes(piece) for piece in built.body)


def _read_object(data: bytes) -> object:
    footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key="k")
    index = ObjectIndex.decode(
        data[footer.index_position : footer.index_position + footer.index_length], footer, key="k"
    )
    found = []
    for number in range(len(index)):
        entry = index[number]
        block = Block.decode(data[entry.position : entry.end_position], entry, key="k")
        found += [
            (entry.stream_id, record.base_offset, bytes(record.payload))
            for record in map(block.__getitem__, range(len(block)))
        ]
    return found


def _epochs() -> bytes:
    history = EpochHistory()
    for number in range(5):
        history.append(number + 1, number * 100)
    return encode_epoch_file(history, 321)


def _replica_epochs() -> bytes:
    return encode_epoch_file(EpochHistory([(1, 0), (4, 200)]), 321, ReplicaMarks(5, 200, -1, 300))


def _s3_wal() -> bytes:
    body = _wal_records()
    origin = Origin(1, 2, bytes(16))
    return encode_data(
        origin, seq=5, first_seq=2, wal_start=0, wal_end=len(body), durable_offset=0, records=3, body=[body]
    )


def _read_s3_wal(data: bytes) -> object:
    found = decode(_KEY_PREFIX, _KEY, data, 1)
    return found.next_seq, found.reset_offset, [header for header, _ in found.headers()] if found.records else []


_WAL, _JOURNAL, _FRAMES = 1, 5, 7
"""Places in `Files`' list."""


class Files:
    """Every format of ours that is read back."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="tidelog-fuzz-")
        self._path = Path(self._place.name) / "file"
        origin = Origin(1, 2, bytes(16))
        fence = encode_fence(origin, seq=5, first_seq=5, durable_offset=0, next_seq=6, reset_offset=0)
        self._formats: list[tuple[bytes, Callable[[bytes], object], Callable[[bytearray], None] | None]] = [
            (_object(), _read_object, _mend_footer),
            (_wal_records(), _read_wal, _mend_wal),
            (_epochs(), decode_epoch_file, _mend_tail),
            (_s3_wal(), _read_s3_wal, _mend_s3),
            (fence, _read_s3_wal, _mend_s3),
            (self._journal(), self._read_journal, None),
            (self._snapshot(), self._read_snapshot, None),
            (encode_frame(1, b"hello") * 2, self._read_frames, None),
            (_replica_epochs(), decode_marks, _mend_tail),
            (_TRANSACTION, _read_transaction, None),
        ]  # fmt: skip

    def _journal(self) -> bytes:
        self._path.unlink(missing_ok=True)
        journal = Journal.open(self._path)
        for index in range(1, 6):
            journal.append(bytes([index]) * 20, index, 1)
            journal.sync()
        journal.set_term(2, "a")
        journal.truncate_from(len(journal.entries) - 1)
        journal.note_commit(3)
        journal.sync()
        journal.close()
        return self._path.read_bytes()

    def _read_journal(self, data: bytes) -> object:
        self._path.write_bytes(data)
        journal, torn = Journal.examine(self._path)
        return None if torn else (list(journal.entries), journal.term, journal.voted_for)

    def _snapshot(self) -> bytes:
        write_snapshot(self._path, Snapshot((b"x", 5, 1), (b"y", 4, 1), b"state"))
        return self._path.read_bytes()

    def _read_snapshot(self, data: bytes) -> object:
        self._path.write_bytes(data)
        return read_snapshot(self._path)

    @staticmethod
    def _read_frames(data: bytes) -> object:
        decoder = FrameDecoder(max_bytes=1 << 20)
        frames = decoder.feed(data)
        return None if decoder.buffered_bytes else frames

    def seeds(self) -> list[bytes]:
        """Every format as it is written, with and without mending."""
        return [bytes([number, mend]) + data for number, (data, _, _) in enumerate(self._formats) for mend in (0, 1)]

    def mutate(self, data: bytes, limit: int, rng: random.Random, mutate: Mutate) -> bytes:
        """A written file with a few bytes changed, or libFuzzer's idea of one."""
        if rng.randrange(3) or len(data) < 3:
            number = rng.randrange(len(self._formats))
            data = bytes([number, rng.randrange(2)]) + flip(self._formats[number][0], rng)
        else:
            data = data[:2] + mutate(data[2:], limit - 2)
        return data[:limit]

    def one(self, data: bytes) -> None:
        """Read one file."""
        if len(data) < 2:
            return
        written, read, mend = self._formats[data[0] % len(self._formats)]
        content = data[2:]
        mended = bool(data[1] & 1) and mend is not None
        if mended and mend is not None:
            buffer = bytearray(content)
            mend(buffer)
            content = bytes(buffer)
        try:
            found = read(content)
        except TidelogError as error:
            assert isinstance(error, CorruptData) or error.kafka_code == 10, error  # 10: a frame over its limit
            return
        if found is not None and not mended:
            assert self._sound(data[0] % len(self._formats), content, written, found), "changed bytes were accepted"

    @staticmethod
    def _sound(number: int, content: bytes, written: bytes, found: object) -> bool:
        """Whether bytes that were accepted are what was written: for logs a prefix of it."""
        if number == _WAL and isinstance(found, tuple):
            return written.startswith(content[: found[0]])
        if number == _FRAMES and isinstance(found, list):
            return content == b"".join(encode_frame(frame.kind, frame.payload) for frame in found)
        return written.startswith(content) if number == _JOURNAL else content == written

    def close(self) -> None:
        """Remove the files."""
        self._place.cleanup()


def _mend_footer(data: bytearray) -> None:
    if len(data) >= FOOTER.size:
        start = len(data) - FOOTER.size
        struct.pack_into(">I", data, start + FOOTER_CRC_AT, crc32c(bytes(data[start : start + FOOTER_CRC_AT])))
        data[-8:] = b"TIDELOG1"
        position, length = struct.unpack_from(">qI", data, start)
        if position >= 0 and length >= 16 and position + length <= start:
            end = position + length
            struct.pack_into(">I", data, end - 4, crc32c(bytes(data[position : end - 4])))
    if len(data) >= BLOCK_HEADER.size:
        data[:4] = b"TLBK"


def _mend_wal(data: bytearray) -> None:
    if len(data) >= HEADER_BYTES:
        data[:4] = b"TLWR"
        header = read_header(data, 0)
        end = min(len(data), HEADER_BYTES + header.payload_length)
        struct.pack_into(">I", data, 4, crc32c(bytes(data[8:end])))


def _mend_tail(data: bytearray) -> None:
    if len(data) >= 4:
        struct.pack_into(">I", data, len(data) - 4, crc32c(bytes(data[:-4])))


def _mend_s3(data: bytearray) -> None:
    if len(data) >= 8:
        struct.pack_into(">I", data, 4, crc32c(bytes(data[8:])))
