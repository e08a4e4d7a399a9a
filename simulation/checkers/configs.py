"""Check configs that administrators change (config-lost).

A config that is set is a register: what is told must come from a change that was not overwritten by another one
(entirely after it) before the question, and that began before the answer. One that is appended to is a set: everything
that was acknowledged before the question is in it.
"""

from __future__ import annotations

from collections import defaultdict

from tidelog.simulation.checkers.finding import Findings
from tidelog.simulation.checkers.history import Op
from tidelog.simulation.checkers.index import FOREVER, HistoryIndex


def check_configs(index: HistoryIndex, found: Findings) -> None:
    """Check what was told of each config."""
    by_config: dict[tuple[str, str], list[Op]] = defaultdict(list)
    for op in index.configs:
        by_config[op.topic, op.name].append(op)
    for (topic, name), ops in by_config.items():
        told = [op for op in ops if op.kind == "config" and op.ok]
        appends = [op for op in ops if op.kind == "append_config" and op.ok]
        sets = [op for op in ops if op.kind == "set_config" and op.outcome != "fail"]
        for asked in told:
            _check_list(topic, name, appends, asked, found)
            _check_register(topic, name, sets, asked, found)


def _check_list(topic: str, name: str, appends: list[Op], asked: Op, found: Findings) -> None:
    elements = asked.target.split(",")
    for op in appends:
        if op.ended_us < asked.began_us and op.target not in elements:
            said = f"{topic}: {op.target} was appended to {name}, and is not in {asked.target!r}"
            found.add("config-lost", said, op, asked, at=(topic, -1, op.index))


def _check_register(topic: str, name: str, sets: list[Op], asked: Op, found: Findings) -> None:
    done = [op for op in sets if op.ok and op.ended_us < asked.began_us]
    if not done:
        return
    latest = max(done, key=lambda op: op.began_us)
    for op in sets:
        ended_us = op.ended_us if op.ok else FOREVER
        if op.target == asked.target and ended_us >= latest.began_us and op.began_us <= asked.ended_us:
            return
    said = f"{topic}: {name} is {asked.target!r}, after {latest.target!r} was acknowledged"
    found.add("config-lost", said, latest, asked, at=(topic, -1, asked.index))
