"""Where a streaming query is: the offsets that Spark keeps in its checkpoint, and how far one micro-batch goes. No I/O.

    {"version": 1, "group": "spark-tidelog-…",
     "topics": {"orders": {"id": "…", "offsets": {"0": 23, "1": 42}, "epochs": {"0": 1, "1": 1}}}}

`group` is the consumer group that shows how far the query is; it is kept here because it belongs to the checkpoint.
`id` is the topic's id, 32 hexadecimal digits: offsets mean nothing in a topic that was deleted and created again under
the same name. `epochs` has the leader epoch in which a partition was known to be so long: one that has lost records
since, and has given their offsets to others, tells that this epoch ends earlier (KIP-320). Positions of older versions
have none, and older versions leave them aside. The offsets of Spark's Kafka source, `{"orders": {"0": 23}}`, are
understood, too: a query moves to this source with its checkpoint.

Invariants: equal positions are equal texts, because Spark compares the texts. A partition that is not named begins at
offset 0.

Entry: `Position`, `compare`, `admit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from pyspark_tidelog.options import Partition
from tidelog.runtime.errors import InvalidInput

VERSION = 1


class TopicPosition(NamedTuple):
    """One topic: its id, empty if it is not known, and the next offset of each partition."""

    id: str
    offsets: Mapping[int, int]
    epochs: Mapping[int, int] = MappingProxyType({})
    """Of partitions where it is known."""


@dataclass(frozen=True)
class Position:
    """Where a query is, in every partition."""

    topics: Mapping[str, TopicPosition] = field(default_factory=dict)
    group: str = ""
    """Empty: not chosen yet."""

    @classmethod
    def of(
        cls,
        offsets: Mapping[Partition, int],
        ids: Mapping[str, str],
        group: str = "",
        epochs: Mapping[Partition, int] = MappingProxyType({}),
    ) -> Position:
        """Return the position of offsets in topics with these ids."""
        topics: dict[str, dict[int, int]] = {}
        known: dict[str, dict[int, int]] = {}
        for (topic, index), offset in sorted(offsets.items()):
            topics.setdefault(topic, {})[index] = offset
            if epochs.get((topic, index), -1) >= 0:
                known.setdefault(topic, {})[index] = epochs[topic, index]
        return cls(
            {topic: TopicPosition(ids[topic], rows, known.get(topic, {})) for topic, rows in topics.items()}, group
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        """Return what a checkpoint has. Raises `InvalidInput`."""
        version = value.get("version")
        try:
            if not isinstance(version, int):
                return cls({topic: TopicPosition("", _offsets(rows)) for topic, rows in value.items()})
            if version != VERSION:
                raise ValueError(f"they are of version {version}, and this program knows version {VERSION}")
            topics = {
                topic: TopicPosition(_text(row["id"]), _offsets(row["offsets"]), _offsets(row.get("epochs", {})))
                for topic, row in value["topics"].items()
            }
            return cls(topics, _text(value["group"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"the checkpoint's offsets are not this source's: {error!r} in {str(value)[:200]}",
                hint="is the checkpoint another query's, or of a newer version?",
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return what the checkpoint keeps, in one order."""
        topics = {
            topic: {
                "id": row.id,
                "offsets": _by_text(row.offsets),
                **({"epochs": _by_text(row.epochs)} if row.epochs else {}),
            }
            for topic, row in sorted(self.topics.items())
        }
        return {"version": VERSION, "group": self.group, "topics": topics}

    @property
    def offsets(self) -> dict[Partition, int]:
        """The next offset of each partition."""
        return {(topic, index): offset for topic, row in self.topics.items() for index, offset in row.offsets.items()}

    @property
    def epochs(self) -> dict[Partition, int]:
        """The leader epoch of each partition where it is known."""
        return {(topic, index): epoch for topic, row in self.topics.items() for index, epoch in row.epochs.items()}

    @property
    def ids(self) -> dict[str, str]:
        """The id of each topic."""
        return {topic: row.id for topic, row in self.topics.items()}

    def is_same_topic(self, topic: str, topic_id: str) -> bool:
        """Whether the topic of a name is still the one that the position is in, as far as is known."""
        mine = self.topics[topic].id if topic in self.topics else ""
        return not mine or not topic_id or mine == topic_id


