"""docs/formats/controller.md, read by somebody else: struct and the reference library of msgpack, none of our decoders.

What the product writes with msgspec is read here byte by byte as the page says. A change of a format that does not
change the page fails here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
from crc32c import crc32c

from tests.controller.controller_helpers import TOPIC, Driver, new_object
from tidelog.controller.image.transfer import START, ImageParams, ImageSender
from tidelog.controller.machine.tables import KEY_TYPES
from tidelog.controller.model import commands as c
from tidelog.controller.raft.journal import Journal
from tidelog.controller.raft.snapshot import Snapshot, write_snapshot
from tidelog.runtime.wire import encode_frame

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "formats" / "controller.md").read_text()


def filled() -> Driver:
    """A state with a row in nearly every table."""
    driver = Driver()
    epoch = driver.broker()
    (first,) = driver.topic()
    driver.run(c.OpenStreams(0, epoch, ((first, 0),)))
    driver.prepare()
    driver.commit(epoch, (0, 100), new_object(1, (first, 0, 7)))
    driver.run(c.PutKv("key", b"value"))
    driver.run(c.AlterConfigs("cluster", "", {"log.retention.ms": "1000"}))
    return driver


def test_the_envelope_of_a_command_is_an_array_of_eight() -> None:
    data = c.encode(c.Envelope(c.FORMAT_VERSION, 3, 17, "client", 5, 2, c.Barrier(), 21))
    version, term, now_ms, client, sequence, done, command, elapsed_ms = msgpack.unpackb(data)
    assert (version, term, now_ms, client, sequence, done, elapsed_ms) == (c.FORMAT_VERSION, 3, 17, "client", 5, 2, 21)
    assert command[0] == 2, "the tag of Barrier"


def test_every_command_is_on_the_page_with_its_tag() -> None:
    section = PAGE[PAGE.index("## Commands") : PAGE.index("A result is")]
    told = {name: int(tag) for tag, name in re.findall(r"\b(\d+) ([A-Z]\w+)", section)}
    tags: dict[str, Any] = {kind.__name__: kind.__struct_config__.tag for kind in get_args(c.AnyCommand)}
    assert told == tags


def test_a_result_is_an_array_of_three() -> None:
    driver = filled()
    applied = driver.state.apply(driver.envelope(c.DeleteTopic(bytes(16))), 1_000)
    version, value, error = msgpack.unpackb(applied.result)
    assert version == driver.state.version and value is None
    name, message, hint, attributes = error
    assert name and message and (hint is None or hint) and isinstance(attributes, dict)


def test_a_snapshot_file_is_read_as_the_page_says(tmp_path: Path) -> None:
    driver = filled()
    path = tmp_path / "snapshot"
    members, directories = ((1, "a:1"), (2, "b:2")), ((1, "of a"), (2, "of b"))
    write_snapshot(path, Snapshot((b"new", 9, 2), (b"old", 8, 2), driver.state.dump(), members, directories))

    data = path.read_bytes()
    magic, version, length, body_crc, header_crc = struct.unpack_from("<8sIQII", data)
    assert (magic, version, header_crc) == (b"TLSNAPS\x01", 1, crc32c(data[:24]))
    body = data[28:]
    assert (length, body_crc) == (len(body), crc32c(body))
    last, previous, state, quorum, ids = msgpack.unpackb(body)
    assert ids == [[1, "of a"], [2, "of b"]]
    assert (last, previous, quorum) == ([b"new", 9, 2], [b"old", 8, 2], [[1, "a:1"], [2, "b:2"]])

    one, _state_version, index, now_ms, tables, counters, dedupe, time_ms = msgpack.unpackb(state)
    assert (one, index, now_ms, time_ms) == (5, driver.index, driver.now_ms, driver.now_ms)
    rows = {table: {as_key(key): record for key, record in found} for table, found in tables}
    assert rows.keys() == KEY_TYPES.keys(), "the tables of the page"
    assert rows["topics"][TOPIC][1] == "t"
    assert rows["kv"]["key"] == b"value"
    assert rows["configs"]["cluster", ""] == {"log.retention.ms": "1000"}
    assert (TOPIC, 0) in rows["partitions"] and rows["brokers"].keys() == {0}
    assert dict(counters).items() >= {("object", 2), ("stream", 8), ("broker", 1)}
    assert isinstance(dedupe, list)


def as_key(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def test_the_fields_of_a_record_are_those_of_its_class_in_their_order() -> None:
    driver = filled()
    _, _, _, _, tables, _, _, _ = msgpack.unpackb(driver.state.dump())
    stored = {table: [record for _, record in found] for table, found in tables}
    for table in driver.state.tables.public():
        records = [table.rows[key] for key in sorted(table.rows)]
        assert stored[table.name] == [plain(record) for record in records], table.name


def plain(record: Any) -> Any:
    """What the page says a record is: an array of its fields in the order declared."""
    if isinstance(record, msgspec.Struct):
        return [plain(getattr(record, name)) for name in record.__struct_fields__]
    if isinstance(record, msgspec.Raw):
        return msgpack.unpackb(bytes(record))
    if isinstance(record, list | tuple):
        return [plain(each) for each in record]
    return int(record) if isinstance(record, int) and not isinstance(record, bool) else record


def test_a_journal_is_read_as_the_page_says(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.open(path)
    envelope = c.encode(c.Envelope(c.FORMAT_VERSION, 1, 5, "", 0, 0, c.Barrier()))
    journal.set_term(4, "b:2")
    journal.append(b"\x00" + envelope, 1, 4)
    journal.append(b"\x01", 2, 4)
    journal.sync()
    journal.truncate_from(1)
    journal.sync()
    journal.close()

    meta, *records = journal_records(path.read_bytes())
    assert meta[0] == 3, "a new journal begins with its meta"
    assert [kind for kind, _ in records] == [3, 1, 1, 2]
    term, _commit = struct.unpack_from("<QQ", records[0][1])
    assert (term, records[0][1][16:]) == (4, b"b:2")
    assert struct.unpack("<Q", records[-1][1]) == (2,), "this entry and all after it are gone"
    entry = next(content for kind, content in records if kind == 1)
    assert struct.unpack_from("<QQ", entry) == (1, 4)
    assert entry[16:17] == b"\x00"
    assert msgpack.unpackb(entry[17:])[6][0] == 2


def journal_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The records of a journal: kind and content."""
    magic, version, crc = struct.unpack_from("<8sII", data)
    assert (magic, version, crc) == (b"TLRAFTJ\x01", 1, crc32c(data[:12]))
    at, expected = 16, 1
    while at < len(data):
        frame_magic, sequence, length, header_crc = struct.unpack_from("<IQII", data, at)
        assert (frame_magic, sequence, header_crc) == (0x464A4C54, expected, crc32c(data[at : at + 16]))
        body = data[at + 20 : at + 20 + length]
        body_crc, end = struct.unpack_from("<II", data, at + 20 + length)
        assert (body_crc, end) == (crc32c(body), 0xE5A1F5E9)
        while body:
            kind, size = struct.unpack_from("<BI", body)
            yield kind, body[5 : 5 + size]
            body = body[5 + size :]
        at, expected = at + 28 + length, expected + 1


