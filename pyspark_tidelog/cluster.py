"""The cluster as the data source sees it: topics and offsets by Kafka's protocol, leases and objects by admin HTTP.

Everything that is known of a cluster follows from `kafka.bootstrap.servers`: each broker tells the URL of its admin
HTTP, and where the bucket is, in its configuration (DescribeConfigs).

Entry: `Cluster` and `retried` on the driver; `Lookups` on driver and executors.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import struct
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.kafka_calls import TAGS, KafkaAnswer, KafkaConnections, encode_length, encode_text
from pyspark_tidelog.options import EARLIEST, LATEST, Partition, ReadOptions
from pyspark_tidelog.plan import PlannedRange, SharedOffsets, Slice
from tidelog.runtime.backoff import Backoff
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound, Unavailable
from tidelog.runtime.network import CLUSTER_HEADER

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

ANSWER_S = 30.0
OTHERS_S = 1.0
"""How long the other brokers may take to tell where they are, when one has."""
RETRY_S = 60.0
"""How long a plan waits for brokers or controllers that are away, as in a failover (rule 11)."""
RANGES_AT_ONCE = 150
"""Ranges in one question about slices, whose body is bounded to 64 KiB: one of the longest name has some 350 bytes."""
SLICES_AT_ONCE = 1_000
"""Slices in one answer: a broker's event loop serves producers, too, and finds and encodes so many at a time."""
VERSION_WAIT_S = 10.0
"""How long a broker is waited for whose metadata are older than what was asked for."""
BUCKET_KEYS = ("endpoint", "bucket", "prefix", "region", "client")
"""Settings `s3.…` that a broker tells; it tells no secrets."""
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
_ADMIN_URL = "tidelog.admin.url"
_BUCKET_URL = "tidelog.bucket.url"
_NO_OFFSET = -1
_UINT64 = (1 << 64) - 1
_OFFSET_FOR_LEADER_EPOCH = (23, 4)


def retried(action: Callable[[], _T], budget_s: float = RETRY_S) -> _T:
    """Return what `action` returns. After `Unavailable` it is called again, until the budget is spent."""
    backoff, ends_s = Backoff(0.1, 2.0, random.Random()), time.monotonic() + budget_s
    while True:
        try:
            return action()
        except Unavailable:
            delay_s = backoff.next_delay_s()
            if time.monotonic() + delay_s >= ends_s:
                raise
            time.sleep(delay_s)


class TooManySlices(InvalidInput):
    """A plan has more slices than its tasks are to carry: they belong in a manifest."""


class Lease(NamedTuple):
    """A lease as its reader knows it."""

    id: int
    version: int
    ttl_s: float


class Lookup(NamedTuple):
    """What a lookup found."""

    cluster_id: str
    version: int
    """Of the metadata that the first answer is from."""
    ranges: list[PlannedRange]


class KnownEnd(NamedTuple):
    """Where a partition ends, as its leader tells."""

    offset: int
    epoch: int
    """The leader epoch; -1 if it is not told."""


