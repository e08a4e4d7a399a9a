"""The balancer's planner: which partitions should move where, and why (docs/design/0008-balancer.md).

A pure function of a `Picture` and the settings, in steps. Goals in order of priority: racks, bytes in and out, number
of partitions, requests. The cost of a goal is the sum of the brokers' deviations beyond the allowed range. Invariants,
kept by every single move and checked by property tests:

- neither the cost of the move's goal nor that of an earlier goal rises, and every plan with moves for a goal lowers
  that goal's cost, so repeated planning terminates;
- neither of the two brokers ends above the higher, or below the lower, of their two previous loads;
- a partition moves at most once in a plan, only between brokers of the picture, and never if it is pinned;
- it moves to no set with fewer replicas than it needs;
- a plan ends at its bound, or when no move gains `min_gain_permille` of a mean broker's load.

No moves are planned for a goal while every broker is within its threshold. A broker outside is brought within half of
the threshold, so that a small change of load does not unbalance it again. Entry: `make_plan`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tidelog.controller.active.balance_picture import Picture, Piece
from tidelog.controller.model.records import PartitionKey
from tidelog.controller.model.settings import BalancerSettings
from tidelog.runtime.steps import Steps

TRIES = 32
"""Partitions of one broker that are tried for a move to another broker, on each side of the best size."""
_ROUNDING = 1e-6


class PlannedMove(NamedTuple):
    """One move and its reason as text."""

    key: PartitionKey
    source: int
    target: int
    goal: str
    why: str


class Plan(NamedTuple):
    """The moves, and one sentence of findings for each goal."""

    moves: list[PlannedMove]
    findings: list[str]


class BalanceMeasure:
    """One measured goal: its load on each place, and the allowed range."""

    def __init__(
        self,
        name: str,
        value: Callable[[Piece], float],
        show: Callable[[float], str],
        picture: Picture,
        threshold: float,
        min_gain: float,
    ) -> None:
        self.name, self.value, self.show = name, value, show
        self.at: dict[int, float] = {place.id: 0.0 for place in picture.places}
        for piece in picture.pieces:
            self.at[piece.place] += value(piece)
        self.mean = sum(self.at.values()) / len(self.at)
        self.allowed = self._bounds(threshold)
        self.aim = self._bounds(threshold / 2)
        self.min_gain = min_gain * self.mean

    def _bounds(self, threshold: float) -> tuple[float, float]:
        return self.mean * (1 - threshold), self.mean * (1 + threshold)

    def cost(self, load: float, bounds: tuple[float, float]) -> float:
        """Return how far a load is outside the allowed range."""
        return max(0.0, bounds[0] - load, load - bounds[1])

    def total_cost(self) -> float:
        """Return the sum of the costs of all places by the allowed range."""
        return sum(self.cost(load, self.allowed) for load in self.at.values())

    def gain(self, source: int, target: int, amount: float, bounds: tuple[float, float]) -> float:
        """Return the reduction of the cost when `amount` moves from `source` to `target`."""
        high, low = self.at[source], self.at[target]
        before = self.cost(high, bounds) + self.cost(low, bounds)
        return before - self.cost(high - amount, bounds) - self.cost(low + amount, bounds)

    def move(self, source: int, target: int, amount: float) -> None:
        """Apply a move."""
        self.at[source] -= amount
        self.at[target] += amount

    def explain(self, source: int, target: int, amount: float) -> str:
        """Describe a move that is not applied yet, with its figures."""
        high, low = self.at[source], self.at[target]
        return (
            f"{self.name}: broker {source} has {self.show(high)} and broker {target} {self.show(low)}, "
            f"the mean is {self.show(self.mean)}; moving {self.show(amount)} makes it "
            f"{self.show(high - amount)} and {self.show(low + amount)}"
        )


class CountMeasure(BalanceMeasure):
    """A measure of whole numbers: a mean of 1.3 partitions allows one and two."""

    def _bounds(self, threshold: float) -> tuple[float, float]:
        low, high = super()._bounds(threshold)
        return min(low, math.floor(self.mean)), max(high, math.ceil(self.mean))


class Racks:
    """Number of partitions of each topic in each rack, and each rack's share by its number of brokers.

    A topic with several partitions must not be in one rack alone.
    """

    def __init__(self, picture: Picture) -> None:
        self._rack_of = {place.id: place.rack for place in picture.places}
        self._brokers = Counter(self._rack_of.values())
        self.counts: dict[bytes, Counter[str]] = {}
        for piece in picture.pieces:
            topic = piece.key[0]
            if topic not in self.counts:
                self.counts[topic] = Counter()
            self.counts[topic][self._rack_of[piece.place]] += 1

    @property
    def several(self) -> bool:
        """Whether there is more than one rack."""
        return len(self._brokers) > 1

    def room(self, topic: bytes, rack: str) -> int:
        """Return how many more partitions of the topic the rack should take; negative if it has too many."""
        counts = self.counts[topic]
        total = counts.total()
        share = math.ceil(total * self._brokers[rack] / len(self._rack_of))
        if self.several and total > 1:
            share = min(share, total - 1)
        return share - counts[rack]

    def excess(self, topic: bytes) -> int:
        """Return the number of partitions of the topic beyond their racks' shares."""
        return sum(max(0, -self.room(topic, rack)) for rack in self._brokers)

    def allows(self, topic: bytes, source: int, target: int) -> bool:
        """Whether a move does not raise the excess."""
        here, there = self._rack_of[source], self._rack_of[target]
        return here == there or self.room(topic, there) > 0 or self.room(topic, here) < self.room(topic, there)

    def move(self, topic: bytes, source: int, target: int) -> None:
        """Apply a move."""
        self.counts[topic][self._rack_of[source]] -= 1
        self.counts[topic][self._rack_of[target]] += 1

    def rack(self, place: int) -> str:
        """Return the rack of a place."""
        return self._rack_of[place]


