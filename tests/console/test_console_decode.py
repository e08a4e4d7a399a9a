"""Bytes of records as a page shows them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from tests.support.examples import examples
from tidelog.console.decode import shown
from tidelog.console.partitioner import partition_of
from tidelog.console.records import RecordQuery
from tidelog.runtime.errors import InvalidInput


def test_what_there_is_is_told_from_what_is_not() -> None:
    assert shown(None)["kind"] == "null"
    assert shown(b"") == {"kind": "text", "text": "", "size_bytes": 0, "cut": False}
    assert shown(b"\x00\x01")["text"] == "00 01"
    assert shown("ä<b>".encode()) == {"kind": "text", "text": "ä<b>", "size_bytes": 5, "cut": False}


def test_json_is_indented_and_its_numbers_stay_as_they_were_written() -> None:
    found = shown(b'{"a":1.10,"b":123456789012345678901234567890,"c":[{},[], "x\\"{"]}')
    assert found["kind"] == "json"
    assert found["text"] == (
        '{\n  "a": 1.10,\n  "b": 123456789012345678901234567890,\n  "c": [\n    {},\n    [],\n    "x\\"{"\n  ]\n}'
    )


@pytest.mark.parametrize("text", [b"[NaN]", b"{", b"[1,]", b"12", b'"text"', b"[" * 100_000, b"[" * 60 + b"]" * 60])
def test_what_is_no_document_or_too_deep_is_text(text: bytes) -> None:
    assert shown(text, 1 << 20)["kind"] == "text"


def test_a_long_value_is_cut_with_a_note_and_not_through_a_character() -> None:
    found = shown("é".encode() * 100, 33)
    assert (found["kind"], found["text"], found["size_bytes"], found["cut"]) == ("text", "é" * 16, 200, True)
    assert shown(b"[" + b"1," * 50 + b"1]", 20)["kind"] == "text"
    assert len(shown(bytes(100), 20)["text"].split()) == 10


documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(document=st.lists(documents) | st.dictionaries(st.text(), documents), spaced=st.booleans())
@hypothesis_settings(max_examples=examples(200), deadline=None)
def test_an_indented_document_is_the_same_document(document: object, spaced: bool) -> None:
    text = json.dumps(document, ensure_ascii=False, separators=None if spaced else (",", ":"))
    found = shown(text.encode("utf-8", "surrogatepass"), 1 << 20)
    if found["kind"] == "json":
        assert json.loads(found["text"]) == document


@given(data=st.binary(max_size=300), limit=st.integers(1, 100))
@hypothesis_settings(max_examples=examples(300), deadline=None)
def test_any_bytes_are_shown_as_valid_text_within_the_limit(data: bytes, limit: int) -> None:
    found = shown(data, limit)
    assert found["size_bytes"] == len(data)
    assert found["cut"] or found["kind"] != "bytes" or bytes.fromhex(found["text"]) == data
    json.dumps(found).encode("ascii")


@given(key=st.binary(max_size=100), partitions=st.integers(1, 1_000))
@hypothesis_settings(max_examples=examples(200), deadline=None)
def test_a_key_goes_where_javas_clients_put_it(key: bytes, partitions: int) -> None:
    assert partition_of(key, partitions) == (murmur2(key) & 0x7FFFFFFF) % partitions


@pytest.mark.parametrize(
    "given",
    [{"limit": "0"}, {"limit": "501"}, {"limit": "٣"}, {"start": "middle"}, {"start": "offset"}, {"partition": "-1"},
     {"follow": "yes"}, {"key": "0xabc"}, {"contains": "x" * 1_001}, {"other": "1"}, {"limit": "2", "full": "true"}],
)  # fmt: skip
def test_a_wrong_parameter_of_a_search_is_named(given: dict[str, str]) -> None:
    with pytest.raises(InvalidInput) as refused:
        RecordQuery.parse({"topic": "t", **given})
    assert next(iter(given)) in refused.value.message


def test_a_search_matches_whole_keys_and_parts_of_values() -> None:
    by_key = RecordQuery.parse({"topic": "t", "key": "0x0aff"})
    assert (by_key.matches(b"\x0a\xff", b""), by_key.matches(b"\x0a", b""), by_key.matches(None, b"")) == (
        True,
        False,
        False,
    )
    by_text = RecordQuery.parse({"topic": "t", "contains": "né"})
    assert by_text.matches(None, "René".encode())
    assert by_text.matches("né".encode(), None)
    assert not by_text.matches(None, None)
