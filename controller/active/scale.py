"""The number of brokers that the cluster should have by its measured load: the signal for an autoscaler (`/scale`).

The target load of a broker is `scale.utilization_percent` of its configured capacity in bytes in, bytes out, requests
and processor time. The resource that needs most brokers decides. Hysteresis: fewer brokers are wanted only if their
load would stay `scale.hysteresis_percent` below the target. Stabilization, as in the Kubernetes HPA: more are wanted
only when all looks of `scale.up_window_ms` agree, fewer only when all of `scale.down_window_ms` do. While a broker's
report is missing, or the windows are not full yet (a new active controller), fewer are never wanted.

Sans-I/O: times are seconds of a monotonic clock, given by the caller. Entry: `Scaler`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from tidelog.controller.model.load import BrokerLoad
from tidelog.controller.model.settings import ScaleSettings

MAX_LOOKS = 10_000
"""Looks that are kept: nearly three hours at one a second."""


class BrokerReport(NamedTuple):
    """A broker that is alive and not draining, with its newest report."""

    broker_id: int
    load: BrokerLoad | None


class ScaleMeasure(NamedTuple):
    """One resource: its total and capacity, and the brokers that it needs."""

    name: str
    unit: str
    total: float
    capacity: float
    """Capacity of one broker."""
    needs: int
    """Number of brokers that carry the total at the target load."""
    needs_low: int
    """Number of brokers that carry it below the target by the hysteresis."""


class _Look(NamedTuple):
    at_s: float
    needs: int


class Wanted(NamedTuple):
    """The wanted number of brokers and its reasons."""

    brokers: int
    wanted: int
    reason: str
    measures: tuple[ScaleMeasure, ...]
    missing: tuple[int, ...]
    """Brokers without a fresh report."""
    needs_now: int
    """Number of brokers by this look alone."""

    def as_dict(self, settings: ScaleSettings) -> dict[str, Any]:
        """Return plain values for operators and scripts."""
        return {
            "wanted": self.wanted,
            "brokers": self.brokers,
            "reason": self.reason,
            "now": self.needs_now,
            "min": settings.min_brokers,
            "max": settings.max_brokers,
            "utilization_percent": settings.utilization_percent,
            "missing": list(self.missing),
            "measures": {
                each.name: {
                    "unit": each.unit,
                    "total": round(each.total, 3),
                    "capacity_of_one": each.capacity,
                    "utilization_percent": round(100 * each.total / (each.capacity * max(1, self.brokers)), 1),
                    "needs": each.needs,
                }
                for each in self.measures
            },
        }


class Scaler:
    """Computes the wanted number of brokers from a sequence of looks; see the module docstring."""

    def __init__(self, settings: ScaleSettings) -> None:
        self._settings = settings
        self._looks: deque[_Look] = deque(maxlen=MAX_LOOKS)
        self._since_s = 0.0
        self.latest: Wanted | None = None

    def activated(self, now_s: float) -> None:
        """Start over: this controller became active. Earlier looks are discarded."""
        self._looks.clear()
        self._since_s = now_s
        self.latest = None

    def look(self, reports: Sequence[BrokerReport], now_s: float) -> Wanted:
        """Evaluate the reports; call it about once a second."""
        settings = self._settings
        brokers = len(reports)
        missing = tuple(one.broker_id for one in reports if one.load is None)
        measures = self._measures([one.load for one in reports if one.load is not None])
        top = max(measures, key=lambda each: each.needs)
        low = max(measures, key=lambda each: each.needs_low)
        if top.needs > brokers:
            needs = top.needs
        elif low.needs_low < brokers and not missing:
            needs = low.needs_low
        else:
            needs = brokers
        self._looks.append(_Look(now_s, needs))
        keep_s = max(settings.up_window_ms, settings.down_window_ms) / 1000
        while self._looks[0].at_s < now_s - keep_s:
            self._looks.popleft()
        steady, why_not = self._steady(brokers, needs, now_s)
        wanted = min(max(steady, settings.min_brokers), settings.max_brokers)
        reason = self._reason(brokers, wanted, steady, top if needs >= brokers else low, why_not, missing)
        self.latest = Wanted(brokers, wanted, reason, measures, missing, needs)
        return self.latest

    def _measures(self, loads: Sequence[BrokerLoad]) -> tuple[ScaleMeasure, ...]:
        settings = self._settings
        mark = settings.utilization_percent / 100
        low = max(1, settings.utilization_percent - settings.hysteresis_percent) / 100
        rows = (
            ("bytes_in", "B/s", sum(one.bytes_in for one in loads), settings.broker_bytes_in_per_s),
            ("bytes_out", "B/s", sum(one.bytes_out for one in loads), settings.broker_bytes_out_per_s),
            ("requests", "1/s", sum(one.requests for one in loads) / 1000, settings.broker_requests_per_s),
            ("cpu", "% of a core", sum(one.cpu for one in loads) / 10, settings.broker_cpu_percent),
        )
        return tuple(
            ScaleMeasure(name, unit, total, limit, math.ceil(total / (limit * mark)), math.ceil(total / (limit * low)))
            for name, unit, total, limit in rows
        )

    def _steady(self, brokers: int, needs: int, now_s: float) -> tuple[int, str]:
        """Return the number that all looks of the window agree on, and what delays a change."""
        settings = self._settings
        if needs == brokers:
            return brokers, ""
        window_s = (settings.up_window_ms if needs > brokers else settings.down_window_ms) / 1000
        found = [look.needs for look in self._looks if look.at_s >= now_s - window_s]
        agreed = min(found) if needs > brokers else max(found)
        if now_s - self._since_s < window_s or (agreed - brokers) * (needs - brokers) <= 0:
            return brokers, f"{needs} suffice now, but not yet for all of the last {window_s:g} s"
        return agreed, ""

    def _reason(
        self, brokers: int, wanted: int, steady: int, by: ScaleMeasure, why_not: str, missing: Sequence[int]
    ) -> str:
        share = 100 * by.total / (by.capacity * max(1, brokers))
        mark = self._settings.utilization_percent
        text = f"{by.name} is at {share:.0f}% of the capacity of {brokers} brokers (target: {mark}%)"
        if wanted != steady:
            text += f"; {steady} would fit it, but scale.{'min' if wanted > steady else 'max'}_brokers is {wanted}"
        elif why_not:
            text += f"; {why_not}"
        if missing:
            text += f"; no fresh report of {', '.join(map(str, missing))}, so fewer are not wanted"
        return text
