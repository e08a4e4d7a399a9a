"""Metadata (3): brokers, topics, leaders, from the local image.

Null topics means all, an empty list none (v0: an empty list means all). A topic that is named several times is answered
once, as in Kafka: its partitions may be thousands of times its name. A missing topic is created if the
request allows it (before v4 it always does) and `kafka.auto_create_topics` is on. Only live brokers are listed; the
"controller" is the broker that answers (`Services.named_controller`).

Responses are cached as bytes until topics, brokers or leaders change (`Image.placement_version`), and each topic's part
of them until that topic or any leader changes. What is not cached is encoded in steps, before the answer is put
together.

The creation of a missing topic at the controller has a time limit, so that Metadata also answers without a controller.

A partition that was never opened has no leader (LEADER_NOT_AVAILABLE), whoever asks: a client that is told of one sends
at once. A request that names such a topic waits a little for it, whether it or another one created it: `OPENING_WAIT_S`
from the first request on, so that a partition that does not open delays nobody again and again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from tidelog.broker.coordinators.topic import PlannedTopic, planned_topic
from tidelog.broker.kafka.errors import (
    INVALID_TOPIC_EXCEPTION,
    LEADER_NOT_AVAILABLE,
    TOPIC_ALREADY_EXISTS,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from tidelog.broker.kafka.replicas import replicas_of
from tidelog.broker.kafka.services import RequestContext, Services, serve
from tidelog.broker.kafka.wire.codec import EncodedBody, encode_body
from tidelog.broker.kafka.wire.messages.cluster import MetadataRequest, MetadataResponse, MetadataResponseBroker
from tidelog.broker.kafka.wire.metadata import PartitionPart, encode_topic, join
from tidelog.broker.partitions.openings import OPENING_WAIT_S
from tidelog.runtime.errors import TidelogError
from tidelog.runtime.steps import Steps, in_turns

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from tidelog.controller.image.image import Delta, Image
    from tidelog.controller.model.records import PartitionKey, PartitionRecord, TopicRecord

CREATE_TIMEOUT_S = 10.0
"""Clients allow a Metadata request 30 s or more."""
MAX_ANSWERS_BYTES = 4 << 20
"""Cached responses: a few versions times a few sets of topics."""
MAX_TOPICS_BYTES = 16 << 20
"""Cached encoded topics: some 40 bytes per partition, for each version that clients use."""
STEP_PARTITIONS = 5_000
"""Partitions encoded in one step, at some microseconds each."""
MAX_AHEAD = 5
"""How often what has changed while an answer was encoded is encoded in steps, too, before the rest is done at once."""
ANSWER_OVERHEAD_BYTES = 400
"""Memory of a cached response in addition to its bytes: request key, keys, dictionary slot."""

_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_NOT_ASKED = -(1 << 31)
_TOPIC_OPERATIONS = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
"""Read, write, create, delete, alter, describe, describe and alter configs: all, without an authorizer (KIP-430)."""
_CLUSTER_OPERATIONS = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))


class _WantedTopics(NamedTuple):
    """A topic in the request: by name, or (v10+) by id."""

    name: str | None
    topic_id: bytes


class _Question(NamedTuple):
    """The inputs of a response other than the image."""

    version: int
    topics: tuple[_WantedTopics, ...] | None
    cluster_operations: bool
    topic_operations: bool
    controller_id: int


class _Cache:
    """Encoded responses for one placement version of an image, and encoded topics until they change."""

    def __init__(self) -> None:
        self._version = -1
        self._answers: dict[_Question, bytes] = {}
        self._answers_bytes = 0
        self._topics: dict[tuple[int, bytes, bool], tuple[int, int, bytes]] = {}
        self._topics_bytes = 0

    def get(self, placement_version: int, question: _Question) -> bytes | None:
        return self._answers.get(question) if placement_version == self._version else None

    def put(self, placement_version: int, question: _Question, body: bytes) -> None:
        if placement_version != self._version or self._answers_bytes + len(body) > MAX_ANSWERS_BYTES:
            self._answers.clear()
            self._answers_bytes = 0
            self._version = placement_version
        if len(body) <= MAX_ANSWERS_BYTES:
            self._answers[question] = body
            self._answers_bytes += len(body) + ANSWER_OVERHEAD_BYTES

    def has(self, image: Image, question: _Question, record: TopicRecord) -> bool:
        """Return whether `topic` has it at hand."""
        known = self._topics.get((question.version, record.id, question.topic_operations))
        return known is not None and known[:2] == (image.topic_versions[record.id], image.leaders_version)

    def topic(self, image: Image, question: _Question, record: TopicRecord) -> bytes:
        """Return a topic's part of a response; encode it only after the topic or a leader has changed."""
        key = question.version, record.id, question.topic_operations
        topic_version, leaders_version = image.topic_versions[record.id], image.leaders_version
        known = self._topics.get(key)
        if known is not None:
            if known[:2] == (topic_version, leaders_version):
                return known[2]
            self._topics_bytes -= len(known[2]) + ANSWER_OVERHEAD_BYTES
            del self._topics[key]
        body = _topic(image, question, record)
        if self._topics_bytes + len(body) > MAX_TOPICS_BYTES:
            self._topics.clear()
            self._topics_bytes = 0
        self._topics[key] = topic_version, leaders_version, body
        self._topics_bytes += len(body) + ANSWER_OVERHEAD_BYTES
        return body


