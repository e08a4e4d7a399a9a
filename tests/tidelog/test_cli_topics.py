"""`tidelog topic` and `tidelog group` against a real `tidelog up`."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.cli import NO_REBALANCE_DELAY, Cli, until
from tests.support.tidelog_process import running

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("cli") / "data", NO_REBALANCE_DELAY) as process:
        yield Cli(process.bootstrap)


# --- topics ------------------------------------------------------------------------------------------------------


def test_a_topic_is_created_listed_and_described(cli: Cli) -> None:
    made = cli("topic", "create", "born", "--partitions", 3, "--config", "retention.ms=86400000")
    assert made.text == "created born: 3 partitions\n"
    assert ["born", "3"] in cli("topic", "list").rows()
    [topic] = cli("topic", "describe", "born", "--format", "json").json()
    assert topic["name"] == "born"
    assert topic["configs"] == {"retention.ms": "86400000"}
    assert [one["partition"] for one in topic["partitions"]] == [0, 1, 2]
    assert all(
        one["leader"] == 1 and one["log_start_offset"] == one["high_watermark"] == 0 for one in topic["partitions"]
    )
    shown = cli("topic", "describe", "born").text
    assert "retention.ms=86400000" in shown
    assert "HIGH-WATERMARK" in shown
    assert ["0", "1", "1", "0", "0", "1", "1"] in cli("topic", "describe", "born").rows()
    assert topic["partitions"][0]["replicas"] == topic["partitions"][0]["in_sync"] == [1]
    assert "max.message.bytes" in cli("topic", "describe", "born", "--configs").text


def test_the_log_compaction_of_compacted_topics_is_described(cli: Cli) -> None:
    cli("topic", "create", "latest", "--partitions", 2, "-c", "cleanup.policy=compact,delete")
    [topic] = cli("topic", "describe", "latest", "--format", "json").json()
    assert [(one["dirty_ratio"], one["last_cleaned_ms"], one["problem"]) for one in topic["partitions"]] == [
        (0.0, None, None)
    ] * 2
    shown = cli("topic", "describe", "latest")
    assert "DIRTY  COMPACTED" in shown.text
    assert ["0", "1", "1", "0", "0", "1", "1", "0%", "never"] in shown.rows()


def test_a_replication_factor_that_no_replica_set_gives_is_refused_with_the_largest(cli: Cli) -> None:
    refused = cli("topic", "create", "wide", "--replication-factor", 3, code=2).err
    assert "the largest replica set that takes partitions has 1" in refused
    cli("topic", "create", "narrow", "-r", 1)


def test_a_topic_that_exists_is_an_error_unless_it_may(cli: Cli) -> None:
    cli("topic", "create", "twice", "-p", 2)
    assert "--if-not-exists" in cli("topic", "create", "twice", code=4).err
    [one] = cli("topic", "create", "twice", "--if-not-exists", "--format", "json").json()
    assert one == {"name": "twice", "created": False, "partitions": 2}


def test_of_several_topics_those_that_exist_are_described(cli: Cli) -> None:
    cli("topic", "create", "there", "there-too")
    for names in (["there", "gone", "there-too"], ["gone", "there", "there-too", "away"]):
        result = cli("topic", "describe", *names, "--format", "json", code=3)
        assert [one["name"] for one in result.json()] == ["there", "there-too"]
        assert "topic 'gone' does not exist" in result.err
    assert cli("topic", "describe", "gone", "away", "--format", "json", code=3).out == b""


def test_of_several_groups_those_that_exist_are_described(cli: Cli) -> None:
    cli("topic", "create", "read-by-one", "-p", 1)
    cli("group", "reset-offsets", "one-of-two", "--topic", "read-by-one", "--to-earliest")
    result = cli("group", "describe", "no-group", "one-of-two", "--format", "json", code=3)
    assert [one["group"] for one in result.json()] == ["one-of-two"]
    assert "group 'no-group' does not exist" in result.err
    assert cli("group", "describe", "no-group", "--format", "json", code=3).out == b""


def test_several_names_are_worked_through_and_the_first_failure_counts(cli: Cli) -> None:
    cli("topic", "create", "several")
    result = cli("topic", "create", "several", "bad name", "several-2", code=4)
    assert "several-2" in result.text
    assert "bad name" in result.err


@pytest.mark.parametrize(
    "arguments", [["bad name"], ["x", "-c", "retention.mss=1"], ["x", "-c", "retention.ms=soon"]], ids=" ".join
)
def test_what_cannot_be_created_is_wrong_input(cli: Cli, arguments: list[str]) -> None:
    assert cli("topic", "create", *arguments, code=2).err.startswith("error: ")


def test_partitions_only_grow_and_configs_change_both_ways(cli: Cli) -> None:
    cli("topic", "create", "alters", "-p", 1, "-c", "retention.ms=1000")
    document = cli("topic", "alter", "alters", "-p", 4, "-c", "segment.bytes=1048576", "--format", "json").json()
    assert document == {
        "name": "alters",
        "partitions": 4,
        "configs": {"retention.ms": "1000", "segment.bytes": "1048576"},
    }
    changed = cli("topic", "alter", "alters", "--delete-config", "retention.ms").text
    assert changed == "altered alters: 4 partitions, segment.bytes=1048576\n"
    assert "only grow" in cli("topic", "alter", "alters", "-p", 2, code=2).err
    cli("topic", "alter", "alters", "-c", "no.such=1", code=2)


def test_configs_that_were_altered_are_told_where_the_partitions_are_refused(cli: Cli) -> None:
    cli("topic", "create", "alters-half", "-p", 2, "-c", "segment.bytes=1048576")
    both = ("-c", "retention.ms=1000", "--delete-config", "segment.bytes")
    refused = cli("topic", "alter", "alters-half", "-p", 1, *both, code=2).err
    assert "only the configs of topic 'alters-half' were altered: retention.ms, segment.bytes" in refused
    assert "only grow" in refused
    [topic] = cli("topic", "describe", "alters-half", "--format", "json").json()
    assert topic["configs"] == {"retention.ms": "1000"} and len(topic["partitions"]) == 2
    assert "only the configs" not in cli("topic", "alter", "alters-half", "-p", 1, code=2).err


def test_unknown_topics_suggest_the_nearest_name(cli: Cli) -> None:
    cli("topic", "create", "payments")
    for command in (
        ["topic", "describe", "paymets"],
        ["topic", "alter", "paymets", "-p", "9"],
        ["topic", "delete", "paymets", "-y"],
        ["produce", "paymets"],
        ["consume", "paymets", "--exit"],
        ["group", "reset-offsets", "g", "--topic", "paymets", "--to-latest"],
    ):
        assert "did you mean 'payments'?" in cli(*command, code=3).err


def test_deleting_asks_and_takes_the_records_with_it(cli: Cli) -> None:
    cli("topic", "create", "goes", "-p", 1)
    assert "add --yes" in cli("topic", "delete", "goes", code=2).err
    assert cli("topic", "delete", "goes", "nowhere", "--yes", code=3).text == "deleted goes\n"
    cli("topic", "describe", "goes", code=3)


def test_internal_topics_are_listed_on_demand(cli: Cli) -> None:
    cli("topic", "create", "grouped", "-p", 1)
    cli("produce", "grouped", stdin=b"x\n")
    cli("consume", "grouped", "--group", "internals", "--from-beginning", "-n", 1, "--timeout", 30)
    assert "__consumer_offsets" not in cli("topic", "list").text
    listed = cli("topic", "list", "--internal", "--format", "json").json()
    assert {one["name"] for one in listed if one["internal"]} == {"__consumer_offsets"}


# --- groups ------------------------------------------------------------------------------------------------------


def test_a_group_shows_its_members_and_lag_and_resets_when_they_are_gone(cli: Cli) -> None:
    cli("topic", "create", "work", "-p", 2)
    cli("produce", "work", "-p", 0, stdin=b"a\nb\nc\nd\n")
    cli("produce", "work", "-p", 1, stdin=b"e\n")
    member = cli.start("consume", "work", "--group", "workers", "--from-beginning", "--format", "json")
    try:
        assert member.stdout is not None
        for _ in range(5):
            assert member.stdout.readline()
        [group] = cli("group", "describe", "workers", "--format", "json").json()
        assert group["state"] == "stable"
        [one] = group["members"]
        assert one["client_id"] == "tidelog-cli"
        assert one["assignment"] == [{"topic": "work", "partition": 0}, {"topic": "work", "partition": 1}]
        assert "is active" in cli("group", "reset-offsets", "workers", "-t", "work", "--to-latest", code=5).err
        assert "not empty" in cli("group", "delete", "workers", code=5).err
        assert cli("group", "list", "--state", "stable").rows() == [["workers", "stable"]]
    finally:
        member.send_signal(signal.SIGTERM)
        _, errors = member.communicate(timeout=30)
    assert (member.returncode, errors) == (0, b"")

    cli("produce", "work", "-p", 0, stdin=b"f\ng\n")
    [group] = cli("group", "describe", "workers", "--format", "json").json()
    assert (group["state"], group["members"]) == ("empty", [])
    lags = [(one["partition"], one["committed"], one["high_watermark"], one["lag"]) for one in group["partitions"]]
    assert lags == [(0, 4, 6, 2), (1, 1, 1, 0)]

    reset = ["group", "reset-offsets", "workers", "--topic", "work"]
    assert cli(*reset, "--shift-by", -3, "--dry-run").rows()[:2] == [["work", "0", "4", "1"], ["work", "1", "1", "0"]]
    assert cli(*reset, "--to-offset", 2).rows() == [["work", "0", "4", "2"], ["work", "1", "1", "1"]]
    assert cli(*reset, "-p", 0, "--to-earliest").rows() == [["work", "0", "2", "0"]]
    assert cli(*reset, "--to-datetime", "2001-01-01T00:00:00Z").rows() == [
        ["work", "0", "0", "0"],
        ["work", "1", "1", "0"],
    ]
    assert cli(*reset, "--to-latest").rows() == [["work", "0", "0", "6"], ["work", "1", "0", "1"]]
    document = cli(*reset, "--shift-by", -1, "--format", "json").json()
    assert [(one["before"], one["after"]) for one in document["partitions"]] == [(6, 5), (1, 0)]
    again = cli("consume", "work", "--group", "workers", "--exit")
    assert sorted(again.text.split()) == ["e", "g"]

    assert cli("group", "delete", "workers").text == "deleted workers\n"
    assert "workers" not in cli("group", "list").text


def test_a_group_that_does_not_exist_suggests_the_nearest_name(cli: Cli) -> None:
    cli("topic", "create", "seen", "-p", 1)
    cli("group", "reset-offsets", "readers", "--topic", "seen", "--to-latest")
    assert "did you mean 'readers'?" in cli("group", "describe", "reader", code=3).err
    assert "did you mean 'readers'?" in cli("group", "delete", "reader", code=3).err
    assert "no committed offset" in cli(
        "group", "reset-offsets", "unborn", "--topic", "seen", "--shift-by", 1, code=2
    ).err  # fmt: skip


def test_watching_shows_it_again_until_ctrl_c(cli: Cli) -> None:
    cli("topic", "create", "watched", "-p", 1)
    watching = cli.start("topic", "describe", "watched", "--format", "json", "--watch", "0.1")
    try:
        assert watching.stdout is not None
        assert b'"high_watermark": 0' in watching.stdout.readline()
        cli("produce", "watched", stdin=b"x\n")
        out = watching.stdout
        until(lambda: b'"high_watermark": 1' in out.readline())
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=30)
    assert watching.returncode == 0


@pytest.mark.parametrize("partitions", [100_001, 1 << 31, 1 << 70])
def test_more_partitions_than_a_client_can_ask_for_are_wrong_input(cli: Cli, partitions: int) -> None:
    assert "partitions" in cli("topic", "create", "huge", "-p", partitions, code=2).err
    cli("topic", "create", "grows", "--if-not-exists")
    assert "partitions" in cli("topic", "alter", "grows", "-p", partitions, code=2).err


def test_settings_that_are_accepted_and_not_served_are_warned_of(cli: Cli) -> None:
    warned = cli("topic", "create", "warned", "-c", "flush.ms=5")
    assert warned.err == "warning: accepted, but not served yet: flush.ms=5\n"
    assert "flush.messages=5" in cli("topic", "alter", "warned", "-c", "flush.messages=5").err
    assert cli("topic", "alter", "warned", "-c", "cleanup.policy=compact").err == ""
    assert cli("topic", "alter", "warned", "-c", "retention.ms=5").err == ""
