"""The cost of the brokers' bucket requests, computed from `GET /bucket/usage` and a price table.

- *so far* is requests and transfer since each broker started (or in the measured window);
- *a month* is the same rate for 730 hours, plus one month of the current storage;
- *a GB written* is requests and transfer so far divided by the bytes that producers wrote meanwhile, without storage.

The sum of all topics and `shared` is the total: costs that belong to no topic are not distributed over topics.

Entry: `bill`, `difference`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tidelog.console.prices import GB_BYTES, MONTH_S, Prices

Usage = Mapping[str, Any]
SHARED = None
"""The name of the row for costs of no topic."""
OTHER_TOPIC = "__other__"
"""The name under which brokers sum deleted topics and topics above the limit (docs/metrics.md)."""
_NO_ACCOUNT: Usage = {"requests": {}, "received_bytes": 0, "sent_bytes": 0}
_NO_TOPIC: Usage = {"produced_bytes": 0, "purposes": {}}


class Tally:
    """A sum of accounts of all brokers, each extrapolated from the broker's own start."""

    def __init__(self) -> None:
        self.requests: dict[str, float] = {}
        self.received_bytes = 0.0
        self.sent_bytes = 0.0
        self.cost = 0.0
        self.cost_per_month = 0.0

    def add(self, account: Mapping[str, Any], seconds: float, prices: Prices) -> None:
        """Add the requests of one broker in `seconds`."""
        for kind, count in account["requests"].items():
            self.requests[kind] = self.requests.get(kind, 0) + count
        self.received_bytes += account["received_bytes"]
        self.sent_bytes += account["sent_bytes"]
        cost = price_of(account, prices)
        self.cost += cost
        self.cost_per_month += cost * MONTH_S / seconds if seconds > 0 else 0.0

    def document(self, produced_bytes: int) -> dict[str, Any]:
        """Return the sum as a JSON document."""
        return {
            "requests": {kind: round(count, 3) for kind, count in sorted(self.requests.items())},
            "received_bytes": round(self.received_bytes),
            "sent_bytes": round(self.sent_bytes),
            "cost": self.cost,
            "cost_per_month": self.cost_per_month,
            "cost_per_gb_written": self.cost * GB_BYTES / produced_bytes if produced_bytes else None,
        }


def price_of(account: Mapping[str, Any], prices: Prices) -> float:
    """The cost of an account's requests and transfer. An operation without a price costs as a `get`."""
    table = prices.requests_per_1000
    requests = sum(table.get(kind, table["get"]) * count for kind, count in account["requests"].items()) / 1000
    received = prices.transfer_per_gb["received"] * account["received_bytes"]
    sent = prices.transfer_per_gb["sent"] * account["sent_bytes"]
    return float(requests + (received + sent) / GB_BYTES)


def bill(usages: Sequence[Usage], prices: Prices) -> dict[str, Any]:
    """Return one document for all brokers; storage is that of the cluster, as reported by the first broker."""
    produced = sum(usage["produced_bytes"] for usage in usages)
    purposes: dict[str, Tally] = {}
    total = Tally()
    for usage in usages:
        for purpose, account in usage["purposes"].items():
            purposes.setdefault(purpose, Tally()).add(account, usage["seconds"], prices)
            total.add(account, usage["seconds"], prices)
    stored = _stored(usages[0])
    storage = _storage(stored["bytes"], prices)
    whole = total.document(produced)
    whole["storage_cost_per_month"] = storage
    whole["cost_per_month"] += storage
    return {
        "bucket": usages[0]["bucket"],
        "nodes": [{"node_id": usage["node_id"], "seconds": round(usage["seconds"], 1)} for usage in usages],
        "currency": prices.currency,
        "produced_bytes": produced,
        "purposes": [{"purpose": name, **tally.document(produced)} for name, tally in sorted(purposes.items())],
        "topics": _topics(usages, prices),
        "stored": {**stored, "cost_per_month": storage},
        "total": whole,
        "prices": {
            "name": prices.name,
            "currency": prices.currency,
            "requests_per_1000": prices.requests_per_1000,
            "transfer_per_gb": prices.transfer_per_gb,
            "storage_per_gb_month": prices.storage_per_gb_month,
        },
    }


def _stored(usage: Usage) -> dict[str, Any]:
    """What the bucket has. Brokers from before snapshots tell nothing of what these hold."""
    return {"held": {"objects": 0, "bytes": 0}, **usage["stored"]}


