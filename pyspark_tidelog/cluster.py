"""The cluster as the data source sees it: topics and offsets by Kafka's protocol, leases and objects by admin HTTP.

Everything that is known of a cluster follows from `kafka.bootstrap.servers`: each broker tells the URL of its admin
HTTP, and where the bucket is, in its configuration (DescribeConfigs).

Entry: `Cluster` on the driver; `Lookups` on driver and executors.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.options import EARLIEST, LATEST, Partition, ReadOptions
from pyspark_tidelog.plan import PlannedRange, Slice
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound, Unavailable

ANSWER_S = 30.0
RANGES_AT_ONCE = 150
"""Ranges in one question about slices, whose body is bounded to 64 KiB: one of the longest name has some 350 bytes."""
VERSION_WAIT_S = 10.0
"""How long a broker is waited for whose metadata are older than what was asked for."""
BUCKET_KEYS = ("endpoint", "bucket", "prefix", "region", "client")
"""Settings `s3.…` that a broker tells; it tells no secrets."""
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
_ADMIN_URL = "tidelog.admin.url"
_BUCKET_URL = "tidelog.bucket.url"


class Lease(NamedTuple):
    """A lease as its reader knows it."""

    id: int
    version: int
    ttl_s: float


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

    def take_lease(self, holder: str, ttl_s: float) -> Lease:
        """Take a lease. Raises `Unavailable`, `ConfigError` for a wrong token."""
        query = urllib.parse.urlencode({"holder": holder, "ttl_ms": int(ttl_s * 1000)})
        told = self._post(f"/leases?{query}")
        return Lease(told["id"], told["version"], ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        """Keep a lease. Raises `NotFound` when it has ended, `Unavailable`."""
        self._post(f"/leases/renew?id={lease.id}&ttl_ms={int(lease.ttl_s * 1000)}")

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

    def slices(self, ranges: Sequence[tuple[str, int, int, int]], version: int) -> tuple[str, list[PlannedRange]]:
        """Return the cluster's id, and the slices of ranges (topic, partition, start, end), in their order.

        A range whose start does not exist any more begins where the log does. Raises `NotFound`, `Unavailable`.
        """
        cluster_id, found = "", []
        for first in range(0, len(ranges), RANGES_AT_ONCE):
            asked = ranges[first : first + RANGES_AT_ONCE]
            left = [dict(zip(("topic", "partition", "start", "end"), each, strict=True)) for each in asked]
            partial: PlannedRange | None = None
            while left:
                answer = self._post("/slices", {"version": version, "ranges": left})
                cluster_id = answer["cluster_id"]
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
        return cluster_id, found

    def _post(self, path: str, body: object = None) -> Any:
        return self._ask(path, json.dumps(body).encode() if body is not None else b"")

    def _ask(self, path: str, data: bytes | None) -> Any:
        """Ask one broker after the other, from any on. Raises `Unavailable` when none answers."""
        urls = list(self.urls)
        random.shuffle(urls)
        problem = "the cluster has no broker with an admin HTTP"
        for url in urls:
            try:
                return self._send(url, path, data)
            except urllib.error.HTTPError as error:
                with error:
                    problem = _problem(error, path)
                    if error.code < 500:
                        raise _refusal(error.code, problem) from None
            except _NO_ANSWER as error:
                problem = f"{url}: {error}"
        raise Unavailable(f"no broker answers {path.partition('?')[0]}: {problem}", hint="is the cluster running?")

    def _send(self, url: str, path: str, data: bytes | None) -> Any:
        """Return one broker's answer. Raises what `_NO_ANSWER` has, and of that `HTTPError` for a refusal."""
        request = urllib.request.Request(url + path, data)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
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
    """Return a range of an answer, behind what an earlier answer had of it."""
    slices = tuple(Slice(*each) for each in row["slices"])
    start = max(row["start"], row["log_start"])
    if before is not None:
        start, slices = before.start, before.slices + slices
    return PlannedRange(row["topic"], row["partition"], row["stream"], start, row["end"], row["committed_end"], slices)


class LeaseKeeper:
    """Renews a lease in a thread while a task reads. A lease that is over is let go: objects are looked up again."""

    def __init__(self, lookups: Lookups, lease: Lease) -> None:
        self._lookups = lookups
        self._lease = lease
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
            raise TimeoutError(f"lease {self._lease.id} is still renewed")

    def _run(self) -> None:
        while True:
            try:
                self._lookups.renew_lease(self._lease)
            except NotFound:
                return
            except Unavailable:
                pass  # tried again before the lease ends
            if self._done.wait(self._lease.ttl_s / 3):
                return


