"""What read_committed readers see of a topic now."""

from __future__ import annotations

from confluent_kafka import Consumer, Message, TopicPartition

from tests.e2e.backends import QUIET
from tests.support.clients import DEADLINE_S, value_of


def committed_values(bootstrap: str, topic: str, partitions: int) -> list[list[str]]:
    """The values of each partition up to its last stable offset, by librdkafka."""
    return [[value_of(each).decode() for each in mine] for mine in committed_messages(bootstrap, topic, partitions)]


def committed_messages(bootstrap: str, topic: str, partitions: int) -> list[list[Message]]:
    """The messages of each partition up to its last stable offset, by librdkafka."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            **QUIET,
        }
    )
    found: list[list[Message]] = []
    try:
        for partition in range(partitions):
            consumer.assign([TopicPartition(topic, partition, 0)])
            found.append([])
            while True:
                message = consumer.poll(DEADLINE_S)
                assert message is not None, f"partition {partition} does not come to an end"
                error = message.error()
                if error is not None:
                    assert error.name() == "_PARTITION_EOF", error
                    break
                found[-1].append(message)
    finally:
        consumer.close()
    return found


def values_of_committed(count: int) -> list[str]:
    """What the programs of `tests/clients` leave of `count` transactions, each third of which they abort."""
    return [str(number) for number in range(count) if number % 3 != 2]