def _storage(size: int, prices: Prices) -> float:
    return size / GB_BYTES * prices.storage_per_gb_month["stored"]


def _topics(usages: Sequence[Usage], prices: Prices) -> list[dict[str, Any]]:
    """One row per topic, most expensive first, and the row for costs of no topic."""
    tallies: dict[str | None, Tally] = {}
    produced: dict[str | None, int] = {}
    stored = _stored(usages[0])
    kept: dict[str | None, int] = {topic: stock["bytes"] for topic, stock in stored["topics"].items()}
    for usage in usages:
        for topic, mine in usage["topics"].items():
            produced[topic] = produced.get(topic, 0) + mine["produced_bytes"]
            for account in mine["purposes"].values():
                tallies.setdefault(topic, Tally()).add(account, usage["seconds"], prices)
        for account in usage["shared"].values():
            tallies.setdefault(SHARED, Tally()).add(account, usage["seconds"], prices)
    kept[SHARED] = stored["wal_bytes"] + sum(stored[one]["bytes"] for one in ("shared", "held", "waiting"))
    rows = []
    for topic in {*tallies, *produced, *kept}:
        row = tallies.get(topic, Tally()).document(produced.get(topic, 0))
        storage = _storage(kept.get(topic, 0), prices)
        row["cost_per_month"] += storage
        more = {"stored_bytes": kept.get(topic, 0), "storage_cost_per_month": storage}
        rows.append({"topic": topic, "produced_bytes": produced.get(topic, 0), **row, **more})
    rows.sort(key=lambda row: (row["topic"] is SHARED, -row["cost_per_month"], str(row["topic"])))
    return rows


def difference(before: Usage, after: Usage) -> dict[str, Any]:
    """The requests of one broker between two reports. If it restarted meanwhile, the requests since its start."""
    if before["since_ms"] != after["since_ms"]:
        return dict(after)
    topics, counted = {}, _as_folded(before["topics"], after["topics"])
    for topic, mine in after["topics"].items():
        old = counted.get(topic, _NO_TOPIC)
        topics[topic] = {
            "produced_bytes": max(0, mine["produced_bytes"] - old["produced_bytes"]),
            "purposes": _subtract(mine["purposes"], old["purposes"]),
        }
    return {
        **after,
        "seconds": after["seconds"] - before["seconds"],
        "produced_bytes": max(0, after["produced_bytes"] - before["produced_bytes"]),
        "purposes": _subtract(after["purposes"], before["purposes"]),
        "shared": _subtract(after["shared"], before["shared"]),
        "topics": topics,
    }


def _as_folded(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The earlier figures with topics deleted meanwhile moved to `__other__`, as in the later figures."""
    kept = {topic: mine for topic, mine in before.items() if not _went_back(mine, after.get(topic, _NO_TOPIC))}
    gone = [mine for topic, mine in before.items() if topic not in kept]
    if gone:
        other: dict[str, Any] = copy.deepcopy(dict(kept.get(OTHER_TOPIC, _NO_TOPIC)))
        for mine in gone:
            other["produced_bytes"] += mine["produced_bytes"]
            for purpose, account in mine["purposes"].items():
                _add(other["purposes"].setdefault(purpose, copy.deepcopy(dict(_NO_ACCOUNT))), account)
        kept[OTHER_TOPIC] = other
    return kept


def _went_back(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a topic's figures decreased: the topic was deleted, or replaced by another."""
    if after["produced_bytes"] < before["produced_bytes"]:
        return True
    for purpose, old in before["purposes"].items():
        new = after["purposes"].get(purpose, _NO_ACCOUNT)
        if any(new["requests"].get(kind, 0) < count for kind, count in old["requests"].items()):
            return True
        if any(new[name] < old[name] for name in ("received_bytes", "sent_bytes")):
            return True
    return False


def _add(account: dict[str, Any], more: Mapping[str, Any]) -> None:
    for kind, count in more["requests"].items():
        account["requests"][kind] = account["requests"].get(kind, 0) + count
    for name in ("received_bytes", "sent_bytes"):
        account[name] += more[name]


def _subtract(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for purpose, account in after.items():
        old = before.get(purpose, _NO_ACCOUNT)
        found[purpose] = {
            "requests": {
                kind: grown
                for kind, count in account["requests"].items()
                if (grown := count - old["requests"].get(kind, 0)) > 0
            },
            "received_bytes": max(0, account["received_bytes"] - old["received_bytes"]),
            "sent_bytes": max(0, account["sent_bytes"] - old["sent_bytes"]),
        }
    return found