_caches: WeakKeyDictionary[Image, _Cache] = WeakKeyDictionary()


async def handle(context: RequestContext, request: MetadataRequest) -> EncodedBody:
    """Answer from the image, after creating missing topics where allowed."""
    services = context.services
    topics = _topics_of(context.api_version, request)
    errors: dict[str, int] = {}
    if topics and services.kafka.auto_create_topics and request.allow_auto_topic_creation:
        errors = await _create_missing(services, topics)
    if topics:
        await _wait_opened(services, topics)
    if topics is None or topics:
        await services.elections.wait(None if topics is None else _known_ids(services.controller.image, topics))
    question = _Question(
        context.api_version,
        topics,
        request.include_cluster_authorized_operations,
        request.include_topic_authorized_operations,
        services.named_controller,
    )
    image, cache = await _at_hand(services, question)
    body = cache.get(image.placement_version, question)
    if body is None or errors:
        body = _answer(image, cache, question, errors)
        if not errors:
            cache.put(image.placement_version, question, body)
    return EncodedBody(body)


def _topics_of(version: int, request: MetadataRequest) -> tuple[_WantedTopics, ...] | None:
    topics = request.topics
    if topics is None or (not topics and version == 0):
        return None
    return tuple(dict.fromkeys(_WantedTopics(topic.name, _id_bytes(topic.topic_id)) for topic in topics))


def _id_bytes(value: uuid.UUID | None) -> bytes:
    return value.bytes if value is not None else b""


def _known_ids(image: Image, wanted: Iterable[_WantedTopics]) -> list[bytes]:
    """Return the ids of those topics that exist."""
    found = (topic_id if name is None else image.topic_ids.get(name, b"") for name, topic_id in wanted)
    return [each for each in found if each in image.topics]


# --- creating ------------------------------------------------------------------------------------------------------


async def _create_missing(services: Services, wanted: tuple[_WantedTopics, ...]) -> dict[str, int]:
    """Create the missing topics; return the error codes of those that could not be created."""
    errors: dict[str, int] = {}
    try:
        async with asyncio.timeout(CREATE_TIMEOUT_S):
            for name, _ in wanted:
                if name is not None and is_legal_name(name) and services.controller.image.topic(name) is None:
                    errors[name] = LEADER_NOT_AVAILABLE  # in case of a time-out before the controller answers
                    errors[name] = await _create(services, name)
    except TimeoutError:
        logger.warning(
            "topics could not be created in time", extra={"topics": [name for name, code in errors.items() if code]}
        )
    return {name: code for name, code in errors.items() if code}


async def _create(services: Services, name: str) -> int:
    internal = planned_topic(name, services.group)
    _, partitions, configs = internal or PlannedTopic(name, services.kafka.num_partitions, {})
    try:
        await services.controller.create_topic(name, partitions, dict(configs), internal=internal is not None)
    except TidelogError as error:
        if error.kafka_code == TOPIC_ALREADY_EXISTS:
            return 0
        return LEADER_NOT_AVAILABLE if error.retriable else error.kafka_code
    return 0


def is_legal_name(name: str) -> bool:
    """Return whether Kafka allows a topic of this name."""
    return name not in (".", "..") and _LEGAL_NAME.fullmatch(name) is not None


# --- waiting ------------------------------------------------------------------------------------------------------


class _Unopened:
    """Until when requests wait for partitions that were never opened, from the first request that named them on."""

    def __init__(self) -> None:
        self._until: dict[PartitionKey, float] = {}

    def named(self, image: Image, wanted: Iterable[_WantedTopics], now: float) -> tuple[list[PartitionKey], float]:
        """Return those of the topics to wait for, and the end of that (monotonic seconds)."""
        found: list[PartitionKey] = []
        end = now
        for name, topic_id in wanted:
            wanted_id = topic_id if name is None else image.topic_ids.get(name, b"")
            for index in image.index.unopened.get(wanted_id, ()):
                key = wanted_id, index
                partition = image.partition(*key)
                if partition is None or image.leader(partition)[0] < 0:
                    continue
                until = self._until.setdefault(key, now + OPENING_WAIT_S)
                if until > now:
                    found.append(key)
                    end = max(end, until)
        return found, end

    def forget_opened(self, image: Image) -> None:
        """Drop what is open or gone."""
        for key in [key for key in self._until if not is_unopened(image, key)]:
            del self._until[key]


def is_unopened(image: Image, key: PartitionKey) -> bool:
    """Whether a partition exists and was never opened."""
    return key[1] in image.index.unopened.get(key[0], ())


