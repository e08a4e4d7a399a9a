"""The balancer's planner: every plan makes things better, keeps racks apart, and comes to an end."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tidelog.controller.active.balance_picture import Picture, Piece, Target
from tidelog.controller.active.balance_plan import BalanceMeasure, CountMeasure, Plan, Racks, make_plan
from tidelog.controller.model.load import Rates
from tidelog.controller.model.records import PartitionKey
from tidelog.controller.model.settings import BalancerSettings
from tidelog.runtime.steps import at_once

SETTINGS = BalancerSettings(min_bytes_per_s=100, min_requests_per_s=10, max_moves_in_plan=1_000)
TOPICS = [bytes([number]) * 16 for number in range(3)]


def name(key: PartitionKey) -> str:
    return f"t{key[0][0]}-{key[1]}"


def plan_of(picture: Picture, limits: BalancerSettings = SETTINGS) -> Plan:
    return at_once(make_plan(picture, limits, name))


def picture_by(seed: int, *, movable: bool = False) -> Picture:
    """Drawn by a seed: hundreds of values each, which hypothesis would draw one by one."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    racks = rng.choice([[""], ["a", "b"], ["a", "b", "c"]])
    places = [Target(number, rng.choice(racks)) for number in range(count)]
    largest = rng.choice([0, 1_000, 100_000])
    crowded = rng.randint(1, count)
    pieces: list[Piece] = []
    indexes = dict.fromkeys(TOPICS, 0)
    for _ in range(rng.randint(0, 60)):
        topic = rng.choice(TOPICS)
        load = Rates(*(rng.randint(0, rng.choice([0, 1_000, largest])) for _ in range(3)))
        pieces.append(Piece((topic, indexes[topic]), rng.randrange(crowded), load, movable or rng.random() > 0.2))
        indexes[topic] += 1
    return Picture(places, pieces, [0] if rng.random() < 0.1 else [])


SEEDS = st.integers(0, 1 << 32)


def cost(picture: Picture, limits: BalancerSettings = SETTINGS) -> list[float]:
    """How far each goal is from being met, in their order."""
    racks = Racks(picture)
    found = [float(sum(map(racks.excess, racks.counts)))] if racks.several else [0.0]
    measures = [
        (
            BalanceMeasure("", lambda one: one.load.bytes_in + one.load.bytes_out, str, picture, 0.2, 0.001),
            limits.min_bytes_per_s,
        ),
        (CountMeasure("", lambda _: 1.0, str, picture, 0.1, 0.001), 0),
        (BalanceMeasure("", lambda one: one.load.requests / 1000, str, picture, 0.3, 0.001), limits.min_requests_per_s),
    ]
    if picture.unmeasured:
        measures = measures[1:2]
    return found + [one.total_cost() if one.mean >= least else 0.0 for one, least in measures]


def after(picture: Picture, plan: Plan) -> Picture:
    targets = {move.key: move.target for move in plan.moves}
    return picture._replace(pieces=[one._replace(place=targets.get(one.key, one.place)) for one in picture.pieces])


GOALS = ["racks", "bytes", "partitions", "requests"]


def not_worse(new: list[float], old: list[float]) -> bool:
    """Lexicographically, with room for rounding."""
    for one, other in zip(new, old, strict=True):
        if one < other - 1e-3:
            return True
        if one > other + 1e-3:
            return False
    return True


@settings(max_examples=examples(100))
@given(SEEDS)
def test_no_move_costs_its_own_goal_or_an_earlier_one_anything_and_every_plan_makes_it_better(seed: int) -> None:
    picture = picture_by(seed)
    plan = plan_of(picture)
    now = picture
    for move in plan.moves:
        then = after(now, Plan([move], []))
        upto = GOALS.index(move.goal) + 1
        assert all(new <= old + 1e-3 for new, old in zip(cost(then)[:upto], cost(now)[:upto], strict=True)), move
        assert cost(then)[0] <= cost(now)[0], "racks"
        now = then
    assert not_worse(cost(now), cost(picture))
    assert not plan.moves or cost(now) != cost(picture)
    assert plan.findings


@settings(max_examples=examples(100))
@given(SEEDS, st.integers(1, 8))
def test_a_plan_keeps_to_its_limits(seed: int, limit: int) -> None:
    picture = picture_by(seed)
    bounded = BalancerSettings(min_bytes_per_s=100, min_requests_per_s=10, max_moves_in_plan=limit)
    plan = plan_of(picture, bounded)
    assert len(plan.moves) <= limit
    assert max(Counter(move.key for move in plan.moves).values(), default=0) <= 1
    pieces = {piece.key: piece for piece in picture.pieces}
    places = {place.id for place in picture.places}
    for move in plan.moves:
        assert pieces[move.key].movable
        assert move.source == pieces[move.key].place != move.target
        assert move.target in places
        assert name(move.key) in move.why


@settings(max_examples=examples(100))
@given(SEEDS)
def test_planning_again_and_again_comes_to_rest(seed: int) -> None:
    picture = picture_by(seed, movable=True)
    for _ in range(30):
        plan = plan_of(picture)
        if not plan.moves:
            return
        picture = after(picture, plan)
    raise AssertionError("it never rests")


