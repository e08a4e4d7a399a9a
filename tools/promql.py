"""PromQL expressions that cannot name a metric which does not exist, or compare seconds with bytes.

The metrics are those of docs/metrics.md: `Catalogue.read` has their types, labels and sections, and the unit that
their names end with. A `Query` is built from them; it knows its unit and which metrics it reads. What makes no sense
raises `Nonsense` when it is built: an unknown metric or label, a counter that is read without a rate, a sum of
different units, a comparison with an amount of another unit.

A duration is a `Span`, and stays one until `Query.text`: with `faster=20` all spans are a twentieth, so that a test can
see in seconds what takes minutes.

Entry: `Catalogue.read`, `Catalogue.series`, `Query`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

SECONDS: Final = "seconds"
BYTES: Final = "bytes"
RATIO: Final = "ratio"
COUNT: Final = "count"

TARGET_LABELS: Final = frozenset({"job", "instance", "cluster"})
"""What Prometheus adds to each series; `cluster` only if the scrape configuration sets it."""
PROCESS_METRICS: Final = {
    "up": ("gauge", COUNT),
    "process_start_time_seconds": ("gauge", SECONDS),
    "process_cpu_seconds_total": ("counter", SECONDS),
    "process_resident_memory_bytes": ("gauge", BYTES),
    "process_open_fds": ("gauge", COUNT),
    "process_max_fds": ("gauge", COUNT),
}
"""Type and unit of those that no page of this repository defines: Prometheus' own, and prometheus-client's."""

_ROW = re.compile(r"^\| `(tidelog_[a-z_]+)` \| (\w+) \| (.*?) ?\| (.*) \|$")
_STEPS = (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1))


class Nonsense(ValueError):
    """An expression that no server should be asked for; the message says why."""


@dataclass(frozen=True)
class Span:
    """A duration."""

    seconds: float

    def text(self, faster: float = 1.0) -> str:
        """Return it as PromQL writes durations, divided by `faster`."""
        left = round(self.seconds * 1000 / faster)
        if left <= 0:
            return "0s"
        parts = []
        for name, size_ms in _STEPS:
            count, left = divmod(left, size_ms)
            parts += [f"{count}{name}"] if count else []
        return "".join(parts)


@dataclass(frozen=True)
class Amount:
    """A number with its unit. `is_span`: it is a duration that passes, which tests make shorter."""

    value: float
    unit: str = COUNT
    is_span: bool = False

    def text(self, faster: float = 1.0) -> str:
        """Return it as a number."""
        return f"{self.value / faster if self.is_span else self.value:.12g}"


Part = str | Span | Amount


@dataclass(frozen=True)
class MetricDoc:
    """One row of docs/metrics.md."""

    name: str
    kind: str
    """gauge, counter, histogram or summary."""
    labels: frozenset[str] | None
    """None: the page does not list them."""
    meaning: str
    section: str

    @property
    def unit(self) -> str:
        """Return the unit that its name ends with."""
        return unit_of(self.name)


def unit_of(name: str) -> str:
    """Return the unit of a metric by its name."""
    bare = name.removesuffix("_total")
    for unit in (SECONDS, BYTES, RATIO):
        if bare.endswith(f"_{unit}"):
            return unit
    return COUNT


class Catalogue:
    """The metrics that exist."""

    def __init__(self, rows: Iterable[MetricDoc]) -> None:
        self.rows = {row.name: row for row in rows}

    @classmethod
    def read(cls, page: Path) -> Catalogue:
        """Read docs/metrics.md. Raises `Nonsense` if it lists a metric twice or none."""
        rows, section = [], ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                section = line.removeprefix("## ")
            found = _ROW.match(line)
            if found:
                name, kind, labels, meaning = found.groups()
                rows.append(MetricDoc(name, kind, _labels(labels), meaning, section))
        if not rows or len({row.name for row in rows}) != len(rows):
            raise Nonsense(f"{page} lists {len(rows)} metrics, some twice or none at all")
        return cls(rows)

    def series(self, name: str, **labels: str) -> Query:
        """Return the series of a metric. A label's value that begins with `~` is a regular expression."""
        if name in PROCESS_METRICS:
            kind, unit = PROCESS_METRICS[name]
            known: frozenset[str] | None = frozenset()
        else:
            row = self._row(name)
            kind, unit, known = row.kind, row.unit, row.labels
        wrong = set(labels) - TARGET_LABELS - (known if known is not None else set(labels))
        if wrong:
            raise Nonsense(f"{name} has no label {', '.join(sorted(wrong))}")
        if kind in ("histogram", "summary"):
            raise Nonsense(f"{name} is a {kind}: ask for a quantile of it, or for its _count or _sum")
        return Query((name + _selector(labels),), unit, frozenset({name}), kind == "counter")

    def quantile(self, share: float, name: str, window: Span, by: Iterable[str], **labels: str) -> Query:
        """Return a quantile of a histogram over a window."""
        row = self._row(name)
        if row.kind != "histogram":
            raise Nonsense(f"{name} is a {row.kind}, and has no quantiles")
        names = ", ".join(["le", *by])
        opening = f"histogram_quantile({share:g}, sum by ({names}) (rate({name}_bucket{_selector(labels)}["
        return Query((opening, window, "])))"), row.unit, frozenset({name}), is_counter=False)

    def _row(self, name: str) -> MetricDoc:
        if name not in self.rows:
            raise Nonsense(f"no metric {name} is in docs/metrics.md")
        return self.rows[name]