_unopened: WeakKeyDictionary[Image, _Unopened] = WeakKeyDictionary()


async def _wait_opened(services: Services, wanted: tuple[_WantedTopics, ...]) -> None:
    """Wait until the named partitions have been opened once, within the bound."""
    image, now = services.controller.image, services.clock.monotonic()
    if not image.index.unopened:
        return
    unopened = _unopened.setdefault(image, _Unopened())
    pending, end = unopened.named(image, wanted, now)
    if not pending:
        return
    opened = asyncio.Event()

    def changed(_delta: Delta) -> None:
        while pending and not is_unopened(image, pending[-1]):
            pending.pop()
        if not pending:
            opened.set()

    remove = services.controller.subscribe(changed)
    try:
        async with asyncio.timeout(end - now):
            await opened.wait()
    except TimeoutError:
        logger.info("partitions are not open yet", extra={"count": len(pending)})
    finally:
        remove()
        unopened.forget_opened(image)


# --- answering -----------------------------------------------------------------------------------------------------


async def _at_hand(services: Services, question: _Question) -> tuple[Image, _Cache]:
    """Return the image and its cache, which has what the answer needs, unless leaders change all the time."""
    for _ in range(MAX_AHEAD):
        image = services.controller.image
        cache, version = _caches.setdefault(image, _Cache()), image.placement_version
        if cache.get(version, question) is None:
            await in_turns(_encode_ahead(image, cache, question))
        if services.controller.image is image and image.placement_version == version:
            return image, cache
    image = services.controller.image
    return image, _caches.setdefault(image, _Cache())


def _encode_ahead(image: Image, cache: _Cache, question: _Question) -> Steps[None]:
    wanted = list(image.topics) if question.topics is None else _known_ids(image, question.topics)
    done = 0
    for topic_id in wanted:
        record = image.topics.get(topic_id)
        if record is None:  # it was deleted meanwhile
            continue
        done += 1
        if not cache.has(image, question, record):
            cache.topic(image, question, record)
            done += record.partitions
        if done >= STEP_PARTITIONS:
            done = 0
            yield


def _answer(image: Image, cache: _Cache, question: _Question, errors: dict[str, int]) -> bytes:
    alive = sorted((broker for broker in image.brokers.values() if broker.alive), key=lambda broker: broker.id)
    if question.topics is None:
        records = sorted(image.topics.values(), key=lambda topic: topic.name)
        topics = [cache.topic(image, question, record) for record in records]
    else:
        topics = [_find(image, cache, question, wanted, errors) for wanted in question.topics]
    without_topics = MetadataResponse(
        brokers=[
            MetadataResponseBroker(
                node_id=broker.id,
                host=broker.host,
                port=broker.port,
                rack=broker.rack or None,
            )
            for broker in alive
        ],
        cluster_id=image.cluster_id or None,
        controller_id=question.controller_id,
        cluster_authorized_operations=_CLUSTER_OPERATIONS if question.cluster_operations else _NOT_ASKED,
    )
    return join(question.version, encode_body(MetadataRequest.API_KEY, question.version, without_topics), topics)


def _find(image: Image, cache: _Cache, question: _Question, wanted: _WantedTopics, errors: dict[str, int]) -> bytes:
    if wanted.name is None:
        record = image.topics.get(wanted.topic_id)
        if record is None:
            return _missing(question, wanted, UNKNOWN_TOPIC_ID)
        return cache.topic(image, question, record)
    record = image.topic(wanted.name)
    if record is not None:
        return cache.topic(image, question, record)
    if not is_legal_name(wanted.name):
        return _missing(question, wanted, INVALID_TOPIC_EXCEPTION)
    return _missing(question, wanted, errors.get(wanted.name, UNKNOWN_TOPIC_OR_PARTITION))


def _missing(question: _Question, wanted: _WantedTopics, error_code: int) -> bytes:
    name = wanted.name
    if name is None and question.version < 12:
        name = ""  # v12 introduced null names
    return encode_topic(
        question.version,
        error_code=error_code,
        name=name,
        topic_id=wanted.topic_id,
        is_internal=False,
        partitions=(),
        authorized_operations=_NOT_ASKED,
    )


def _topic(image: Image, question: _Question, record: TopicRecord) -> bytes:
    return encode_topic(
        question.version,
        error_code=0,
        name=record.name,
        topic_id=record.id,
        is_internal=record.internal,
        partitions=[_partition(image, partition) for partition in image.partitions(record.id)],
        authorized_operations=_TOPIC_OPERATIONS if question.topic_operations else _NOT_ASKED,
    )


def _partition(image: Image, record: PartitionRecord) -> PartitionPart:
    leader, epoch = image.announced_leader(record)
    return PartitionPart(
        0 if leader >= 0 else LEADER_NOT_AVAILABLE, record.index, leader, epoch, *replicas_of(image, record)
    )


APIS = [serve(MetadataRequest, 0, 13, handle)]
