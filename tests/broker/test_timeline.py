"""The timeline of a cluster: what changed between two looks at the metadata."""

from __future__ import annotations

from typing import Any

from tidelog.broker.telemetry.timeline import MAX_EVENTS, MERGE_S, BrokerView, LeaderView, MoveView, Timeline

ALIVE, DEAD = BrokerView(True, False), BrokerView(False, False)
ONE, TWO = (b"t", 1), (b"t", 2)


def kinds(timeline: Timeline) -> list[str]:
    return [event["kind"] for event in timeline.report(0.0)["events"]]


def begun() -> Timeline:
    timeline = Timeline()
    timeline.look(0.0, 1_000, {1: ALIVE, 2: ALIVE}, {1: LeaderView(1, 1), 2: LeaderView(2, 1)})
    return timeline


def test_the_first_look_tells_nothing() -> None:
    found = begun().report(0.0)
    assert (found["events"], found["since_ms"]) == ([], 1_000)


def test_a_death_and_the_election_after_it_are_told_with_the_time_without_a_leader() -> None:
    timeline = begun()
    timeline.look(10.0, 11_000, {1: ALIVE, 2: DEAD}, {1: LeaderView(1, 1), 2: LeaderView(-1, 1)})
    assert timeline.report(10.5)["leaderless"] == [{"replica_set": 2, "for_ms": 500}]
    timeline.look(11.25, 12_250, {1: ALIVE, 2: DEAD}, {1: LeaderView(1, 1), 2: LeaderView(1, 2)})
    found = timeline.report(12.0)
    assert [event["kind"] for event in found["events"]] == ["elected", "leader lost", "broker dead"]
    elected = found["events"][0]
    assert (elected["broker"], elected["master_epoch"], elected["stall_ms"]) == (1, 2, 1250.0)
    assert found["leaderless"] == []


def test_a_handover_without_a_gap_has_no_stall() -> None:
    timeline = begun()
    timeline.look(1.0, 2_000, {1: ALIVE, 2: ALIVE}, {1: LeaderView(1, 1), 2: LeaderView(1, 2)})
    (event,) = timeline.report(1.0)["events"]
    assert (event["kind"], event["stall_ms"], event["from"]) == ("elected", None, 2)


def test_drains_joins_and_removals_are_told() -> None:
    timeline = begun()
    leaders = {1: LeaderView(1, 1), 2: LeaderView(2, 1)}
    timeline.look(1.0, 2_000, {1: ALIVE, 2: BrokerView(True, True), 3: ALIVE}, leaders)
    timeline.look(2.0, 3_000, {1: ALIVE, 3: ALIVE}, {1: LeaderView(1, 1)})
    assert kinds(timeline) == ["broker removed", "broker joined", "drain began"]


def test_moves_between_the_same_brokers_are_one_event_and_the_end_of_a_move_tells_how_it_ended() -> None:
    timeline = begun()
    timeline.partitions(1.0, 2_000, [(ONE, MoveView("t:1", 1, 2)), (TWO, MoveView("t:2", 1, 2))])
    timeline.partitions(2.0, 3_000, [(ONE, MoveView("t:1", 2, -1))])
    timeline.partitions(3.0, 4_000, [(TWO, MoveView("t:2", 1, -1))])
    found = timeline.report(3.0)
    rows = [(event["kind"], event["partitions"], event["from"], event["to"]) for event in found["events"]]
    assert rows == [("move cancelled", 1, 1, 2), ("moved", 1, 1, 2), ("move began", 2, 1, 2)]
    assert found["moving"] == 0
    timeline.partitions(3.0 + MERGE_S, 9_000, [(ONE, MoveView("t:1", 2, 1))])
    timeline.partitions(3.1 + MERGE_S, 9_100, [(ONE, None)])
    assert kinds(timeline)[0] == "move began", "a deleted topic's move did not end"


def test_a_drain_of_many_partitions_pushes_nothing_out() -> None:
    timeline = begun()
    timeline.look(0.5, 1_500, {1: ALIVE, 2: BrokerView(True, True)}, {1: LeaderView(1, 1), 2: LeaderView(2, 1)})
    for number in range(5_000):
        key = (b"t", number)
        at = 1.0 + number * 0.001
        timeline.partitions(at, 0, [(key, MoveView(f"t:{number}", 2, 1))])
        timeline.partitions(at, 0, [(key, MoveView(f"t:{number}", 1, -1))])
    found: list[dict[str, Any]] = timeline.report(0.0)["events"]
    assert found[-1]["kind"] == "drain began"
    assert {event["kind"]: event["partitions"] for event in found[:-1]} == {"moved": 5_000, "move began": 5_000}


def test_only_the_newest_events_are_kept() -> None:
    timeline = begun()
    for number in range(200):
        views = {1: ALIVE, 2: DEAD if number % 2 == 0 else ALIVE}
        timeline.look(float(number), number, views, {1: LeaderView(1, 1)})
    events = timeline.report(0.0)["events"]
    assert len(events) == MAX_EVENTS
    assert events[0]["at_ms"] == 199
