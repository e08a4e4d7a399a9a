"""What is read of records' trace headers: the last of a name, of few records, within bounds, and never an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.batch.batch import Compression, Record, build_batch
from tidelog.broker.telemetry.trace_headers import (
    MAX_HEADERS,
    MAX_PARENT_BYTES,
    MAX_RECORDS,
    MAX_STATE_BYTES,
    MAX_UNPACKED_BYTES,
    TraceHeaderReader,
    TraceHeaders,
)

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Headers = list[tuple[str, bytes | None]]


def batch_of(*records: Headers, value: bytes = b"v", compression: int = Compression.NONE) -> bytes:
    found = [Record(0, 1_000, b"k", value, tuple(headers)) for headers in records]
    return bytes(build_batch(found, compression=compression))


def read(*batches: bytes, unpacks: bool = True) -> list[TraceHeaders]:
    reader = TraceHeaderReader(unpacks=unpacks)
    for one in batches:
        reader.read(memoryview(one))
    return list(reader.found)


@pytest.mark.parametrize("codec", list(Compression))
def test_headers_of_any_codec_are_read(codec: int) -> None:
    headers: Headers = [("other", None), ("traceparent", PARENT), ("tracestate", b"a=1")]
    assert read(batch_of(headers, compression=codec)) == [TraceHeaders(PARENT, b"a=1")]


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.SNAPPY, Compression.LZ4, Compression.ZSTD])
def test_a_large_compressed_batch_is_read_as_far_as_the_bound(codec: int) -> None:
    records: list[Headers] = [[("traceparent", PARENT + b"%d" % number)] for number in range(64)]
    found = read(batch_of(*records, value=b"v" * 8_000, compression=codec))
    assert found == [TraceHeaders(PARENT + b"%d" % number, b"") for number in range(len(found))]
    assert 3 <= len(found) <= MAX_UNPACKED_BYTES // 8_000
    bomb = batch_of(*records[:1], value=bytes(30 << 20), compression=codec)
    assert read(bomb) == [], "its headers are behind its value"


def test_compressed_batches_are_left_alone_if_asked() -> None:
    assert read(batch_of([("traceparent", PARENT)], compression=Compression.GZIP), unpacks=False) == []


def test_no_more_records_are_read_than_a_request_may_name() -> None:
    many: list[Headers] = [[("traceparent", PARENT + b"%d" % number)] for number in range(10_000)]
    assert len(read(batch_of(*many), batch_of(*many))) == MAX_RECORDS
    assert len(read(*(batch_of(one) for one in many[:100]))) == MAX_RECORDS


def test_a_batch_whose_first_record_names_no_trace_is_read_no_further() -> None:
    assert read(batch_of([], [("traceparent", PARENT)])) == []


def test_the_last_of_several_headers_counts_and_only_the_first_headers_are_read() -> None:
    assert read(batch_of([("traceparent", b"x"), ("traceparent", PARENT)])) == [TraceHeaders(PARENT, b"")]
    others: Headers = [(f"h{number}", b"") for number in range(MAX_HEADERS)]
    assert read(batch_of([*others, ("traceparent", PARENT)])) == []
    assert read(batch_of([("TraceParent", PARENT), ("traceparent2", PARENT)])) == []


def test_huge_headers_are_cut_or_left_out() -> None:
    (found,) = read(batch_of([("traceparent", b"0" * 100_000), ("tracestate", b"a" * 1_000_000)]))
    assert len(found.parent) == MAX_PARENT_BYTES + 1 and found.state == b""
    (found,) = read(batch_of([("traceparent", PARENT), ("tracestate", b"a" * MAX_STATE_BYTES)]))
    assert len(found.state) == MAX_STATE_BYTES


def test_message_sets_of_old_clients_have_no_headers() -> None:
    old = bytearray(batch_of([("traceparent", PARENT)]))
    for magic in (0, 1, 3):
        old[16] = magic
        assert read(bytes(old)) == []


@given(st.data())
def test_no_bytes_are_an_error(data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from(list(Compression)))
    headers: Headers = [("traceparent", PARENT), ("tracestate", b"a=1")]
    good = batch_of(headers, headers, headers, compression=codec)
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 8))):
        broken[data.draw(st.integers(17, len(good) - 1))] = data.draw(st.integers(0, 255))
    for one in read(bytes(broken[: data.draw(st.integers(0, len(good)))])):
        assert len(one.parent) <= MAX_PARENT_BYTES + 1 and len(one.state) <= MAX_STATE_BYTES


@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate", "x"]), st.binary(max_size=60)), max_size=8))
def test_what_was_written_is_read(headers: Headers) -> None:
    last = dict(headers)
    parent = last.get("traceparent")
    expected = [] if parent is None else [TraceHeaders(parent or b"-", last.get("tracestate") or b"")]
    assert read(batch_of(headers)) == expected