def make_plan(picture: Picture, settings: BalancerSettings, name_of: Callable[[PartitionKey], str]) -> Steps[Plan]:
    """Plan at most `settings.max_moves_in_plan` moves; `name_of` names a partition in explanations."""
    if len(picture.places) < 2:
        return Plan([], ["fewer than two brokers take partitions: there is nothing to balance"])
    if not picture.pieces:
        return Plan([], ["there are no partitions"])
    search = _Search(picture, settings, name_of)
    yield
    return (yield from search.run())


class _Search:
    def __init__(self, picture: Picture, settings: BalancerSettings, name_of: Callable[[PartitionKey], str]) -> None:
        self._picture = picture
        self._settings = settings
        self._name_of = name_of
        self._racks = Racks(picture)
        self._measures: list[BalanceMeasure] = []
        self._replicas = {place.id: place.replicas for place in picture.places}
        self._moves: list[PlannedMove] = []
        self._moved: set[PartitionKey] = set()
        self._findings: list[str] = []
        self._at: dict[int, dict[PartitionKey, Piece]] = {place.id: {} for place in picture.places}
        self._sorted: dict[int, list[tuple[float, float, PartitionKey]]] = {}
        """For the current goal: each place's movable partitions by size (and bytes)."""

    def run(self) -> Steps[Plan]:
        for piece in self._picture.pieces:
            self._at[piece.place][piece.key] = piece
        yield
        self._measures = yield from self._active_measures()
        if self._racks.several:
            yield from self._spread_racks()
        for number, measure in enumerate(self._measures):
            yield from self._even_out(measure, self._measures[:number])
        return Plan(self._moves, self._findings)

    def _active_measures(self) -> Steps[list[BalanceMeasure]]:
        picture, settings = self._picture, self._settings
        gain = settings.min_gain_permille / 1000
        partitions = CountMeasure(
            "partitions", lambda _: 1.0, lambda n: f"{n:g}", picture, settings.partitions_threshold_percent / 100, gain
        )
        partitions.min_gain = _ROUNDING  # a fraction of one partition, near a bound
        yield
        if picture.unmeasured:
            names = ", ".join(map(str, picture.unmeasured))
            self._findings.append(f"no fresh load report of broker {names}: only racks and numbers are balanced")
            return [partitions]
        bytes_ = BalanceMeasure("bytes", _bytes, _rate, picture, settings.bytes_threshold_percent / 100, gain)
        yield
        requests = BalanceMeasure(
            "requests",
            lambda piece: piece.load.requests / 1000,
            lambda n: f"{n:.0f}/s",
            picture,
            settings.requests_threshold_percent / 100,
            gain,
        )
        yield
        found: list[BalanceMeasure] = []
        for one, least, key in (
            (bytes_, settings.min_bytes_per_s, "min_bytes_per_s"),
            (partitions, 0, ""),
            (requests, settings.min_requests_per_s, "min_requests_per_s"),
        ):
            if one.mean < least:
                self._findings.append(f"{one.name}: {one.show(one.mean)} a broker, less than balancer.{key}")
            else:
                found.append(one)
        return found

    def _is_full(self) -> bool:
        return len(self._moves) >= self._settings.max_moves_in_plan

    def _apply(self, piece: Piece, target: int, goal: str, why: str) -> None:
        source = piece.place
        self._moves.append(PlannedMove(piece.key, source, target, goal, f"{self._name_of(piece.key)}: {why}"))
        self._moved.add(piece.key)
        self._racks.move(piece.key[0], source, target)
        for measure in self._measures:
            measure.move(source, target, measure.value(piece))
        del self._at[source][piece.key]
        self._at[target][piece.key] = piece._replace(place=target, movable=False)

    # --- racks ---------------------------------------------------------------------------------------------------

    def _spread_racks(self) -> Steps[None]:
        racks, before = self._racks, len(self._moves)
        topics = [topic for topic in sorted(racks.counts) if racks.excess(topic)]
        if topics:
            by_topic: dict[bytes, list[Piece]] = {topic: [] for topic in topics}
            for piece in self._picture.pieces:
                if piece.movable and piece.key[0] in by_topic:
                    by_topic[piece.key[0]].append(piece)
            for topic in topics:
                yield
                self._spread_topic(topic, by_topic[topic])
        yield
        left = sum(map(racks.excess, topics))
        done = len(self._moves) - before
        self._findings.append(
            "racks: every topic is spread"
            if not topics
            else f"racks: {done} moves"
            + (f", {left} partitions remain beyond the shares of their racks" if left else "")
        )

    def _spread_topic(self, topic: bytes, pieces: list[Piece]) -> None:
        """Move from the fullest places of racks above their share to the emptiest places of racks below it."""
        racks, main = self._racks, self._measures[0]
        for piece in sorted(pieces, key=lambda one: (-main.at[one.place], one.key)):
            if racks.room(topic, racks.rack(piece.place)) >= 0:
                continue
            open_ = [each for each in self._picture.places if racks.room(topic, each.rack) > 0]
            if not open_ or self._is_full():
                return
            open_ = [each for each in open_ if each.replicas >= piece.replicas]
            if not open_:
                continue
            target = min(open_, key=lambda each: (main.at[each.id], each.id))
            counts = racks.counts[topic]
            here = racks.rack(piece.place)
            why = (
                f"racks: {counts[here]} of the topic's {counts.total()} partitions are in rack {here}, more than its "
                f"share, and {counts[target.rack]} in rack {target.rack}"
            )
            self._apply(piece, target.id, "racks", why)

    # --- measured goals ------------------------------------------------------------------------------------------

    def _even_out(self, measure: BalanceMeasure, earlier: list[BalanceMeasure]) -> Steps[None]:
        before = len(self._moves)
        if measure.total_cost() > _ROUNDING:
            for place, pieces in self._at.items():
                self._sorted[place] = sorted(
                    (measure.value(piece), _bytes(piece), key) for key, piece in pieces.items() if piece.movable
                )
                yield
            outside = {place for place, load in measure.at.items() if measure.cost(load, measure.allowed) > _ROUNDING}
            while not self._is_full() and self._step(measure, earlier, outside):
                yield
        self._findings.append(self._finding(measure, len(self._moves) - before))
        yield

    def _step(self, measure: BalanceMeasure, earlier: list[BalanceMeasure], outside: set[int]) -> bool:
        """Make the next move, from the fullest to the emptiest place possible. Returns False if no move helps.

        One of the two places was outside the allowed range and has not reached its goal yet.
        """
        low, high = measure.aim
        order = sorted(measure.at, key=lambda place: (measure.at[place], place))
        for source in reversed(order):
            for target in order:
                if measure.at[source] <= measure.at[target]:
                    break
                if not (source in outside and measure.at[source] > high) and not (
                    target in outside and measure.at[target] < low
                ):
                    continue
                piece = self._pick(measure, source, target, earlier)
                if piece is not None:
                    amount = measure.value(piece)
                    entry = (amount, _bytes(piece), piece.key)
                    del self._sorted[source][bisect_left(self._sorted[source], entry)]
                    self._apply(piece, target, measure.name, measure.explain(source, target, amount))
                    return True
        return False

    def _pick(self, measure: BalanceMeasure, source: int, target: int, earlier: list[BalanceMeasure]) -> Piece | None:
        gap = measure.at[source] - measure.at[target]
        is_out = measure.at[source] > measure.allowed[1] or measure.at[target] < measure.allowed[0]
        bounds = measure.allowed if is_out else measure.aim
        fits = min(measure.at[source] - measure.mean, measure.mean - measure.at[target])
        for amount, _, key in _nearest(self._sorted[source], fits if fits > 0 else gap / 2):
            if amount <= gap and measure.gain(source, target, amount, bounds) >= measure.min_gain:
                piece = self._at[source][key]
                if self._may(piece, source, target, earlier):
                    return piece
        return None

    def _may(self, piece: Piece, source: int, target: int, earlier: Iterable[BalanceMeasure]) -> bool:
        if self._replicas[target] < piece.replicas:
            return False
        return self._racks.allows(piece.key[0], source, target) and all(
            one.gain(source, target, one.value(piece), one.allowed) >= -_ROUNDING for one in earlier
        )

    def _finding(self, measure: BalanceMeasure, moves: int) -> str:
        lowest, highest = min(measure.at.values()), max(measure.at.values())
        spread = f"{measure.show(lowest)} to {measure.show(highest)} a broker, {measure.show(measure.mean)} on average"
        if not moves and measure.total_cost() <= _ROUNDING:
            return f"{measure.name}: {spread}: balanced"
        text = f"{measure.name}: {moves} moves, then {spread}"
        if measure.total_cost() > _ROUNDING and not self._is_full():
            text += "; no further move helps" + self._heaviest(measure)
        return text

    def _heaviest(self, measure: BalanceMeasure) -> str:
        """Name the partition that prevents a further move, if it is a single one."""
        fullest = max(measure.at, key=lambda place: measure.at[place])
        pieces = self._at[fullest].values()
        one = max(pieces, key=measure.value, default=None)
        if one is None or measure.value(one) <= max(measure.mean / 4, 1.0):
            return ""
        return f" ({self._name_of(one.key)} alone has {measure.show(measure.value(one))} of broker {fullest}'s)"


def _nearest(
    entries: list[tuple[float, float, PartitionKey]], fits: float
) -> Iterator[tuple[float, float, PartitionKey]]:
    """Yield the largest that fit first, then the smallest that are too large; among equals the fewest bytes first."""
    end = bisect_right(entries, (fits + _ROUNDING, math.inf, (b"\xff" * 16, 0)))
    tried = 0
    while end > 0 and tried < TRIES:
        start = bisect_left(entries, (entries[end - 1][0],), hi=end)
        for at in range(start, min(end, start + TRIES)):
            yield entries[at]
            tried += 1
        end = start
    first = bisect_right(entries, (fits + _ROUNDING, math.inf, (b"\xff" * 16, 0)))
    yield from entries[first : first + TRIES]


def _bytes(piece: Piece) -> float:
    return piece.load.bytes_in + piece.load.bytes_out


def _rate(value: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B/s"