@settings(max_examples=examples(50))
@given(SEEDS)
def test_the_same_picture_gives_the_same_plan(seed: int) -> None:
    picture = picture_by(seed, movable=True)
    assert plan_of(picture) == plan_of(picture)


# --- by example --------------------------------------------------------------------------------------------------


def even(places: list[Target], loads: dict[int, list[float]]) -> Picture:
    pieces: list[Piece] = []
    for place, rates in loads.items():
        pieces += [Piece((TOPICS[0], len(pieces) + at), place, Rates(rate), True) for at, rate in enumerate(rates)]
    return Picture(places, pieces, [])


def spread(picture: Picture, value: str = "count") -> dict[int, float]:
    found = dict.fromkeys((place.id for place in picture.places), 0.0)
    for piece in picture.pieces:
        found[piece.place] += 1 if value == "count" else piece.load.bytes_in
    return found


THREE = [Target(number, "") for number in (1, 2, 3)]


def test_three_brokers_become_six_and_three_again() -> None:
    six = [Target(number, "") for number in range(1, 7)]
    picture = even(six, {1: [1_000.0] * 334, 2: [1_000.0] * 333, 3: [1_000.0] * 333})
    plan = plan_of(picture)
    assert 450 <= len(plan.moves) <= 501
    assert all(move.source in (1, 2, 3) and move.target in (4, 5, 6) for move in plan.moves)
    found = spread(after(picture, plan))
    assert min(found.values()) >= 150 and max(found.values()) <= 184
    assert plan_of(after(picture, plan)).moves == []


def test_a_hot_partition_stays_and_the_others_make_room_for_it() -> None:
    picture = even(THREE, {1: [9_000.0, 1_000.0, 1_000.0], 2: [1_000.0] * 3, 3: [1_000.0] * 3})
    plan = plan_of(picture)
    hot = picture.pieces[0].key
    assert hot not in {move.key for move in plan.moves}
    assert {move.source for move in plan.moves if move.goal == "bytes"} == {1}
    assert any("no further move helps (t0-0 alone has 9.00 kB/s of broker 1's)" in each for each in plan.findings)


def test_what_is_balanced_enough_is_left_alone() -> None:
    picture = even(THREE, {1: [1_150.0] * 10, 2: [900.0] * 10, 3: [950.0] * 10})
    plan = plan_of(picture)
    assert plan.moves == []
    assert all("balanced" in each or "less than" in each for each in plan.findings)


def test_too_little_load_is_not_worth_a_move() -> None:
    picture = even(THREE, {1: [10.0] * 4, 2: [1.0] * 4, 3: [1.0] * 4})
    plan = plan_of(picture)
    assert plan.moves == []
    assert any("less than balancer.min_bytes_per_s" in each for each in plan.findings)


def test_without_a_report_only_numbers_are_evened_out() -> None:
    picture = even(THREE, {1: [9_000.0] * 6, 2: [1.0] * 3, 3: []})._replace(unmeasured=[3])
    plan = plan_of(picture)
    assert {move.goal for move in plan.moves} == {"partitions"}
    assert set(spread(after(picture, plan)).values()) == {3}
    assert "no fresh load report of broker 3" in plan.findings[0]


def test_a_topic_in_one_rack_is_spread_over_both() -> None:
    places = [Target(1, "a"), Target(2, "a"), Target(3, "b"), Target(4, "b")]
    picture = even(places, {1: [0.0] * 4, 2: [0.0] * 4})
    plan = plan_of(picture)
    assert [move.goal for move in plan.moves[:4]] == ["racks"] * 4
    racks = Racks(after(picture, plan))
    assert racks.counts[TOPICS[0]] == {"a": 4, "b": 4}
    assert "rack" in plan.moves[0].why


def test_load_is_not_evened_out_at_the_cost_of_racks() -> None:
    places = [Target(1, "a"), Target(2, "b")]
    pieces = [
        Piece((TOPICS[0], 0), 1, Rates(9_000), True),
        Piece((TOPICS[0], 1), 2, Rates(10), True),
        Piece((TOPICS[1], 0), 1, Rates(8_000), True),
        Piece((TOPICS[1], 1), 2, Rates(10), True),
    ]
    plan = plan_of(Picture(places, pieces, []))
    assert plan.moves == []  # each topic would be in one rack alone


def test_every_move_is_explained_with_the_figures_before_and_after() -> None:
    picture = even(THREE, {1: [2_000_000.0] * 6, 2: [1_000_000.0], 3: [1_000_000.0]})
    why = plan_of(picture).moves[0].why
    assert "broker 1 has 12.00 MB/s and broker" in why and "the mean is 4.67 MB/s" in why
    assert "moving 2.00 MB/s makes it 10.00 MB/s and 3.00 MB/s" in why


def test_a_single_broker_and_an_empty_cluster_have_nothing_to_do() -> None:
    assert plan_of(even(THREE[:1], {1: [1_000.0]})).moves == []
    assert plan_of(even(THREE, {})).moves == []
