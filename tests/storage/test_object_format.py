"""The object format: what goes in comes out, and every flipped bit is found and named."""

from __future__ import annotations

import random
import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.runtime.errors import CorruptData, InvalidInput, TidelogError
from tidelog.storage.bucket.memory import MemoryObjectStore
from tidelog.storage.commits import ObjectKind, StreamRange
from tidelog.storage.compaction.rewriting import merge_holes
from tidelog.storage.objects.format import FOOTER, INDEX_ENTRY, Block, Footer, IndexEntry, ObjectIndex
from tidelog.storage.objects.key import object_key, parse_object_key, quarantine_key
from tidelog.storage.objects.reader import TAIL_BYTES, load_index
from tidelog.storage.objects.report import verify_bytes
from tidelog.storage.objects.writer import BuiltObject, build_object
from tidelog.storage.records import StreamEntry

CLUSTER = "cluster-a"


def build(
    parts: list[tuple[int, list[StreamEntry]]],
    *,
    block_bytes: int = 100,
    object_id: int = 7,
    kind: ObjectKind = ObjectKind.STREAM_SET,
) -> BuiltObject:
    return build_object(
        object_id=object_id, kind=kind, cluster_id=CLUSTER, created_ms=5, parts=parts, block_bytes=block_bytes
    )


def records(base: int, *lengths: int, count: int = 1) -> list[StreamEntry]:
    rng = random.Random(base)
    return [StreamEntry(base + n * count, count, rng.randbytes(length)) for n, length in enumerate(lengths)]


def entries(data: bytes) -> list[IndexEntry]:
    footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key="k")
    end = footer.index_position + footer.index_length
    return list(ObjectIndex.decode(data[footer.index_position : end], footer, key="k"))


def decode(data: bytes) -> dict[int, list[StreamEntry]]:
    footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key="k")
    end = footer.index_position + footer.index_length
    index = ObjectIndex.decode(data[footer.index_position : end], footer, key="k")
    out: dict[int, list[StreamEntry]] = {}
    for entry in index:
        block = Block.decode(data[entry.position : entry.end_position], entry, key="k")
        out.setdefault(entry.stream_id, []).extend(block)
    return out


@st.composite
def stream_parts(draw: st.DrawFn) -> list[tuple[int, list[StreamEntry]]]:
    parts = []
    for stream_id in sorted(draw(st.sets(st.integers(0, 2**63 - 1), min_size=1, max_size=5))):
        offset = draw(st.integers(0, 2**62))
        part = []
        for _ in range(draw(st.integers(1, 8))):
            count = draw(st.integers(1, 2**32 - 1))
            part.append(StreamEntry(offset, count, draw(st.binary(max_size=300))))
            offset += count
        parts.append((stream_id, part))
    return parts


@settings(max_examples=examples(150), deadline=None)
@given(stream_parts(), st.integers(1, 2000))
def test_what_goes_in_comes_out(parts: list[tuple[int, list[StreamEntry]]], block_bytes: int) -> None:
    built = build(parts, block_bytes=block_bytes)
    data = b"".join(built.body)
    assert built.size == len(data)
    assert decode(data) == {stream: [r._replace(payload=bytes(r.payload)) for r in part] for stream, part in parts}
    wanted = [StreamRange(s, part[0].base_offset, part[-1].base_offset + part[-1].count) for s, part in parts]
    assert list(built.ranges) == wanted
    assert verify_bytes(data, "k") == []


@settings(max_examples=examples(60), deadline=None)
@given(stream_parts(), st.data())
def test_every_flipped_bit_is_found(parts: list[tuple[int, list[StreamEntry]]], data: st.DataObject) -> None:
    body = bytearray(b"".join(build(parts).body))
    bit = data.draw(st.integers(0, len(body) * 8 - 1))
    body[bit // 8] ^= 1 << (bit % 8)
    problems = verify_bytes(bytes(body), "the-key")
    assert problems
    assert "the-key" in problems[0].message
    assert "byte" in problems[0].message


def test_every_single_bit_of_a_small_object_is_found() -> None:
    good = b"".join(build([(1, records(10, 5, 0, 9)), (2, records(0, 3, count=4))], block_bytes=40).body)
    assert verify_bytes(good, "k") == []
    for bit in range(len(good) * 8):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << (bit % 8)
        assert verify_bytes(bytes(bad), "k"), f"bit {bit} went unseen"


@settings(max_examples=examples(60), deadline=None)
@given(stream_parts(), st.data())
def test_every_cut_and_every_garbage_is_corrupt_data(
    parts: list[tuple[int, list[StreamEntry]]], data: st.DataObject
) -> None:
    body = b"".join(build(parts).body)
    cut = data.draw(st.integers(0, len(body) - 1))
    assert verify_bytes(body[:cut], "k")
    assert verify_bytes(data.draw(st.binary(max_size=400)), "k")


def test_a_huge_announced_length_is_refused_before_memory_is_spent() -> None:
    body = b"".join(build([(1, records(0, 10))]).body)
    footer = Footer.decode(body[-FOOTER.size :], object_size=len(body), key="k")
    for lie in (
        footer._replace(index_length=2**32 - 1),
        footer._replace(index_position=-(2**62)),
        footer._replace(block_count=2**32 - 1),
        footer._replace(block_count=2),
        footer._replace(kind=9),
    ):
        with pytest.raises(CorruptData):
            Footer.decode(lie.encode(), object_size=len(body), key="k")


def test_blocks_hold_at_least_one_record_and_stay_near_their_size() -> None:
    data = b"".join(build([(1, records(0, 500, 10, 10, 10, 10, 10))], block_bytes=80).body)
    footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key="k")
    index = ObjectIndex.decode(data[footer.index_position : -FOOTER.size], footer, key="k")
    assert [entry.record_count for entry in index] == [1, 3, 2]


