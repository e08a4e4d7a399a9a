"""The arithmetic of a bill."""

from __future__ import annotations

from typing import Any

import pytest

from tidelog.console.costs import bill, difference
from tidelog.console.prices import GB_BYTES, MONTH_S, Prices

PRICES = Prices(
    name="round",
    currency="EUR",
    requests_per_1000={"put": 10.0, "list": 10.0, "get": 1.0, "head": 1.0, "delete": 0.0},
    transfer_per_gb={"received": 2.0, "sent": 0.5},
    storage_per_gb_month={"stored": 0.1},
)


def account(received: float = 0, sent: float = 0, **requests: float) -> dict[str, Any]:
    return {"requests": requests, "received_bytes": received, "sent_bytes": sent}


def usage(node_id: int = 1, seconds: float = 3600, **more: Any) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "bucket": "s3://b",
        "since_ms": 1000 * node_id,
        "seconds": seconds,
        "produced_bytes": 2 * GB_BYTES,
        "purposes": {"upload": account(sent=2 * GB_BYTES, put=100), "wal": account(put=50)},
        "topics": {
            "t": {
                "produced_bytes": 2 * GB_BYTES,
                "purposes": {"upload": account(sent=2 * GB_BYTES, put=100)},
            }
        },
        "shared": {"upload": account(put=0), "wal": account(put=50)},
        "stored": {
            "objects": 3,
            "bytes": 10 * GB_BYTES,
            "wal_bytes": GB_BYTES,
            "topics": {"t": {"objects": 1, "bytes": 6 * GB_BYTES}},
            "shared": {"objects": 1, "bytes": GB_BYTES},
            "held": {"objects": 1, "bytes": GB_BYTES},
            "waiting": {"objects": 1, "bytes": GB_BYTES},
        },
        **more,
    }


def test_a_bill_adds_up_by_purpose_and_by_topic() -> None:
    document = bill([usage()], PRICES)
    purposes = {one["purpose"]: one for one in document["purposes"]}
    assert purposes["upload"]["cost"] == pytest.approx(100 * 0.01 + 2 * 0.5)
    assert purposes["wal"]["cost"] == pytest.approx(0.5)
    total = document["total"]
    assert total["cost"] == pytest.approx(2.5)
    assert total["cost_per_gb_written"] == pytest.approx(1.25)
    assert total["storage_cost_per_month"] == pytest.approx(1.0)
    assert total["cost_per_month"] == pytest.approx(2.5 * MONTH_S / 3600 + 1.0)
    assert sum(one["cost"] for one in document["topics"]) == pytest.approx(total["cost"])
    assert sum(one["cost_per_month"] for one in document["topics"]) == pytest.approx(total["cost_per_month"])
    assert sum(one["stored_bytes"] for one in document["topics"]) == document["stored"]["bytes"]
    assert [one["topic"] for one in document["topics"]] == ["t", None]
    assert document["currency"] == "EUR"


def test_each_broker_is_extrapolated_from_its_own_start() -> None:
    one, two = usage(1, 3600), usage(2, 1800)
    total = bill([one, two], PRICES)["total"]
    assert total["cost"] == pytest.approx(5.0)
    assert total["cost_per_month"] == pytest.approx(2.5 * MONTH_S / 3600 + 2.5 * MONTH_S / 1800 + 1.0)
    assert bill([one, two], PRICES)["produced_bytes"] == 4 * GB_BYTES


def test_where_nothing_was_written_there_is_no_price_of_a_gb() -> None:
    idle = usage(produced_bytes=0, topics={}, seconds=0.0)
    total = bill([idle], PRICES)["total"]
    assert total["cost_per_gb_written"] is None
    assert total["cost_per_month"] == pytest.approx(1.0)


def test_a_window_is_the_difference_of_two_answers() -> None:
    before, after = usage(), usage(seconds=3700)
    after["purposes"]["wal"] = account(put=51)
    after["shared"]["wal"] = account(put=51)
    found = difference(before, after)
    assert found["seconds"] == 100
    assert found["produced_bytes"] == 0
    assert found["purposes"]["wal"]["requests"] == {"put": 1}
    assert found["purposes"]["upload"] == account()
    assert bill([found], PRICES)["total"]["cost"] == pytest.approx(0.01)


def test_what_topics_cost_that_are_deleted_in_a_window_is_not_of_the_window() -> None:
    def topic(puts: int, produced: int) -> dict[str, Any]:
        return {"produced_bytes": produced, "purposes": {"upload": account(sent=10 * puts, put=puts)}}

    before = usage(
        topics={"gone": topic(70, 700), "again": topic(30, 300), "t": topic(5, 50), "__other__": topic(1, 1)}
    )
    after = usage(seconds=3700, topics={"again": topic(2, 20), "t": topic(6, 60), "__other__": topic(104, 1_003)})
    found = difference(before, after)["topics"]
    puts = {name: mine["purposes"]["upload"]["requests"].get("put", 0) for name, mine in found.items()}
    assert puts == {"again": 2, "t": 1, "__other__": 3}
    assert {name: mine["produced_bytes"] for name, mine in found.items()} == {"again": 20, "t": 10, "__other__": 2}
    assert found["__other__"]["purposes"]["upload"]["sent_bytes"] == 30
    assert before["topics"]["__other__"] == topic(1, 1)  # as it was


def test_a_broker_that_was_started_anew_counts_from_its_start() -> None:
    anew = usage(seconds=5, since_ms=99)
    assert difference(usage(), anew) == anew
