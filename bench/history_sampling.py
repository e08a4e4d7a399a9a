"""CPU time and memory of a broker's own hour of history, which the console draws.

    python -m bench.history_sampling [--partitions 1000] [--groups 100] [--windows 3] [--seconds 10]

A broker and its controller in this process, with storage in memory, lead `--partitions` partitions and coordinate
`--groups` groups that have committed offsets of ten partitions each; nobody uses them. The time on the event loop that
the samples take is measured in windows that alternate with windows without samples, whose CPU time of the whole process
is what an idle broker takes. The ratio is that of an idle broker with samples to one without: under load it is smaller.

Samples are taken `HASTE` times as often as in production, so that a window has many of them, and the cost is divided by
that. Memory is what the rings hold at the end: names, and arrays that have their full size from the first sample on.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from unittest import mock

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from bench._common import Spread, quick, row
from tests.support.clients import wait_until
from tidelog.broker.telemetry import history
from tidelog.broker.telemetry.history import FIGURES_INTERVAL_S, OFFSETS_INTERVAL_S, HistoryRecorder
from tidelog.testing import LocalBroker

HASTE = 10
PARTITIONS_A_GROUP = 10
TOPIC = "bench"
GOAL_US = 1_000
"""Of CPU a second: a thousandth of a core."""


class _Timed:
    """The broker's recorder, with the time that its samples take, and a switch."""

    def __init__(self) -> None:
        self.is_on = True
        self.spent_s = 0.0
        self.held_bytes = 0
        self._tick = HistoryRecorder.tick

    def tick(self, recorder: HistoryRecorder) -> None:
        """In place of `HistoryRecorder.tick`, on the event loop's thread."""
        if not self.is_on:
            return
        began = time.thread_time()
        self._tick(recorder)
        self.spent_s += time.thread_time() - began
        self.held_bytes = recorder.held_bytes


def _commit(broker: LocalBroker, groups: int, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    for number in range(groups):
        places = [
            TopicPartition(TOPIC, (number * PARTITIONS_A_GROUP + each) % partitions, number)
            for each in range(PARTITIONS_A_GROUP)
        ]
        wanted = ConsumerGroupTopicPartitions(f"group-{number}", places)
        (future,) = admin.alter_consumer_group_offsets([wanted]).values()
        future.result(60)


def _window(timed: _Timed, seconds: float, *, is_on: bool) -> tuple[float, float]:
    """Return seconds of CPU a second: of the process, and of the samples, at the usual intervals."""
    timed.is_on, timed.spent_s = is_on, 0.0
    began, used = time.monotonic(), time.process_time()
    time.sleep(seconds)  # the window that is measured
    passed = time.monotonic() - began
    return (time.process_time() - used) / passed, timed.spent_s / passed / HASTE


def measure(args: argparse.Namespace) -> tuple[list[float], list[float], int]:
    """Return the CPU time a second of an idle broker without samples and of the samples, and their bytes."""
    timed = _Timed()
    with ExitStack() as stack:
        usual = {"FIGURES_INTERVAL_S": FIGURES_INTERVAL_S, "OFFSETS_INTERVAL_S": OFFSETS_INTERVAL_S}
        for name, interval_s in usual.items():
            stack.enter_context(mock.patch.object(history, name, interval_s / HASTE))
        stack.enter_context(mock.patch.object(HistoryRecorder, "tick", lambda recorder: timed.tick(recorder)))
        broker = stack.enter_context(LocalBroker())
        broker.create_topic(TOPIC, partitions=args.partitions)
        _commit(broker, args.groups, args.partitions)
        series = min(args.partitions, 1000) + min(args.groups * PARTITIONS_A_GROUP, 1000)
        wait_until(lambda: timed.held_bytes > series * history.OFFSETS_SAMPLES * 8, "all series are sampled", 60)
        idle, samples = [], []
        for _ in range(args.windows):
            idle.append(_window(timed, args.seconds, is_on=False)[0])
            samples.append(_window(timed, args.seconds, is_on=True)[1])
        return idle, samples, timed.held_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=1_000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--windows", type=int, default=1 if quick() else 3)
    parser.add_argument("--seconds", type=float, default=3.0 if quick() else 10.0)
    args = parser.parse_args()
    idle, samples, held_bytes = measure(args)
    without, own = Spread.of(each * 1e6 for each in idle), Spread.of(each * 1e6 for each in samples)
    ratio = (without.median + own.median) / without.median
    row(
        f"an hour of history, {args.partitions:,} partitions and {args.groups} groups",
        f"{own.text('µs', 1)} of CPU a second, {held_bytes / 1e6:.1f} MB",
        limit=f"an idle broker without it, {without.text('µs')} a second",
        ratio=f"{ratio:.4f}",
        goal=f"≤ {GOAL_US:,} µs a second",
        holds=own.median <= GOAL_US,
    )


if __name__ == "__main__":
    main()
