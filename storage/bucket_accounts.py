"""Who asked the bucket for what: requests and bytes by purpose, and each topic's share of them.

A store counts every request where it is sent, retries and the parts of multipart uploads included, on the *account* of
the purpose that asked (`storage.purpose`). Whoever knows whose data a request carried takes a *receipt* with it: the
requests and bytes of one object written or read. Settled with the bytes of each stream, it is shared among the topics
in proportion to those bytes, bytes and requests alike: an object with 3 MB of A and 1 MB of B costs A three quarters of
a PUT. What nobody settles (the WAL's objects, listings, deletes, probes, reads that failed, streams of topics that are
gone) belongs to no topic: it is *shared*, the difference between a purpose and its topics.

What counts as a request is what S3 charges for: an attempt that the server answered, not with an error of its own
(5xx). Operations: `put` (with the begin, parts and end of a multipart upload), `get`, `head`, `list` (pages), `delete`
(with aborts). A store of files counts as S3 would.

Costs a few additions a request, and nothing a record. At most `MAX_TOPICS` topics have accounts, the rest are summed
under `__other__`, as are those that `retain` finds gone, so that no figure ever goes back.

Entry: `BucketAccounts`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal

RequestKind = Literal["put", "get", "head", "list", "delete"]

MAX_TOPICS: Final = 1_000
OTHER_TOPIC: Final = "__other__"
_RETRY_EVERY: Final = 256
"""At the cap, topics that are gone are looked for once in so many receipts."""


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
        """Take over a share of another account."""
        for kind, count in other.requests.items():
            self.requests[kind] = self.requests.get(kind, 0) + share * count
        self.received_bytes += share * other.received_bytes
        self.sent_bytes += share * other.sent_bytes

    def snapshot(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "requests": dict(sorted(self.requests.items())),
            "received_bytes": self.received_bytes,
            "sent_bytes": self.sent_bytes,
        }


class Receipt(Account):
    """What one piece of work asked of the bucket. It is on its purpose's account at once; `settle` shares it out."""

    __slots__ = ("_accounts", "_paid", "_purpose")

    def __init__(self, accounts: BucketAccounts | None = None, purpose: str = "other") -> None:
        """Without `accounts` (a store that keeps none) it counts nothing for anybody."""
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
        """Share it among the topics of `streams`: (stream id, bytes) of what was read or written. Once."""
        if self._accounts is not None and self.requests:
            self._accounts.share(self._purpose, self, streams)
        self._accounts = None


class BucketAccounts:
    """All accounts of one store. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._purposes: dict[str, Account] = {}
        self._topics: dict[str, dict[str, Account]] = {}
        self._refused = 0
        self.topic_of: Callable[[int], str | None] = lambda stream_id: None
        """The topic of a stream; None if it is not known (any more). The broker says."""
        self.exists: Callable[[str], bool] = lambda topic: True
        """Whether a topic (still) exists. The broker says."""

    def account(self, purpose: str) -> Account:
        """The account of a purpose, made when first asked for."""
        found = self._purposes.get(purpose)
        if found is None:
            found = self._purposes[purpose] = Account()
        return found

    def share(self, purpose: str, receipt: Account, streams: Iterable[tuple[int, int]]) -> None:
        """Put each topic's share of a receipt on its account."""
        weights: defaultdict[str | None, int] = defaultdict(int)
        for stream_id, size in streams:
            weights[self.topic_of(stream_id)] += size
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
        """Fold the accounts of topics that are gone into `__other__`."""
        gone = [topic for topic in self._topics if topic != OTHER_TOPIC and not self.exists(topic)]
        for topic in gone:
            other = self._topics.setdefault(OTHER_TOPIC, {})
            for purpose, account in self._topics.pop(topic).items():
                other.setdefault(purpose, Account()).add(account)

    @property
    def purposes(self) -> dict[str, Account]:
        """By purpose."""
        return self._purposes

    def topics(self) -> dict[str, dict[str, Account]]:
        """By topic and purpose, of those that exist, and `__other__`."""
        self.retain()
        return self._topics

    def snapshot(self) -> dict[str, Any]:
        """As JSON: `purposes` and `topics`."""
        return {
            "purposes": {name: account.snapshot() for name, account in sorted(self._purposes.items())},
            "topics": {
                topic: {name: account.snapshot() for name, account in sorted(mine.items())}
                for topic, mine in sorted(self.topics().items())
            },
        }
