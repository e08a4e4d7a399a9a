"""Requests and bytes of the bucket by purpose and topic, as Prometheus families.

Counting and the assignment to topics are in `tidelog.storage.bucket.accounts`. Zero values are not exported: a topic
has a series for each purpose that ever used it, at most a dozen.

Entry: `collect_accounts`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from tidelog.storage.bucket.accounts import Account, BucketAccounts

DIRECTIONS = (("received", "received_bytes"), ("sent", "sent_bytes"))


def collect_accounts(accounts: BucketAccounts) -> Iterable[Metric]:
    """Return the four families, by purpose and by topic."""
    mine = _families("tidelog_bucket", "Bucket", [])
    for purpose, account in accounts.purposes.items():
        _add(mine, account, [purpose])
    topics = _families("tidelog_bucket_topic", "Bucket, share of the topic", ["topic"])
    for topic, purposes in accounts.topics().items():
        for purpose, account in purposes.items():
            _add(topics, account, [topic, purpose])
    return [*mine, *topics]


def _families(prefix: str, text: str, labels: list[str]) -> tuple[CounterMetricFamily, CounterMetricFamily]:
    requests = CounterMetricFamily(
        f"{prefix}_requests", f"{text}: requests that S3 charges for", labels=[*labels, "purpose", "operation"]
    )
    size = CounterMetricFamily(f"{prefix}_bytes", f"{text}: payload", labels=[*labels, "purpose", "direction"])
    return requests, size


def _add(families: tuple[CounterMetricFamily, CounterMetricFamily], account: Account, labels: list[str]) -> None:
    requests, size = families
    for operation, count in account.requests.items():
        requests.add_metric([*labels, operation], count)
    for direction, field in DIRECTIONS:
        if value := getattr(account, field):
            size.add_metric([*labels, direction], value)