class Cluster:
    """A cluster, by Kafka's admin protocol. On the driver."""

    def __init__(self, options: ReadOptions) -> None:
        from confluent_kafka.admin import AdminClient

        self._options = options
        self._admin = AdminClient({"log_level": 0, **options.kafka, "bootstrap.servers": options.bootstrap})
        self._metadata = self._ask_metadata()

    def _ask_metadata(self) -> Any:
        from confluent_kafka import KafkaException

        try:
            return self._admin.list_topics(timeout=ANSWER_S)
        except KafkaException as error:
            raise Unavailable(
                f"no broker answers at {self._options.bootstrap}: {error}", hint="see option kafka.bootstrap.servers"
            ) from error

    def partitions(self, topics: Iterable[str]) -> list[Partition]:
        """Return all partitions of topics. Raises `NotFound`."""
        found: list[Partition] = []
        for topic in topics:
            known = self._metadata.topics.get(topic)
            if known is None or not known.partitions:
                raise NotFound(f"there is no topic {topic!r} at {self._options.bootstrap}")
            found += [(topic, index) for index in sorted(known.partitions)]
        return found

    @property
    def topics(self) -> list[str]:
        """Return the names of all topics that are not internal."""
        return sorted(name for name in self._metadata.topics if not name.startswith("__"))

    def topic_id(self, topic: str) -> str:
        """Return the id of a topic, which another one of the same name has not. Raises `NotFound`, `Unavailable`."""
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        try:
            (future,) = self._admin.describe_topics(TopicCollection([topic]), request_timeout=ANSWER_S).values()
            return str(future.result(ANSWER_S).topic_id)
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise NotFound(f"there is no topic {topic!r} at {self._options.bootstrap}") from error
            raise Unavailable(f"topic {topic} is not described: {error}") from error

    @property
    def all_topics(self) -> list[str]:
        """Return the names of all topics, also of internal ones."""
        return sorted(self._metadata.topics)

    def lookups(self) -> Lookups:
        """Return the access to leases and slices. Raises `NotFound` where no broker is Tidelog's."""
        urls = tuple(configs[_ADMIN_URL] for configs in self._broker_configs if configs.get(_ADMIN_URL))
        if not urls:
            raise NotFound(
                f"no broker at {self._options.bootstrap} tells {_ADMIN_URL}: this is not Tidelog",
                hint='Spark\'s own source reads any Kafka: .format("kafka")',
            )
        return Lookups(urls, self._options.token)

    def bucket(self) -> dict[str, str]:
        """Return the settings `s3.…` of the bucket: what a broker tells, overridden by options."""
        told = next((each for each in self._broker_configs if _ADMIN_URL in each), {})
        settings = {key: told[f"s3.{key}"] for key in BUCKET_KEYS if told.get(f"s3.{key}")}
        if told.get(_BUCKET_URL, "").startswith("file:"):
            settings[EMBEDDED] = told[_BUCKET_URL]
        return {**settings, **self._options.s3}

    @cached_property
    def _broker_configs(self) -> list[dict[str, str]]:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource

        resources = [ConfigResource(ConfigResource.Type.BROKER, str(each)) for each in sorted(self._metadata.brokers)]
        asked = [self._admin.describe_configs([each], request_timeout=ANSWER_S)[each] for each in resources]
        found = []
        for future in asked:
            try:
                entries = future.result(ANSWER_S)
            except (KafkaException, TimeoutError):  # that broker does not answer: another one does
                continue
            found.append({name: str(entry.value) for name, entry in entries.items() if entry.value is not None})
        return found

    def offsets(self, wanted: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return offsets for `EARLIEST`, `LATEST`, or timestamps (ms) of partitions; -1: no record is that late."""
        from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        spec: Any = OffsetSpec
        named = {EARLIEST: spec.earliest(), LATEST: spec.latest()}
        level = IsolationLevel.READ_COMMITTED if self._options.is_committed_only else IsolationLevel.READ_UNCOMMITTED
        asked = {TopicPartition(*place): named.get(at) or spec.for_timestamp(at) for place, at in wanted.items()}
        if not asked:
            return {}
        futures = self._admin.list_offsets(asked, isolation_level=level, request_timeout=ANSWER_S)
        found: dict[Partition, int] = {}
        for place, future in futures.items():
            try:
                found[place.topic, place.partition] = future.result(ANSWER_S).offset
            except KafkaException as error:
                raise Unavailable(f"the offsets of {place.topic}-{place.partition} are not known: {error}") from error
        return found