class KnownObject(NamedTuple):
    """An object as the metadata know it."""

    id: int
    state: str
    """`prepared`, `committed` or `destroyed`."""
    kind: str
    """`stream` or `stream-set`; empty before it is committed."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Lookups:
    """Leases and slices, by any broker's admin HTTP. Pickled to the executors."""

    urls: tuple[str, ...]
    """The admin HTTP of each broker."""
    token: str
    meant: str = ""
    """The id of the cluster: a broker of another one, which answers at such an address, refuses; empty: any answers."""

    def take_lease(self, holder: str, ttl_s: float) -> Lease:
        """Take a lease. Raises `Unavailable`, `ConfigError` for a wrong token."""
        query = urllib.parse.urlencode({"holder": holder, "ttl_ms": int(ttl_s * 1000)})
        told = self._post(f"/leases?{query}")
        return Lease(told["id"], told["version"], ttl_s)

    def renew_lease(self, lease: Lease, version: int = 0) -> Lease:
        """Keep a lease, from metadata of `version` on if that is newer.

        Raises `NotFound` when it has ended, `Unavailable`.
        """
        query = urllib.parse.urlencode({"id": lease.id, "ttl_ms": int(lease.ttl_s * 1000), "version": version})
        told = self._post(f"/leases/renew?{query}")
        return lease._replace(version=told["version"])

    def cluster_id(self) -> str:
        """Return the id of the cluster. Raises `Unavailable`."""
        return str(self._ask("/cluster", None)["cluster_id"])

    def end_lease(self, lease: Lease) -> None:
        """Give a lease back; one that has ended already is success. Raises `Unavailable`."""
        with contextlib.suppress(NotFound):
            self._post(f"/leases/end?id={lease.id}")

    def objects(self, version: int) -> list[KnownObject]:
        """Return all objects that metadata of this version or a newer one know, by id. Raises `Unavailable`."""
        problem = "the cluster has no broker with an admin HTTP"
        for url in random.sample(self.urls, len(self.urls)):
            try:
                self._wait_version(url, version)
                return list(self._pages(url))
            except _NO_ANSWER as error:
                problem = f"{url}: {error}"
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
        raise Unavailable(f"no broker tells all objects: {problem}", hint="is the cluster running?")

    def _wait_version(self, url: str, version: int) -> None:
        """Return when a broker has the metadata of a version. Raises what `_NO_ANSWER` has."""
        deadline = time.monotonic() + VERSION_WAIT_S
        while self._send(url, "/leases", None)["version"] < version:
            if time.monotonic() > deadline:
                raise TimeoutError(f"its metadata are older than version {version}, for {VERSION_WAIT_S:g} s now")
            time.sleep(0.1)

    def _pages(self, url: str) -> Iterator[KnownObject]:
        after: int | None = -1
        while after is not None:
            page = self._send(url, f"/objects?limit=1000&after={after}", None)
            for row in page["objects"]:
                yield KnownObject(row["id"], row["state"], row["kind"] or "", row["size_bytes"])
            after = page["next_after"]

    def slices(self, ranges: Sequence[tuple[str, int, int, int]], version: int, most: int | None = None) -> Lookup:
        """Return the slices of ranges (topic, partition, start, end), in their order, from `version` or newer.

        A range whose start does not exist any more begins where the log does. Raises `NotFound`, `Unavailable`, and
        `TooManySlices` when there are more than `most`.
        """
        cluster_id, told_version, found = "", 0, []
        count = 0
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            asked = ranges[first : first + RANGES_AT_ONCE]
            left = [dict(zip(("topic", "partition", "start", "end"), each, strict=True)) for each in asked]
            partial: PlannedRange | None = None
            while left:
                answer = self._post(
                    "/slices?shared=true", {"version": version, "ranges": left, "limit": SLICES_AT_ONCE}
                )
                cluster_id, told_version = answer["cluster_id"], told_version or answer["version"]
                count += sum(len(row["slices"]) for row in answer["ranges"])
                if most is not None and count > most:
                    raise TooManySlices(f"there are more than {most} slices")
                for row in answer["ranges"]:
                    one = _planned(row, partial)
                    partial = None
                    found.append(one)
                goes_on = answer["next"]
                if goes_on is None:
                    break
                left = left[goes_on["range"] :]
                if goes_on["range"] < len(answer["ranges"]):  # the last one is not complete
                    partial = found.pop()
                    left[0]["start"] = goes_on["start"]
        return Lookup(cluster_id, told_version, found)

    def manifest(self, ranges: Sequence[tuple[str, int, int, int]], lease: Lease) -> Any:
        """Have the slices of up to `RANGES_AT_ONCE` ranges written to the bucket, for a lease; return the answer.

        Raises `NotFound`, also when the lease has ended, and `Unavailable`.
        """
        asked = [dict(zip(("topic", "partition", "start", "end"), each, strict=True)) for each in ranges]
        return self._post(f"/manifests?lease={lease.id}&shared=true", {"version": lease.version, "ranges": asked})

    def post(self, path: str, body: object = None) -> Any:
        """Send a request that this class has no method for, to any broker; the token may be the administrators'.

        Raises `ConfigError` for a wrong token, `NotFound`, `InvalidInput`, and `Unavailable` when none answers.
        """
        return self._post(path, body)

    def _post(self, path: str, body: object = None) -> Any:
        return self._ask(path, json.dumps(body).encode() if body is not None else b"")

    def _ask(self, path: str, data: bytes | None) -> Any:
        """Ask one broker after the other, from any on. Raises `Unavailable` when none answers.

        Where a broker was, or is as seen from another machine, another cluster's may be: who does not know the token,
        or is of another cluster, is no reason to give up before the others are asked.
        """
        urls = list(self.urls)
        random.shuffle(urls)
        problem = "the cluster has no broker with an admin HTTP"
        stranger: Exception | None = None
        for url in urls:
            try:
                return self._send(url, path, data)
            except urllib.error.HTTPError as error:
                with error:
                    problem = _problem(error, path)
                    if error.code == 401:
                        stranger = _refusal(error.code, problem)
                    elif error.code < 500 and error.code != http.client.MISDIRECTED_REQUEST:
                        raise _refusal(error.code, problem) from None
            except _NO_ANSWER as error:
                problem = f"{url}: {error}"
        if stranger is not None:
            raise stranger
        raise Unavailable(f"no broker answers {path.partition('?')[0]}: {problem}", hint="is the cluster running?")

    def _send(self, url: str, path: str, data: bytes | None) -> Any:
        """Return one broker's answer. Raises what `_NO_ANSWER` has, and of that `HTTPError` for a refusal."""
        request = urllib.request.Request(url + path, data)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        if self.meant:
            request.add_header(CLUSTER_HEADER, self.meant)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return json.load(response)


