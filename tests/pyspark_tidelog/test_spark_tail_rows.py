"""Messages of a client to Arrow batches, without a cluster."""

from __future__ import annotations

import pytest

from pyspark_tidelog.columns import COLUMNS, column_names
from pyspark_tidelog.rows import BYTES, ROWS, RowCollector
from tidelog.runtime.errors import Unavailable


class TailMessage:
    """A message as confluent-kafka has it."""

    def __init__(self, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]] | None) -> None:
        self._key, self._value, self._headers = key, value, headers

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return 3

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 1, 1_700_000_000_000

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self._headers


LARGE = bytes(1 << 20)


@pytest.mark.parametrize(
    "message", [TailMessage(LARGE, None, None), TailMessage(None, LARGE, []), TailMessage(None, None, [("h", LARGE)])]
)
def test_rows_are_given_out_by_their_bytes_too(message: TailMessage) -> None:
    rows = RowCollector(column_names(include_headers=True))
    for _ in range(2):
        while not rows.is_full:
            rows.add(message)
        assert BYTES <= rows.take().nbytes < BYTES + 2 * len(LARGE)


def test_a_header_that_the_client_cannot_give_is_told_with_its_place() -> None:
    class Unreadable(TailMessage):
        def headers(self) -> list[tuple[str, bytes | None]] | None:
            raise SystemError("<built-in> returned NULL without setting an exception")

    with pytest.raises(Unavailable, match=r"t-3: offset 7 has a header whose name is no UTF-8"):
        RowCollector(column_names(include_headers=True)).add(Unreadable(None, b"v", None))
    RowCollector(COLUMNS).add(Unreadable(None, b"v", None))


def test_rows_are_given_out_by_their_number() -> None:
    rows = RowCollector(COLUMNS)
    for _ in range(ROWS):
        assert not rows.is_full
        rows.add(TailMessage(None, b"v", None))
    assert rows.is_full
    assert rows.take().num_rows == ROWS
    assert not rows.is_full
