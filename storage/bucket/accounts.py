"""Accounting of bucket requests: requests and bytes by purpose, and each topic's share of them.

A store counts every request when it is sent, including retries and the parts of multipart uploads, on the *account* of
the purpose of the request (`tidelog.storage.bucket.purpose`). A caller that knows which streams a request carries takes
a *receipt*: the requests and bytes of one object written or read. `settle` divides the receipt among the topics of
these streams in proportion to their bytes, requests included: an object with 3 MB of A and 1 MB of B charges A with
three quarters of a PUT. Requests that are never settled (WAL objects, listings, deletes, probes, failed reads, streams
of deleted topics) belong to no topic: they are *shared*, the difference between a purpose and its topics.

Counted as a request is what S3 charges for: an attempt that the server answered with anything but a server error (5xx).
Operations: `put` (with the begin, parts and end of a multipart upload), `get`, `head`, `list` (pages), `delete`
(with aborts). A store of files counts as S3 would.

The cost is a few additions per request and nothing per record. At most `MAX_TOPICS` topics have accounts; all further
topics are summed under `__other__`, as are those that `retain` finds deleted, so that no counter decreases.

Entry: `BucketAccounts`; `TopicNames`, what the broker tells it of topics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

RequestKind = Literal["put", "get", "head", "list", "delete"]

MAX_TOPICS: Final = 1_000
OTHER_TOPIC: Final = "__other__"
_RETRY_EVERY: Final = 256
"""At the limit, deleted topics are searched for once in this many receipts."""


class Account:
    """Requests by operation, and payload bytes from (`received`) and to (`sent`) the bucket. Fractions for topics."""

    __slots__ = ("received_bytes", "requests", "sent_bytes")

    def __init__(self) -> None:
        self.requests: dict[str, float] = {}
        self.received_bytes: float = 0
        self.sent_bytes: float = 0

    def request(self, kind: RequestKind, count: int = 1) -> None:
        """Count requests."""
        self.requests[kind] = self.requests.get(kind, 0) + count

    def received(self, size: int) -> None:
        """Count bytes read."""
        self.received_bytes += size

    def sent(self, size: int) -> None:
        """Count bytes written."""
        self.sent_bytes += size

    def add(self, other: Account, share: float = 1) -> None:
        """Add a share of another account."""
        for kind, count in other.requests.items():
            self.requests[kind] = self.requests.get(kind, 0) + share * count
        self.received_bytes += share * other.received_bytes
        self.sent_bytes += share * other.sent_bytes

    def snapshot(self) -> dict[str, Any]:
        """Return the account as JSON."""
        return {
            "requests": dict(sorted(self.requests.items())),
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
        }


class Receipt(Account):
    """Requests of one piece of work. They are on the purpose's account at once; `settle` divides them among topics."""

    __slots__ = ("_accounts", "_paid", "_purpose")

    def __init__(self, accounts: BucketAccounts | None = None, purpose: str = "other") -> None:
        """Without `accounts` (a store that keeps none) nothing is counted."""
        super().__init__()
        self._accounts = accounts
        self._purpose = purpose
        self._paid = accounts.account(purpose) if accounts is not None else Account()

    def request(self, kind: RequestKind, count: int = 1) -> None:
        """See `Account.request`."""
        super().request(kind, count)
        self._paid.request(kind, count)

    def received(self, size: int) -> None:
        """See `Account.received`."""
        super().received(size)
        self._paid.received(size)

    def sent(self, size: int) -> None:
        """See `Account.sent`."""
        super().sent(size)
        self._paid.sent(size)

    def settle(self, streams: Iterable[tuple[int, int]]) -> None:
        """Divide the receipt among the topics of `streams`, the (stream id, bytes) read or written. Call it once."""
        if self._accounts is not None and self.requests:
            self._accounts.share(self._purpose, self, streams)
        self._accounts = None


@dataclass(frozen=True, slots=True)
class TopicNames:
    """What the metadata says of topics."""

    of_stream: Callable[[int], str | None]
    """Returns the topic of a stream; None if it is unknown or deleted."""
    exists: Callable[[str], bool]
    """Returns whether a topic exists."""


class BucketAccounts:
    """All accounts of one store. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._purposes: dict[str, Account] = {}
        self._topics: dict[str, dict[str, Account]] = {}
        self._refused = 0
        self._topic_names: TopicNames | None = None

    def divide_by(self, names: TopicNames) -> None:
        """Divide among topics from now on; until then everything is shared.

        Called by the broker that is started over the store. A broker that is started after it, in the same cluster, may
        call it again.
        """
        self._topic_names = names

    def account(self, purpose: str) -> Account:
        """Return the account of a purpose; create it on first use."""
        found = self._purposes.get(purpose)
        if found is None:
            found = self._purposes[purpose] = Account()
        return found

    def share(self, purpose: str, receipt: Account, streams: Iterable[tuple[int, int]]) -> None:
        """Add each topic's share of a receipt to its account."""
        if self._topic_names is None:
            return
        weights: defaultdict[str | None, int] = defaultdict(int)
        for stream_id, size in streams:
            weights[self._topic_names.of_stream(stream_id)] += size
        total = sum(weights.values())
        if total <= 0:
            return
        for topic, weight in weights.items():
            if topic is not None and weight:
                self._of(topic, purpose).add(receipt, weight / total)

    def _of(self, topic: str, purpose: str) -> Account:
        mine = self._topics.get(topic)
        if mine is None:
            mine = self._open(topic)
        found = mine.get(purpose)
        if found is None:
            found = mine[purpose] = Account()
        return found

    def _open(self, topic: str) -> dict[str, Account]:
        if len(self._topics) >= MAX_TOPICS:
            if self._refused % _RETRY_EVERY == 0:
                self.retain()
            self._refused += 1
        if len(self._topics) >= MAX_TOPICS:
            topic = OTHER_TOPIC
        return self._topics.setdefault(topic, {})

    def retain(self) -> None:
        """Fold the accounts of deleted topics into `__other__`."""
        names = self._topic_names
        if names is None:
            return
        gone = [topic for topic in self._topics if topic != OTHER_TOPIC and not names.exists(topic)]
        for topic in gone:
            other = self._topics.setdefault(OTHER_TOPIC, {})
            for purpose, account in self._topics.pop(topic).items():
                other.setdefault(purpose, Account()).add(account)

    @property
    def purposes(self) -> dict[str, Account]:
        """Return the accounts by purpose."""
        return self._purposes

    def topics(self) -> dict[str, dict[str, Account]]:
        """Return the accounts by topic and purpose, of existing topics, and `__other__`."""
        self.retain()
        return self._topics

    def snapshot(self) -> dict[str, Any]:
        """Return all accounts as JSON: `purposes` and `topics`."""
        return {
            "purposes": {name: account.snapshot() for name, account in sorted(self._purposes.items())},
            "topics": {
                topic: {name: account.snapshot() for name, account in sorted(mine.items())}
                for topic, mine in sorted(self.topics().items())
            },
        }