def _problem(error: urllib.error.HTTPError, path: str) -> str:
    try:
        told = json.load(error)
        return str(told["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path}: HTTP {error.code}"


def _refusal(code: int, problem: str) -> Exception:
    if code == 401:
        return ConfigError(problem, hint="give option readTokenFile what `tidelog cluster read-token` prints")
    return NotFound(problem) if code == 404 else InvalidInput(problem)


def _planned(row: Mapping[str, Any], before: PlannedRange | None) -> PlannedRange:
    """Return a range of an answer, behind what an earlier answer had of it. Raises `Unavailable` as `require_same`."""
    one = planned(row, tuple(Slice(*each) for each in row["slices"]))
    if before is not None:
        require_same(before, one)
    if before is not None and one.start == row["start"]:  # else the log was trimmed past what the answer before had
        return replace(one, start=before.start, slices=before.slices + one.slices)
    return one


def require_same(before: PlannedRange, after: PlannedRange) -> None:
    """Check that two answers about a range are about one topic. Raises `Unavailable`: it is looked up again."""
    if before.stream != after.stream:
        raise Unavailable(f"topic {after.topic} was deleted and created again while it was looked up")


def planned(row: Mapping[str, Any], slices: tuple[Slice, ...]) -> PlannedRange:
    """Return a range of an answer, with these slices."""
    return PlannedRange(
        row["topic"],
        row["topic_id"],
        row["partition"],
        row["stream"],
        max(row["start"], row["log_start"]),
        row["end"],
        row["committed_end"],
        slices,
        tuple(SharedOffsets(*each) for each in row.get("shared", ())),  # a broker of an older version tells none
    )


_due_s: dict[tuple[tuple[str, ...], int, float], float] = {}
"""When this process is to renew a lease again, by brokers, id and time to live, in `time.monotonic()`.

Another cluster at the same addresses may give an id again, to a lease that ends sooner.
"""
_due_lock = threading.Lock()


class LeaseKeeper:
    """Renews a lease in a thread while a task reads. A lease that is over is let go: objects are looked up again.

    Tasks that follow each other in a process share what they renew: each renewal is a command of the controllers.
    """

    def __init__(self, lookups: Lookups, lease: Lease) -> None:
        self._kept = (lookups, lease)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tidelog-lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._done.set()
        self._thread.join(2 * ANSWER_S)

    def wait_over(self, timeout_s: float) -> None:
        """Return when the lease is over. Raises `TimeoutError`."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"lease {self._kept[1].id} is still renewed")

    def follow(self, lookups: Lookups, lease: Lease) -> None:
        """Renew it at these brokers from now on, and this version of it."""
        self._kept = (lookups, lease)

    def _run(self) -> None:
        if self._done.wait(_due_in_s(*self._kept)):
            return
        while True:
            lookups, lease = self._kept
            try:
                lookups.renew_lease(lease)
                _note_renewal(lookups, lease)
            except NotFound:
                return
            except Unavailable:
                pass  # tried again before the lease ends
            except Exception as error:  # noqa: BLE001  # nobody else would renew it
                logger.warning("lease %d was not renewed, and will be tried again: %r", lease.id, error)
            if self._done.wait(lease.ttl_s / 3):
                return


def _due_in_s(lookups: Lookups, lease: Lease) -> float:
    with _due_lock:
        return max(0.0, _due_s.get((lookups.urls, lease.id, lease.ttl_s), 0.0) - time.monotonic())


def _note_renewal(lookups: Lookups, lease: Lease) -> None:
    now_s = time.monotonic()
    with _due_lock:
        for key in [key for key, due_s in _due_s.items() if due_s < now_s]:
            del _due_s[key]
        _due_s[lookups.urls, lease.id, lease.ttl_s] = now_s + lease.ttl_s / 3


class Cluster:
    """A cluster, by Kafka's admin protocol. On the driver."""

    def __init__(self, options: ReadOptions) -> None:
        from confluent_kafka.admin import AdminClient

        self.options = options
        self._admin = AdminClient({"log_level": 0, **options.kafka, "bootstrap.servers": options.bootstrap})
        self._metadata = self._ask_metadata()
        self._configs: list[dict[str, str]] = []

    def refresh(self) -> None:
        """Ask anew which brokers, topics and partitions there are. Raises `Unavailable`."""
        before = self._addresses()
        self._metadata = self._ask_metadata()
        if self._addresses() != before:
            self.forget_brokers()

    def forget_brokers(self) -> None:
        """Ask the brokers anew where their admin HTTP is, before it is needed the next time."""
        self._configs = []

    def _addresses(self) -> set[tuple[int, str, int]]:
        return {(each.id, each.host, each.port) for each in self._metadata.brokers.values()}

    def _ask_metadata(self) -> Any:
        from confluent_kafka import KafkaException

        try:
            return self._admin.list_topics(timeout=ANSWER_S)
        except KafkaException as error:
            raise Unavailable(
                f"no broker answers at {self.options.bootstrap}: {error}", hint="see option kafka.bootstrap.servers"
            ) from error

    def partitions(self, topics: Iterable[str]) -> list[Partition]:
        """Return all partitions of topics. Raises `NotFound`."""
        found: list[Partition] = []
        for topic in topics:
            known = self._metadata.topics.get(topic)
            if known is None or not known.partitions:
                raise NotFound(f"there is no topic {topic!r} at {self.options.bootstrap}")
            found += [(topic, index) for index in sorted(known.partitions)]
        return found

    def has_topic(self, topic: str) -> bool:
        """Whether a topic exists, as far as the broker knew that was asked last."""
        known = self._metadata.topics.get(topic)
        return known is not None and bool(known.partitions)

    def has_partition(self, place: Partition) -> bool:
        """Whether a partition exists, as far as the broker knew that was asked last."""
        known = self._metadata.topics.get(place[0])
        return known is not None and place[1] in known.partitions

    @property
    def topics(self) -> list[str]:
        """Return the names of all topics that are not internal."""
        return sorted(name for name in self._metadata.topics if not name.startswith("__"))

    @property
    def all_topics(self) -> list[str]:
        """Return the names of all topics, also of internal ones."""
        return sorted(self._metadata.topics)

    def lookups(self) -> Lookups:
        """Return the access to leases and slices. Raises `NotFound` where no broker is Tidelog's."""
        urls = tuple(configs[_ADMIN_URL] for configs in self._broker_configs() if configs.get(_ADMIN_URL))
        if not urls:
            raise NotFound(
                f"no broker at {self.options.bootstrap} tells {_ADMIN_URL}: this is not Tidelog",
                hint='Spark\'s own source reads any Kafka: .format("kafka")',
            )
        return Lookups(urls, self.options.token, self._metadata.cluster_id or "")

    def bucket(self) -> dict[str, str]:
        """Return the settings `s3.…` of the bucket: what a broker tells, overridden by options."""
        told = next((each for each in self._broker_configs() if _ADMIN_URL in each), {})
        settings = {key: told[f"s3.{key}"] for key in BUCKET_KEYS if told.get(f"s3.{key}")}
        if told.get(_BUCKET_URL, "").startswith("file:"):
            settings[EMBEDDED] = told[_BUCKET_URL]
        return {**settings, **self.options.s3}

    def _broker_configs(self) -> list[dict[str, str]]:
        """Return what the brokers tell of their configuration: those that answer soon after the first one."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource

        if self._configs:
            return self._configs
        resources = [ConfigResource(ConfigResource.Type.BROKER, str(each)) for each in sorted(self._metadata.brokers)]
        asked = {self._admin.describe_configs([each], request_timeout=ANSWER_S)[each] for each in resources}
        found: list[dict[str, str]] = []
        ends_s = time.monotonic() + ANSWER_S
        while asked and time.monotonic() < ends_s:
            answered, asked = wait(asked, max(0.0, ends_s - time.monotonic()), FIRST_COMPLETED)
            for future in answered:
                try:
                    entries = future.result()
                except KafkaException:  # that broker does not answer: another one does
                    continue
                told = {name: str(entry.value) for name, entry in entries.items() if entry.value is not None}
                found.append(told)
                ends_s = min(ends_s, time.monotonic() + OTHERS_S)
        self._configs = found
        return found

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return the ids of topics, 32 hexadecimal digits each, without those that do not exist.

        Raises `Unavailable`.
        """
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        names = list(topics)
        if not names:
            return {}
        found = {}
        for name, future in self._admin.describe_topics(TopicCollection(names), request_timeout=ANSWER_S).items():
            try:
                told = future.result(ANSWER_S).topic_id
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    continue
                raise Unavailable(f"topic {name} cannot be described: {error}") from error
            high, low = told.get_most_significant_bits(), told.get_least_significant_bits()
            found[name] = f"{high & _UINT64:016x}{low & _UINT64:016x}"
        return found

    def commit(self, group: str, offsets: Mapping[Partition, int]) -> Future[Any]:
        """Commit a group's offsets without being a member. Its result fails with `KafkaException`."""
        from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

        rows = [TopicPartition(*place, offset) for place, offset in offsets.items()]
        asked = [ConsumerGroupTopicPartitions(group, rows)]
        future: Future[Any] = self._admin.alter_consumer_group_offsets(asked, request_timeout=ANSWER_S)[group]
        return future

    def log_ends(self, readable: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return where partitions end that are readable up to these offsets, which were asked for before.

        With `read_committed` that is behind the last stable offset, while a transaction is open.
        """
        if not self.options.is_committed_only:
            return {**readable}
        return {place: end.offset for place, end in self._offsets(dict.fromkeys(readable, LATEST), False).items()}

    def offsets(self, wanted: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return offsets for `EARLIEST`, `LATEST`, or timestamps (ms) of partitions; -1: no record is that late.

        With `read_committed` the latest one is the last stable offset.
        """
        told = self._offsets(wanted, self.options.is_committed_only)
        return {place: each.offset for place, each in told.items()}

    def ends(self, places: Iterable[Partition]) -> dict[Partition, KnownEnd]:
        """Return where partitions end, as `offsets` does, and their leader epochs. Raises `Unavailable`."""
        return self._offsets(dict.fromkeys(places, LATEST), self.options.is_committed_only)

    def epoch_ends(self, epochs: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return where the records of these leader epochs and older ones end, by partition.

        Left out are partitions that do not exist any more, and epochs that have written nothing yet. Nothing is asked
        of brokers behind a proxy with TLS or SASL, for librdkafka does not ask it. Raises `Unavailable`.
        """
        if str(self.options.kafka.get("security.protocol", "plaintext")).lower() != "plaintext":
            return {}
        by_leader: dict[tuple[str, int], dict[Partition, int]] = {}
        for place, epoch in sorted(epochs.items()):
            if self.has_partition(place):
                leader = self._metadata.brokers.get(self._metadata.topics[place[0]].partitions[place[1]].leader)
                if leader is None:
                    raise Unavailable(f"{place[0]}-{place[1]} has no leader")
                by_leader.setdefault((leader.host, leader.port), {})[place] = epoch
        found: dict[Partition, int] = {}
        connections = KafkaConnections()
        try:
            for address, asked in by_leader.items():
                answer = connections.ask(address, _OFFSET_FOR_LEADER_EPOCH, _epoch_question(asked))
                found.update(_epoch_ends(answer))
        finally:
            connections.close()
        return found

    def _offsets(self, wanted: Mapping[Partition, int], is_committed_only: bool) -> dict[Partition, KnownEnd]:
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        spec: Any = OffsetSpec
        named = {EARLIEST: spec.earliest(), LATEST: spec.latest()}
        level = IsolationLevel.READ_COMMITTED if is_committed_only else IsolationLevel.READ_UNCOMMITTED
        asked = {TopicPartition(*place): named.get(at) or spec.for_timestamp(at) for place, at in wanted.items()}
        if not asked:
            return {}
        futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=ANSWER_S)
        found: dict[Partition, KnownEnd] = {}
        for place, future in futures.items():
            try:
                told = future.result(ANSWER_S)
            except KafkaException as error:
                raise Unavailable(f"the offsets of {place.topic}-{place.partition} are not known: {error}") from error
            offset = told.offset
            is_none_that_late = offset == _NO_OFFSET and wanted[place.topic, place.partition] >= 0
            if offset < 0 and not is_none_that_late:  # the client's way to say that the leader did not answer
                raise Unavailable(f"the offsets of {place.topic}-{place.partition} are not known: no leader answers")
            found[place.topic, place.partition] = KnownEnd(
                offset, -1 if told.leader_epoch is None else told.leader_epoch
            )
        return found


def _epoch_question(epochs: Mapping[Partition, int]) -> bytes:
    by_topic: dict[str, list[bytes]] = {}
    for (topic, index), epoch in epochs.items():
        by_topic.setdefault(topic, []).append(struct.pack(">iii", index, -1, epoch) + TAGS)
    topics = [encode_text(topic) + encode_length(len(rows)) + b"".join(rows) + TAGS for topic, rows in by_topic.items()]
    return struct.pack(">i", -1) + encode_length(len(topics)) + b"".join(topics) + TAGS


def _epoch_ends(answer: KafkaAnswer) -> dict[Partition, int]:
    found = {}
    answer.int32()  # throttle time
    for _ in range(answer.length()):
        topic = answer.text()
        for _ in range(answer.length()):
            error, index, _, end = answer.int16(), answer.int32(), answer.int32(), answer.int64()
            answer.tags()
            if error:
                raise Unavailable(f"the leader epochs of {topic}-{index} are not known: error {error}")
            if end >= 0:
                found[topic, index] = end
        answer.tags()
    return found