def test_an_rpc_frame_is_read_as_the_page_says() -> None:
    payload = msgspec.msgpack.encode([7, "status", None])
    frame = encode_frame(1, payload)
    magic, version, kind, length, crc = struct.unpack_from(">HBBII", frame)
    assert (magic, version, kind, length) == (0x544C, 1, 1, len(payload))
    assert crc == crc32c(frame[12:], crc32c(frame[:8]))
    assert msgpack.unpackb(frame[12:]) == [7, "status", None]


def test_the_chunks_of_an_image_are_read_as_the_page_says() -> None:
    driver = filled()
    assert msgpack.unpackb(msgspec.msgpack.encode(ImageParams(2, START, 0))) == [2, 0, 0]
    sender = ImageSender(9, driver.image, chunk_rows=3, chunk_bytes=1 << 20)
    rows: list[Any] = []
    checksum, end = 0, None
    while end is None:
        data = msgspec.msgpack.encode(sender.next_chunk())
        image_format, transfer, version, position, found, end = msgpack.unpackb(data)
        assert (image_format, transfer, version, position) == (2, 9, driver.image.version, len(rows))
        assert end is not None or len(found) == 3
        rows += found
        unpacker = msgpack.Unpacker()
        unpacker.feed(data)
        unpacker.read_array_header()
        for _ in range(4):
            unpacker.skip()
        first = unpacker.tell()
        unpacker.skip()
        checksum = crc32c(data[first : unpacker.tell()], checksum)
    assert end == [len(rows), checksum]
    assert {table for table, _, _ in rows} <= KEY_TYPES.keys()
    assert ["kv", "key", b"value"] in rows
    assert [as_key(key) for table, key, _ in rows if table == "partitions"] == [(TOPIC, 0)]
