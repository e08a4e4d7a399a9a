"""The health of a broker by operation: the section `health` of `/status`, its problems and its metrics.

The parts know how their operations go (`tidelog.runtime.health`); here they are read under one name each. Operations
that are known by two counters only are sampled every `SAMPLE_S`, so that a WAL append that hangs is seen within 5 s.

Entry: `HealthMonitor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client.core import GaugeMetricFamily, Metric

from tidelog.runtime.clock import Clock
from tidelog.runtime.health import OperationHealth, ProgressHealth
from tidelog.runtime.tasks import TaskSet

SAMPLE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class _Progress:
    health: ProgressHealth
    asked: Callable[[], int]
    done: Callable[[], int]


class HealthMonitor:
    """The operations of one broker. All methods are called on the event loop's thread."""

    def __init__(self, clock: Clock, on_defect: Callable[[BaseException], None]) -> None:
        """`on_defect` is called with an error that ends the sampling."""
        self._clock = clock
        self._tasks = TaskSet("health", on_defect)
        self._operations: list[OperationHealth | ProgressHealth] = []
        self._sampled: list[_Progress] = []
        self._ticks: list[Callable[[], None]] = []

    def add(self, operation: OperationHealth) -> None:
        """Report an operation that its part notes. Of several with one name the one with a problem is shown."""
        self._operations.append(operation)

    def discard(self, operation: OperationHealth) -> None:
        """Report an operation no more: its part has ended."""
        self._operations.remove(operation)

    def sample(self, name: str, asked: Callable[[], int], done: Callable[[], int]) -> None:
        """Report an operation by two counters: what was asked for, and what of it is done."""
        health = ProgressHealth(name)
        self._operations.append(health)
        self._sampled.append(_Progress(health, asked, done))

    def on_tick(self, callback: Callable[[], None]) -> None:
        """Call `callback` every `SAMPLE_S`, which is quick and does not raise: for others that take samples."""
        self._ticks.append(callback)

    def start(self) -> None:
        """Begin to sample."""
        self._tasks.spawn(self._run(), "sample")

    async def close(self) -> None:
        """Stop sampling."""
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            now_s = self._clock.monotonic()
            for one in self._sampled:
                one.health.sample(now_s, one.asked(), one.done())
            for tick in self._ticks:
                tick()
            await self._clock.sleep(SAMPLE_S)

    def problems(self) -> list[str]:
        """Return what is wrong, one sentence for each operation."""
        now_s = self._clock.monotonic()
        return [problem for one in self._operations if (problem := one.problem(now_s))]

    def report(self) -> dict[str, Any]:
        """Return the state of each operation as JSON, by name."""
        now_s = self._clock.monotonic()
        return {one.name: one.report(now_s) for one in self._by_name(now_s)}

    def figures(self) -> dict[str, tuple[bool, float]]:
        """Return for each operation whether it is healthy, and how long it has been silent (s)."""
        now_s = self._clock.monotonic()
        return {one.name: (not one.problem(now_s), one.silent_s(now_s)) for one in self._by_name(now_s)}

    def _by_name(self, now_s: float) -> Iterable[OperationHealth | ProgressHealth]:
        """Return one operation for each name."""
        found: dict[str, OperationHealth | ProgressHealth] = {}
        for one in self._operations:
            if one.name not in found or one.problem(now_s):
                found[one.name] = one
        return found.values()


def health_families(figures: dict[str, tuple[bool, float]]) -> Iterable[Metric]:
    """`HealthMonitor.figures()`."""
    healthy = GaugeMetricFamily(
        "tidelog_operation_healthy", "1 unless the last one failed or none is answered", labels=["operation"]
    )
    silent = GaugeMetricFamily(
        "tidelog_operation_silent_seconds", "How long one has waited without any success", labels=["operation"]
    )
    for name, (is_healthy, silent_s) in figures.items():
        healthy.add_metric([name], float(is_healthy))
        silent.add_metric([name], silent_s)
    return healthy, silent
