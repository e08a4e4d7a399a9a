"""The last hour of a broker's figures, in bounded memory, for plots without Prometheus. Sans-I/O.

Two rings: the broker's own figures every `FIGURES_INTERVAL_S`, and offsets (the end of each partition that it leads,
and what groups have committed that it coordinates) every `OFFSETS_INTERVAL_S`. Lag over time is the difference of two
series, which may be of two brokers; who asks joins them.

Invariants: memory is at most `HistoryRecorder.bound_bytes`, however many partitions and groups there are (rule 12): a
ring has a fixed number of samples and of series, a name has a bounded size, and series that find no place are counted.
Ages are monotonic; the wall clock only names the time of the newest sample. A sample that was not taken is NaN.

Entry: `HistoryRecorder`; `SampleRing`.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

FIGURES_INTERVAL_S: Final = 10.0
FIGURES_SAMPLES: Final = 360
"""An hour."""
MAX_FIGURES: Final = 48
OFFSETS_INTERVAL_S: Final = 30.0
OFFSETS_SAMPLES: Final = 120
"""An hour."""
MAX_OFFSET_SERIES: Final = 2_000
MAX_NAME_BYTES: Final = 512
"""Series with a longer name (as Python keeps it) are not kept: group ids may be as long as a request."""
SERIES_OVERHEAD_BYTES: Final = MAX_NAME_BYTES + 256
"""Of one series: its name, the array's head, and its place in the table."""

COUNTERS: Final = frozenset(
    {
        "produced_bytes",
        "produced_records",
        "fetched_bytes",
        "fetched_records",
        "produce_requests",
        "produce_seconds",
        "fetch_requests",
        "request_errors",
        "bucket_requests",
        "bucket_errors",
        "bucket_sent_bytes",
        "bucket_received_bytes",
        "cpu_seconds",
    }
)
"""Figures that only grow while the process lives; the others are levels."""

Sample = Iterable[tuple[str, float]]


class SampleRing:
    """The last `samples` values of each of at most `max_series` series, one value for each interval."""

    def __init__(self, interval_s: float, samples: int, max_series: int) -> None:
        self.interval_s = interval_s
        self._samples = samples
        self._max_series = max_series
        self._series: dict[str, array[float]] = {}
        self._slot: int | None = None
        """Number of the newest sample: its time in intervals."""
        self.left_out = 0
        """Series of the last sample that found no place."""

    @property
    def bound_bytes(self) -> int:
        """Return the most memory that the series take."""
        return self._max_series * (self._samples * 8 + SERIES_OVERHEAD_BYTES)

    @property
    def held_bytes(self) -> int:
        """Return the memory that the series take now: names, arrays, and the table."""
        parts = sum(sys.getsizeof(name) + sys.getsizeof(values) for name, values in self._series.items())
        return parts + sys.getsizeof(self._series)

    def is_due(self, now_s: float) -> bool:
        """Return whether the interval of the newest sample is over."""
        return self._slot is None or self._number(now_s) > self._slot

    def add(self, now_s: float, sample: Sample) -> None:
        """Take a sample, if it is due. Intervals without one have no values."""
        number = self._number(now_s)
        if self._slot is not None and number <= self._slot:
            return
        self._pass_over(number)
        self._slot = number
        at = number % self._samples
        self.left_out = 0
        for name, value in sample:
            values = self._series.get(name)
            if values is None:
                values = self._place(name)
                if values is None:
                    self.left_out += 1
                    continue
            values[at] = value

    def _number(self, now_s: float) -> int:
        return int(now_s // self.interval_s)

    def _pass_over(self, number: int) -> None:
        """Empty the slots after the newest sample up to `number`, and drop the series that have no value left."""
        if self._slot is None:
            return
        passed = min(number - self._slot, self._samples)
        slots = [(number - back) % self._samples for back in range(passed)]
        newest = self._slot % self._samples  # most series have a value there: the others are looked through
        ended = []
        for name, values in self._series.items():
            for at in slots:
                values[at] = math.nan
            if math.isnan(values[newest]) and all(map(math.isnan, values)):
                ended.append(name)
        for name in ended:
            del self._series[name]

    def _place(self, name: str) -> array[float] | None:
        if len(self._series) >= self._max_series or sys.getsizeof(name) > MAX_NAME_BYTES:
            return None
        values = self._series[name] = array("d", [math.nan]) * self._samples
        return values

    def report(self, now_s: float, time_ms: int, wanted: Callable[[str], bool]) -> dict[str, Any]:
        """Return the wanted series as JSON, the oldest value first; the last one is of `end_ms`."""
        if self._slot is None:
            return {"interval_s": self.interval_s, "end_ms": time_ms, "left_out": 0, "series": {}}
        first = (self._slot + 1) % self._samples
        age_s = now_s - self._slot * self.interval_s
        return {
            "interval_s": self.interval_s,
            "end_ms": time_ms - round(age_s * 1000),
            "left_out": self.left_out,
            "series": {
                name: [_json(value) for value in (*values[first:], *values[:first])]
                for name, values in self._series.items()
                if wanted(name)
            },
        }


def _json(value: float) -> float | int | None:
    if math.isnan(value):
        return None
    return int(value) if value.is_integer() else round(value, 6)


def end_series(topic: str, partition: int) -> str:
    """Return the name of the series of a partition's high watermark."""
    return f"end/{topic}/{partition}"


def committed_series(topic: str, partition: int, group: str) -> str:
    """Return the name of the series of a committed offset. Topics have no `/`; groups may, and come last."""
    return f"committed/{topic}/{partition}/{group}"


class HistoryRecorder:
    """The two rings of a broker, and what they are filled from."""

    def __init__(
        self,
        monotonic: Callable[[], float],
        time_ms: Callable[[], int],
        *,
        figures: Callable[[], Sample],
        offsets: Callable[[], Sample],
    ) -> None:
        """`figures` and `offsets` are quick, and called only when a sample is due."""
        self._monotonic = monotonic
        self._time_ms = time_ms
        self._read_figures = figures
        self._read_offsets = offsets
        self._figures = SampleRing(FIGURES_INTERVAL_S, FIGURES_SAMPLES, MAX_FIGURES)
        self._offsets = SampleRing(OFFSETS_INTERVAL_S, OFFSETS_SAMPLES, MAX_OFFSET_SERIES)

    @property
    def bound_bytes(self) -> int:
        """Return the most memory that the history takes: 3.6 MB."""
        return self._figures.bound_bytes + self._offsets.bound_bytes

    @property
    def held_bytes(self) -> int:
        """Return the memory that the history takes now."""
        return self._figures.held_bytes + self._offsets.held_bytes

    def tick(self) -> None:
        """Take the samples that are due. Called more often than they are."""
        now_s = self._monotonic()
        if self._figures.is_due(now_s):
            self._figures.add(now_s, self._read_figures())
        if self._offsets.is_due(now_s):
            self._offsets.add(now_s, self._read_offsets())

    def figures(self) -> dict[str, Any]:
        """Return the broker's figures; `counters` names those that only grow."""
        found = self._figures.report(self._monotonic(), self._time_ms(), lambda _name: True)
        return {**found, "counters": sorted(COUNTERS & found["series"].keys())}

    def offsets(self, topics: Collection[str], group: str | None) -> dict[str, Any]:
        """Return the ends of the topics' partitions, and what the group has committed in them."""

        def wanted(name: str) -> bool:
            kind, topic, rest = name.split("/", 2)
            return topic in topics and (kind == "end" or rest.partition("/")[2] == group)

        return self._offsets.report(self._monotonic(), self._time_ms(), wanted)