def test_large_payloads_are_not_copied() -> None:
    payload = bytes(10_000)
    built = build([(1, [StreamEntry(0, 1, payload)])])
    assert any(piece is payload for piece in built.body)


def test_the_index_finds_the_block_of_an_offset() -> None:
    data = b"".join(build([(3, records(100, *[60] * 10)), (9, records(5, 60, 60))], block_bytes=100).body)
    footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key="k")
    index = ObjectIndex.decode(data[footer.index_position : -FOOTER.size], footer, key="k")
    for offset in range(100, 110):
        entry = index[index.find(3, offset)]
        assert entry.stream_id == 3
        assert entry.start_offset <= offset < entry.end_offset
    assert index[index.find(3, 110)].stream_id == 9
    assert index.find(9, 7) == len(index)
    assert index[index.find(4, 0)].stream_id == 9


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [(2, records(0, 1)), (1, records(0, 1))],
        [(1, records(0, 1)), (1, records(1, 1))],
        [(1, [*records(0, 1), *records(5, 1)])],
        [(1, [StreamEntry(0, 0, b"x")])],
    ],
)
def test_what_is_out_of_order_is_not_written(parts: list[tuple[int, list[StreamEntry]]]) -> None:
    for block_bytes in (1, 1000):
        with pytest.raises(InvalidInput):
            build(parts, block_bytes=block_bytes)


def test_a_stream_object_holds_one_stream() -> None:
    with pytest.raises(InvalidInput):
        build([(1, records(0, 1)), (2, records(0, 1))], kind=ObjectKind.STREAM)


def test_a_newer_version_is_refused_with_advice() -> None:
    body = bytearray(b"".join(build([(1, records(0, 10))]).body))
    footer = bytearray(body[-FOOTER.size :])
    footer[57] = 2
    from crc32c import crc32c

    struct.pack_into(">I", footer, 60, crc32c(bytes(footer[:60])))
    with pytest.raises(CorruptData, match="upgrade"):
        Footer.decode(footer, object_size=len(body), key="k")


async def test_the_tail_is_read_by_one_get_and_a_long_index_by_two() -> None:
    store = MemoryObjectStore()
    small = build([(1, records(0, 10, 10))])
    large = build([(1, records(0, *[1] * 3000))], block_bytes=1, object_id=8)
    assert large.size > TAIL_BYTES
    for built in (small, large):
        key = object_key(CLUSTER, built.object_id)
        await store.put(key, built.body)
        index = await load_index(store, key, built.size, object_id=built.object_id, cluster_id=CLUSTER)
        assert len(index) == len(list(index))
        with pytest.raises(CorruptData, match="object id"):
            await load_index(store, key, built.size, object_id=99)
        with pytest.raises(CorruptData, match="cluster"):
            await load_index(store, key, built.size, cluster_id="another")
        with pytest.raises(TidelogError):
            await load_index(store, key, built.size + 1)
        with pytest.raises(CorruptData):
            await load_index(store, key, built.size - 1)


def test_keys_name_cluster_and_object_and_nothing_else() -> None:
    assert object_key("c", 0x1234) == "c/objects/34/0000000000001234"
    assert parse_object_key("c/objects/34/0000000000001234") == ("c", 0x1234)
    for wrong in ("c/objects/35/0000000000001234", "objects/34/0000000000001234", "c/objects/34/1234", "c/x"):
        assert parse_object_key(wrong) is None
    assert parse_object_key(quarantine_key("c", 1, 3, 2)) is None


@given(st.integers(0, 2**63 - 1))
def test_keys_round_trip(object_id: int) -> None:
    assert parse_object_key(object_key("some-cluster", object_id)) == ("some-cluster", object_id)


def test_an_index_entry_is_44_bytes_and_a_footer_72() -> None:
    assert (INDEX_ENTRY.size, FOOTER.size) == (44, 72)


def test_a_block_with_a_hole_has_version_2_and_says_so_to_those_who_know_only_1() -> None:
    plain, hole = records(0, 10, 10), [StreamEntry(2, 1 << 31, b"")]
    built = build([(1, plain + hole)], block_bytes=40)
    data = b"".join(map(bytes, built.body))
    assert decode(data)[1] == plain + hole
    assert verify_bytes(data, "k") == []
    assert [data[entry.position + 4] for entry in entries(data)] == [1, 1, 2]


def test_a_block_of_a_later_version_is_refused() -> None:
    data = b"".join(map(bytes, build([(1, records(0, 10))]).body))
    (entry,) = entries(data)
    block = bytearray(data[: entry.length])
    block[4] = 3
    crc = crc32c(bytes(block[44:]), crc32c(bytes(block[:40])))
    block[40:44] = crc.to_bytes(4, "big")
    with pytest.raises(CorruptData, match="block format version: expected 1 or 2, found 3"):
        Block.decode(bytes(block), entry._replace(crc=crc), key="k")


def test_neighbouring_holes_merge_as_far_as_a_count_goes() -> None:
    largest = (1 << 32) - 1
    batch = StreamEntry(10, 5, b"x")
    given = [StreamEntry(0, 4, b""), StreamEntry(4, 6, b""), batch, StreamEntry(15, largest, b"")]
    given.append(StreamEntry(15 + largest, 1, b""))
    assert list(merge_holes(given)) == [StreamEntry(0, 10, b""), *given[2:]]
