"""Topics with records of several sizes, whose content follows from topic, partition and offset.

Producers and consumers are processes of their own, and tell the digest of each partition: nothing is kept.

    python -m tests.support.mixed_load produce|consume JSON     prints a JSON list of digests, by partition

Entry: `MixedTopic`, `produce`, `consume`.
"""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.support.digests import NUMBER_BYTES, Digest

ROOT = Path(__file__).resolve().parents[2]
BEGAN_MS = 1_700_000_000_000
RUN = 200
"""Records that one partition gets before the next one."""
FILLERS = 64
RETRY_S = 0.5
IDLE_S = 120.0
"""A consumer or producer gives up when nothing comes or is acknowledged for so long."""


@dataclass(frozen=True)
class MixedTopic:
    """A topic whose records have about `value_bytes`; `counts` are those of its partitions."""

    name: str
    value_bytes: int
    compression: str
    counts: tuple[int, ...]
    seed: int = 0

    @classmethod
    def of_bytes(
        cls, name: str, value_bytes: int, compression: str, partitions: int, total_bytes: float, seed: int = 0
    ) -> MixedTopic:
        """A topic of about so many bytes; its partitions are not equally long."""
        records = total_bytes / value_bytes
        weights = range(partitions, 2 * partitions)
        return cls(name, value_bytes, compression, tuple(int(records * w / sum(weights)) + 1 for w in weights), seed)


class Content:
    """The records of a topic."""

    def __init__(self, topic: MixedTopic) -> None:
        rng = random.Random(f"{topic.name} {topic.seed}")
        size = topic.value_bytes - NUMBER_BYTES
        self._fillers = [rng.randbytes(size // 2 + 1).hex().encode()[:size] for _ in range(FILLERS)]

    def key(self, offset: int) -> bytes | None:
        """None for some."""
        return b"k%d" % offset if offset % 5 else None

    def value(self, partition: int, offset: int) -> bytes | None:
        """None for a few."""
        if offset % 101 == 7:
            return None
        return b"%016x" % offset + self._fillers[(offset * 31 + partition) % FILLERS]

    def headers(self, offset: int) -> list[tuple[str, bytes | None]]:
        """None, one, or two, of which one has no value."""
        found: list[tuple[str, bytes | None]] = [("h", b"%d" % offset), ("empty", None)]
        return found[: offset % 3]


def _produce(bootstrap: str, topic: MixedTopic) -> list[Digest]:
    content, digests = Content(topic), [Digest() for _ in topic.counts]
    failed: list[str] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(str(error))

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "log_level": 0,
            "enable.idempotence": True,
            "linger.ms": 20,
            "batch.size": 1_000_000,
            "compression.type": topic.compression,
            "queue.buffering.max.kbytes": 65_536,
            "delivery.report.only.error": True,
        }
    )
    for first in range(0, max(topic.counts), RUN):
        for partition, count in enumerate(topic.counts):
            for offset in range(first, min(first + RUN, count)):
                key, value, headers = content.key(offset), content.value(partition, offset), content.headers(offset)
                while True:
                    try:
                        producer.produce(
                            topic.name,
                            partition=partition,
                            key=key,
                            value=value,
                            headers=[*headers],
                            timestamp=BEGAN_MS + offset,
                            on_delivery=delivered,
                        )
                        break
                    except BufferError:
                        producer.poll(0.1)
                digests[partition].add(offset, BEGAN_MS + offset, key, value, headers)
        producer.poll(0)
        assert not failed, failed[:3]
    assert producer.flush(IDLE_S) == 0 and not failed, failed[:3]
    return digests


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    found: Any = message.headers() or []  # the stubs say less than there is
    return list(found)


def _span(consumer: Consumer, place: TopicPartition) -> tuple[int, int]:
    """The first offset and the end; librdkafka takes a partition whose only broker is dead for one that is unknown."""
    deadline_s = time.monotonic() + IDLE_S
    while True:
        try:
            low, high = consumer.get_watermark_offsets(place, timeout=IDLE_S)
        except KafkaException as error:
            if time.monotonic() >= deadline_s:
                raise AssertionError(f"{place} has no leader for {IDLE_S:g} s") from error
            time.sleep(RETRY_S)
        else:
            return low, high


def _consume(bootstrap: str, topic: str, partitions: int) -> list[Digest]:
    """Read all that the partitions have now."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "digests", "enable.auto.commit": False, "check.crcs": True}
    )
    digests = [Digest() for _ in range(partitions)]
    places = [TopicPartition(topic, at, OFFSET_BEGINNING) for at in range(partitions)]
    ends = [_span(consumer, each) for each in places]
    left = sum(high - low for low, high in ends)
    consumer.assign(places)
    heard_s = time.monotonic()
    while left:
        for message in consumer.consume(5_000, 1.0):
            assert message.error() is None, message.error()
            at, offset = message.partition(), message.offset()
            assert at is not None and offset is not None
            digests[at].add(offset, message.timestamp()[1], message.key(), message.value(), _headers(message))
            left -= 1
            heard_s = time.monotonic()
        assert time.monotonic() - heard_s < IDLE_S, f"nothing came for {IDLE_S:g} s; {left} records are left"
    consumer.close()
    return digests


class DigestProcess:
    """A producer or consumer in a process of its own."""

    def __init__(self, action: str, **given: object) -> None:
        command = [sys.executable, "-m", "tests.support.mixed_load", action, json.dumps(given)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def result(self) -> list[Digest]:
        """Wait for its digests. Raises `AssertionError`."""
        out, _ = self._process.communicate()
        assert self._process.returncode == 0, f"ended with {self._process.returncode}"
        return [Digest(**each) for each in json.loads(out)]

    def kill(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def produce(bootstrap: str, topics: Sequence[MixedTopic], at_once: int = 2) -> dict[str, list[Digest]]:
    """Have each topic produced by a process, so many at a time; return what was acknowledged."""
    found: dict[str, list[Digest]] = {}
    left = list(topics)
    running: list[tuple[MixedTopic, DigestProcess]] = []
    try:
        while left or running:
            while left and len(running) < at_once:
                topic = left.pop(0)
                running.append((topic, DigestProcess("produce", bootstrap=bootstrap, topic=asdict(topic))))
            topic, process = running[0]
            found[topic.name] = process.result()
            running.pop(0)
    finally:
        for _, process in running:
            process.kill()
    return found


def consume(bootstrap: str, topic: str, partitions: int) -> list[Digest]:
    """Have a topic read by a process."""
    process = DigestProcess("consume", bootstrap=bootstrap, topic=topic, partitions=partitions)
    try:
        return process.result()
    finally:
        process.kill()


def main() -> None:
    """See the module."""
    gc.disable()
    given = json.loads(sys.argv[2])
    if sys.argv[1] == "produce":
        topic = given["topic"]
        found = _produce(given["bootstrap"], MixedTopic(**{**topic, "counts": tuple(topic["counts"])}))
    else:
        found = _consume(**given)
    print(json.dumps([asdict(each) for each in found]))


if __name__ == "__main__":
    main()