def _labels(cell: str) -> frozenset[str] | None:
    if cell.startswith("see above"):
        return None
    return frozenset(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cell)))


def _selector(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    pairs = [f'{name}=~"{value[1:]}"' if value[:1] == "~" else f'{name}="{value}"' for name, value in labels.items()]
    return "{" + ", ".join(pairs) + "}"


@dataclass(frozen=True)
class Query:
    """An expression."""

    parts: tuple[Part, ...]
    unit: str
    metrics: frozenset[str]
    """Names of the families that it reads."""
    is_counter: bool
    """Whether it is the value of a counter, which says nothing by itself."""
    is_compound: bool = False
    """Whether it needs parentheses as an operand."""

    def text(self, faster: float = 1.0) -> str:
        """Return it in PromQL; `faster` divides its durations."""
        return "".join(part if isinstance(part, str) else part.text(faster) for part in self.parts)

    # --- of counters

    def rate(self, window: Span) -> Query:
        """Return the increase of a counter per second."""
        return self._counted("rate", window, f"{self.unit}/s")

    def increase(self, window: Span) -> Query:
        """Return the increase of a counter over a window."""
        return self._counted("increase", window, self.unit)

    def _counted(self, function: str, window: Span, unit: str) -> Query:
        if not self.is_counter:
            raise Nonsense(f"{function} of {self.text()}, which is no counter")
        return Query((f"{function}(", *self.parts, "[", window, "])"), unit, self.metrics, is_counter=False)

    def grown(self, window: Span) -> Query:
        """As `increase`, also of a series that begins in the window, which has no earlier value to increase from."""
        if not self.is_counter:
            raise Nonsense(f"growth of {self.text()}, which is no counter")
        parts = (*self.parts, " unless ", *self.parts, " offset ", window)
        begun = Query(parts, self.unit, self.metrics, is_counter=False, is_compound=True)
        return begun._with(" or ", self.increase(window), self.unit)

    # --- of gauges

    def changes(self, window: Span) -> Query:
        """Return how often a gauge changes in a window."""
        return Query(("changes(", *self._value().parts, "[", window, "])"), COUNT, self.metrics, is_counter=False)

    def time(self) -> Query:
        """Return when each sample was taken."""
        return Query(("timestamp(", *self._value().parts, ")"), SECONDS, self.metrics, is_counter=False)

    def slope(self, window: Span) -> Query:
        """Return the slope per second of an expression, which is evaluated again for each moment of the window."""
        parts = ("deriv((", *self._value().parts, ")[", window, ":])")
        return Query(parts, f"{self.unit}/s", self.metrics, is_counter=False)

    def total(self, function: Literal["sum", "min", "max", "count"], *by: str) -> Query:
        """Aggregate over all labels but these."""
        group = f"{function} by ({', '.join(by)}) (" if by else f"{function}("
        unit = COUNT if function == "count" else self.unit
        return Query((group, *self._value().parts, ")"), unit, self.metrics, is_counter=False)

    # --- of two

    def __truediv__(self, other: Query) -> Query:
        return self._with(" / ", other, RATIO if self.unit == other.unit else f"{self.unit}/{other.unit}")

    def __sub__(self, other: Query) -> Query:
        return self._with(" - ", other, self._same_unit(other))

    def less_each(self, other: Query, *on: str) -> Query:
        """Return this less `other`, of which several series may have the same values of these labels."""
        return self._with(f" - on ({', '.join(on)}) group_right () ", other, self._same_unit(other))

    def __add__(self, other: Query) -> Query:
        return self._with(" + ", other, self._same_unit(other))

    def unless(self, other: Query, *on: str) -> Query:
        """Return this where `other` has no series with the same values of these labels."""
        return self._with(f" unless on ({', '.join(on)}) ", other, self.unit)

    def also(self, other: Query) -> Query:
        """Return this where `other` has a series with the same labels."""
        return self._with(" and ", other, self.unit)

    def __gt__(self, other: Amount | Query) -> Query:
        return self._compare(">", other)

    def __lt__(self, other: Amount | Query) -> Query:
        return self._compare("<", other)

    def is_(self, other: Amount) -> Query:
        """Return this where it equals a number."""
        return self._compare("==", other)

    def _compare(self, operator: str, other: Amount | Query) -> Query:
        if self.unit != other.unit:
            raise Nonsense(f"{self.text()} is in {self.unit}, and is compared with {other.unit}")
        if isinstance(other, Query):
            return self._with(f" {operator} ", other, self.unit)
        parts = (*self._operand(), f" {operator} ", other)
        return Query(parts, self.unit, self.metrics, is_counter=False, is_compound=True)

    def _with(self, operator: str, other: Query, unit: str) -> Query:
        parts = (*self._operand(), operator, *other._operand())
        return Query(parts, unit, self.metrics | other.metrics, is_counter=False, is_compound=True)

    def _operand(self) -> tuple[Part, ...]:
        parts = self._value().parts
        return ("(", *parts, ")") if self.is_compound else parts

    def _value(self) -> Query:
        if self.is_counter:
            raise Nonsense(f"{self.text()} is a counter: take its rate or its increase")
        return self

    def _same_unit(self, other: Query) -> str:
        if self.unit != other.unit:
            raise Nonsense(f"{self.text()} is in {self.unit}, {other.text()} in {other.unit}")
        return self.unit