def _by_text(rows: Mapping[int, int]) -> dict[str, int]:
    return {str(index): rows[index] for index in sorted(rows)}


def _offsets(rows: Mapping[str, Any]) -> dict[int, int]:
    found = {int(index): offset for index, offset in rows.items()}
    if not all(type(offset) is int and 0 <= offset < 1 << 63 for offset in found.values()):
        raise ValueError("an offset is not a number of 63 bits")
    return found


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


class Comparison(NamedTuple):
    """A position beside the ends of the partitions."""

    starts: dict[Partition, int]
    """Where reading goes on, in every partition that there is. Not behind its end."""
    losses: list[str]
    """What the query has not read and cannot read any more: a sentence for each."""


def compare(position: Position, ends: Position, cuts: Mapping[Partition, int] = MappingProxyType({})) -> Comparison:
    """Return where reading goes on, of the partitions that `ends` has.

    `cuts`: up to where partitions still have what they had at `position`; what is not named has it all.
    """
    losses = []
    for topic, row in position.topics.items():
        if topic not in ends.topics:
            losses.append(f"topic {topic} does not exist any more, or is not subscribed to any more")
        elif not position.is_same_topic(topic, ends.topics[topic].id):
            losses.append(f"topic {topic} was deleted and created again")
        else:
            there = ends.topics[topic].offsets
            gone = [each for each in row.offsets if each not in there]
            losses += [f"{topic}-{each} does not exist any more, or is not assigned any more" for each in gone]
    starts = {}
    for (topic, index), end in ends.offsets.items():
        known = position.topics.get(topic)
        start = 0
        if known is not None and position.is_same_topic(topic, ends.topics[topic].id):
            start = known.offsets.get(index, 0)
        if start > end:
            losses.append(f"{topic}-{index} ends at offset {end}, and was read up to {start}")
        cut = min(start, cuts.get((topic, index), start))
        if cut < min(start, end):
            losses.append(
                f"{topic}-{index} was read up to offset {start}, and has lost its records from {cut} on since: others"
                " have their offsets now"
            )
        starts[topic, index] = min(cut, end)
    return Comparison(starts, losses)


def epochs_at(
    position: Position, before: Position, now: Mapping[Partition, int], cuts: Mapping[Partition, int]
) -> dict[Partition, int]:
    """Return the leader epochs for a position that was made from `before` and from ends with the epochs of `now`.

    Where nothing was read the epoch stays: positions without anything new between them are equal.
    """
    known, offsets = before.epochs, before.offsets
    return {
        place: known.get(place, -1)
        if offset == offsets.get(place) and place not in cuts and before.ids[place[0]] == position.ids[place[0]]
        else now.get(place, -1)
        for place, offset in position.offsets.items()
    }


def between(
    start: Position, end: Position, cuts: Mapping[Partition, int] = MappingProxyType({})
) -> dict[Partition, tuple[int, int]]:
    """Return the offsets that a micro-batch reads of each partition, without those that have none. See `compare`."""
    starts = compare(start, end, cuts).starts
    return {place: (starts[place], last) for place, last in end.offsets.items() if starts[place] < last}


def admit(lags: Mapping[Partition, int], limit: int, turn: int) -> dict[Partition, int]:
    """Divide `limit` offsets (≥ 1) among partitions that have `lags` (≥ 0), in proportion to these.

    Every partition with a lag gets one at least; if the limit is smaller than their number, those do whose turn it is.
    """
    waiting = sorted(place for place, lag in lags.items() if lag > 0)
    total = sum(lags[place] for place in waiting)
    if total <= limit:
        return {place: lags[place] for place in waiting}
    if limit <= len(waiting):
        first = turn % len(waiting)
        return dict.fromkeys((waiting[first:] + waiting[:first])[:limit], 1)
    left = limit - len(waiting)
    shares = {place: 1 + left * (lags[place] - 1) // (total - len(waiting)) for place in waiting}
    _hand_out(shares, lags, limit - sum(shares.values()), waiting)
    assert sum(shares.values()) == limit, (lags, limit)
    return shares


def _hand_out(
    shares: dict[Partition, int], lags: Mapping[Partition, int], left: int, places: Iterable[Partition]
) -> None:
    """Give what rounding has left over, fewer offsets than there are partitions, one to each with room."""
    for place in places:
        if left > 0 and shares[place] < lags[place]:
            shares[place] += 1
            left -= 1
