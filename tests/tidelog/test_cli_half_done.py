"""Commands of several parts, of which one is refused: what was done is told, and the others are not given up."""

from __future__ import annotations

import json
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicPartition

from tidelog.cli.client import ClusterConnection, PartitionOffsets
from tidelog.cli.main import cli
from tidelog.runtime.errors import NotFound, Unavailable


def ended(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


class PartlyRefusing:
    """An admin client: partitions 1 and 2 take no offsets, there is no group `gone`, and no list of groups."""

    def __init__(self) -> None:
        self.refused = {1, 2}
        self.created: list[str] = []

    def describe_consumer_groups(self, names: list[str], **_: Any) -> dict[str, Future[Any]]:
        return {name: ended(SimpleNamespace(state=ConsumerGroupState.EMPTY, members=[])) for name in names}

    def list_consumer_group_offsets(self, groups: list[Any], **_: Any) -> dict[str, Future[Any]]:
        return {groups[0].group_id: ended(SimpleNamespace(topic_partitions=[TopicPartition("t", 0, 3)]))}

    def alter_consumer_group_offsets(self, groups: list[Any], **_: Any) -> dict[str, Future[Any]]:
        error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        found = [
            SimpleNamespace(topic=each.topic, partition=each.partition, error=self._error(each.partition, error))
            for each in groups[0].topic_partitions
        ]
        return {groups[0].group_id: ended(SimpleNamespace(topic_partitions=found))}

    def _error(self, partition: int, error: KafkaError) -> KafkaError | None:
        return error if partition in self.refused else None

    def delete_consumer_groups(self, names: list[str], **_: Any) -> dict[str, Future[Any]]:
        gone = KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND))
        return {name: ended(gone if name == "gone" else None) for name in names}

    def list_consumer_groups(self, **_: Any) -> Future[Any]:
        return ended(KafkaException(KafkaError(KafkaError.REQUEST_TIMED_OUT)))

    def create_topics(self, topics: list[Any], **_: Any) -> dict[str, Future[Any]]:
        self.created += [each.topic for each in topics]
        return {each.topic: ended(None) for each in topics}


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> PartlyRefusing:
    client = PartlyRefusing()
    span = PartitionOffsets(0, 9, 1)
    monkeypatch.setattr(ClusterConnection, "admin", client)
    monkeypatch.setattr(ClusterConnection, "topics", lambda _, names: {name: [0, 1, 2] for name in names})
    monkeypatch.setattr(ClusterConnection, "offsets", lambda _, places: dict.fromkeys(places, span))
    return client


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--bootstrap", "127.0.0.1:1"])


def test_the_partitions_that_were_reset_are_told_and_all_that_were_not(admin: PartlyRefusing) -> None:
    reset = ("group", "reset-offsets", "g", "--topic", "t", "--to-latest")
    done = invoke(*reset, "--format", "json")
    assert done.exit_code == NotFound.exit_code
    assert [(one["partition"], one["before"], one["after"]) for one in json.loads(done.stdout)["partitions"]] == [
        (0, 3, 9)
    ]
    assert "cannot reset t [1]" in done.stderr and "cannot reset t [2]" in done.stderr
    admin.refused.add(0)
    done = invoke(*reset)
    assert (done.exit_code, done.stdout) == (NotFound.exit_code, "")


def test_groups_that_were_deleted_are_told_although_the_others_cannot_be_listed(admin: PartlyRefusing) -> None:
    done = invoke("group", "delete", "one", "gone", "two")
    assert done.exit_code == NotFound.exit_code, done.exception
    assert done.stdout == "deleted one\ndeleted two\n"
    assert "group 'gone'" in done.stderr


def test_topics_that_were_created_are_told_although_one_is_not_seen(
    admin: PartlyRefusing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def topics(_: ClusterConnection, names: list[str]) -> dict[str, list[int]]:
        if names == ["unseen"]:
            raise Unavailable("no broker can be reached")
        return {name: [0] for name in names}

    monkeypatch.setattr(ClusterConnection, "topics", topics)
    done = invoke("topic", "create", "one", "unseen", "two")
    assert done.exit_code == Unavailable.exit_code
    assert admin.created == ["one", "unseen", "two"]
    assert done.stdout == "created one: 1 partition\ncreated two: 1 partition\n"
    assert "topic 'unseen' was created" in done.stderr


def test_moves_that_were_accepted_are_told_although_others_could_not_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, posts = 1_500, []

    def post(_: ClusterConnection, _path: str, body: Any) -> Any:
        posts.append(len(body["moves"]))
        if len(posts) > 1:
            raise Unavailable("the admin HTTP cannot be reached")
        return {"results": [{**one, "error": None} for one in body["moves"]]}

    def get(_: ClusterConnection, _path: str) -> Any:
        return {"partitions": [{"topic": "t", "partition": each, "broker": 1, "to": None} for each in range(count)]}

    monkeypatch.setattr(ClusterConnection, "post", post)
    monkeypatch.setattr(ClusterConnection, "get", get)
    places = [f"t:{each}" for each in range(count)]
    done = invoke("partition", "move", *places, "--to", "2", "--no-wait", "--format", "json")
    assert done.exit_code == Unavailable.exit_code, done.exception
    assert len(json.loads(done.stdout)) == posts[0] < count
    assert f"{count - posts[0]} partitions were not asked for, or not answered" in done.stderr
