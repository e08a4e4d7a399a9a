"""Metadata (3): brokers, topics, leaders, from the local image.

Null topics means all, an empty list none (v0: an empty list means all). A topic that does not exist is created if the
request allows it (before v4 it always does) and `kafka.auto_create_topics` is on. Only live brokers are listed; the
"controller" is the live broker with the smallest id, since every broker takes controller requests: all brokers give the
same answer.

Answers are cached as bytes until topics, brokers or leaders change (`Image.placement_version`), and each topic's part
of them until that topic or any leader does.

A missing topic is asked of the controller within a bound: without a controller Metadata still answers (rule 11).
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from broker.errors import (
    INVALID_TOPIC_EXCEPTION,
    LEADER_NOT_AVAILABLE,
    TOPIC_ALREADY_EXISTS,
    UNKNOWN_TOPIC_ID,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from broker.groups.offsets_topic import OFFSETS_TOPIC
from broker.groups.offsets_topic import TOPIC_CONFIGS as OFFSETS_TOPIC_CONFIGS
from broker.services import ApiHandler, RequestContext, Services
from broker.wire import schema
from broker.wire.codec import EncodedBody, encode_body
from broker.wire.metadata import PartitionPart, encode_topic, join
from runtime.errors import TidelogError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from controller.image import Image
    from controller.model import PartitionRecord, TopicRecord

API_KEY = 3
CREATE_TIMEOUT_S = 10.0
"""Clients give a Metadata request 30 s or more."""
MAX_ANSWERS_BYTES = 4 << 20
"""Whole answers kept: a few versions times a few sets of topics."""
MAX_TOPICS_BYTES = 16 << 20
"""Encoded topics kept: some 40 bytes a partition, for each version that clients speak."""
ANSWER_OVERHEAD_BYTES = 400
"""What a kept answer costs beside its bytes: question, keys, dictionary slot."""

_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_NOT_ASKED = -(1 << 31)
_TOPIC_OPERATIONS = sum(1 << bit for bit in (3, 4, 5, 6, 7, 8, 10, 11))
"""Read, write, create, delete, alter, describe, describe and alter configs: all, without an authorizer (KIP-430)."""
_CLUSTER_OPERATIONS = sum(1 << bit for bit in (5, 7, 8, 9, 10, 11, 12))


class _Wanted(NamedTuple):
    """A topic as the request names it: by name, or (v10+) by id."""

    name: str | None
    topic_id: bytes


class _Question(NamedTuple):
    """What an answer depends on, besides the image."""

    version: int
    topics: tuple[_Wanted, ...] | None
    cluster_operations: bool
    topic_operations: bool


class _Cache:
    """Encoded answers for one placement version of an image, and encoded topics for as long as they are true."""

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

    def topic(self, image: Image, question: _Question, record: TopicRecord) -> bytes:
        """A topic's part of an answer, made anew only after the topic or a leader has changed."""
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


async def handle(context: RequestContext, request: Any) -> EncodedBody:
    """Answer from the image, after creating what may be created."""
    question = _question(context.api_version, request)
    services = context.services
    errors: dict[str, int] = {}
    if question.topics and services.kafka.auto_create_topics and getattr(request, "allow_auto_topic_creation", True):
        errors = await _create_missing(services, question.topics)
    image = services.controller.image
    cache = _caches.setdefault(image, _Cache())
    body = cache.get(image.placement_version, question)
    if body is None or errors:
        body = _answer(image, cache, question, errors)
        if not errors:
            cache.put(image.placement_version, question, body)
    return EncodedBody(body)


def _question(version: int, request: Any) -> _Question:
    topics = request.topics
    wanted = None
    if topics is not None and (topics or version > 0):
        wanted = tuple(_Wanted(topic.name, _id_bytes(getattr(topic, "topic_id", None))) for topic in topics)
    return _Question(
        version,
        wanted,
        getattr(request, "include_cluster_authorized_operations", False),
        getattr(request, "include_topic_authorized_operations", False),
    )


def _id_bytes(value: uuid.UUID | None) -> bytes:
    return value.bytes if value is not None else b""


# --- creating ------------------------------------------------------------------------------------------------------


async def _create_missing(services: Services, wanted: tuple[_Wanted, ...]) -> dict[str, int]:
    """Create the topics that do not exist; the error codes of those that could not be."""
    errors: dict[str, int] = {}
    try:
        async with asyncio.timeout(CREATE_TIMEOUT_S):
            for name, _ in wanted:
                if name is not None and is_legal_name(name) and services.controller.image.topic(name) is None:
                    errors[name] = LEADER_NOT_AVAILABLE  # if the time is over before the controller answers
                    errors[name] = await _create(services, name)
    except TimeoutError:
        log.warning(
            "topics could not be created in time", extra={"topics": [name for name, code in errors.items() if code]}
        )
    return {name: code for name, code in errors.items() if code}


async def _create(services: Services, name: str) -> int:
    internal = name == OFFSETS_TOPIC
    partitions = services.group.offsets_topic_partitions if internal else services.kafka.num_partitions
    configs = dict(OFFSETS_TOPIC_CONFIGS) if internal else {}
    try:
        await services.controller.create_topic(name, partitions, configs, internal=internal)
    except TidelogError as error:
        if error.kafka_code == TOPIC_ALREADY_EXISTS:
            return 0
        return LEADER_NOT_AVAILABLE if error.retriable else error.kafka_code
    return 0


def is_legal_name(name: str) -> bool:
    """Whether Kafka allows a topic of this name."""
    return name not in (".", "..") and _LEGAL_NAME.fullmatch(name) is not None


# --- answering -----------------------------------------------------------------------------------------------------


def _answer(image: Image, cache: _Cache, question: _Question, errors: dict[str, int]) -> bytes:
    make = schema.response(API_KEY, question.version).make
    alive = sorted((broker for broker in image.brokers.values() if broker.alive), key=lambda broker: broker.id)
    if question.topics is None:
        records = sorted(image.topics.values(), key=lambda topic: topic.name)
        topics = [cache.topic(image, question, record) for record in records]
    else:
        topics = [_find(image, cache, question, wanted, errors) for wanted in question.topics]
    without_topics = make(
        "MetadataResponse",
        throttle_time=0,
        brokers=[
            make(
                "MetadataResponseBroker",
                node_id=broker.id,
                host=broker.host,
                port=broker.port,
                rack=broker.rack or None,
            )
            for broker in alive
        ],
        cluster_id=image.cluster_id or None,
        controller_id=alive[0].id if alive else -1,
        topics=[],
        cluster_authorized_operations=_CLUSTER_OPERATIONS if question.cluster_operations else _NOT_ASKED,
        error_code=0,
    )
    return join(question.version, encode_body(without_topics), topics)


def _find(image: Image, cache: _Cache, question: _Question, wanted: _Wanted, errors: dict[str, int]) -> bytes:
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


def _missing(question: _Question, wanted: _Wanted, error_code: int) -> bytes:
    name = wanted.name
    if name is None and question.version < 12:
        name = ""  # null names came with v12
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
    leader, epoch = image.leader(record)
    replica_set = image.replica_sets.get(record.replica_set)
    members = replica_set.members if replica_set is not None else ()
    in_sync = replica_set.sync_state_set if replica_set is not None else ()
    return PartitionPart(
        0 if leader >= 0 else LEADER_NOT_AVAILABLE,
        record.index,
        leader,
        epoch,
        members,
        in_sync,
        tuple(member for member in members if not _is_alive(image, member)),
    )


def _is_alive(image: Image, broker_id: int) -> bool:
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.alive


APIS = [ApiHandler(API_KEY, 0, 13, handle)]
