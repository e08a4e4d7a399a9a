"""Administrators who change configs of one topic, each at any broker, and compare at the end what all brokers tell.

They set some configs to few values, so that many changes change nothing, and append to one that is a list (KIP-339).
The answers are in the history; `tidelog.simulation.checkers.configs` judges them.

Entry: `Configurer.run`; `audit_configs` at the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import NamedTuple

from tidelog.controller.model.levels import CONFIG_BASE_LEVEL
from tidelog.simulation.actors.client import Address, Client, Lost
from tidelog.simulation.actors.kafka import FieldReader, Request, array, text
from tidelog.simulation.actors.workload import ASK_S, Actor, Topic, Workload
from tidelog.simulation.world.settings import KAFKA_PORT

SCALARS = {
    "index.interval.bytes": ("0", "200", "4096"),
    "file.delete.delay.ms": ("1", "2"),
    "flush.messages": ("1", "2"),
    "flush.ms": ("1", "2"),
    "local.retention.bytes": ("-2", "2"),
    "preallocate": ("true", "false"),
    "segment.index.bytes": ("4096", "8192"),
    "segment.jitter.ms": ("0", "1"),
    "unclean.leader.election.enable": ("true", "false"),
}
"""Configs that are set, and to what; all but the first have no effect."""
LIST = "leader.replication.throttled.replicas"
APPENDS = 0.3
"""The share of changes that append to the list."""
SET, APPEND = 0, 2
TOPIC = 2


class Configured(NamedTuple):
    """The result of DescribeConfigs for one topic."""

    error: int
    values: dict[str, str]


def alter_config(topic: str, name: str, value: str, operation: int) -> Request:
    """Returns the error of IncrementalAlterConfigs v0."""
    config = text(name) + bytes([operation]) + text(value)
    body = array([bytes([TOPIC]) + text(topic) + array([config])]) + b"\0"

    def read(r: FieldReader) -> int:
        r.i32()
        r.i32()
        return r.i16()

    return Request(44, 0, body, read)


def describe_configs(topic: str, names: tuple[str, ...]) -> Request:
    """Returns `Configured`, by DescribeConfigs v1."""
    body = array([bytes([TOPIC]) + text(topic) + array(map(text, names))]) + b"\0"

    def read(r: FieldReader) -> Configured:
        r.i32()
        r.i32()
        error = r.i16()
        r.text()
        r.i8()
        r.text()

        def config() -> tuple[str, str]:
            found = r.text(), r.text()
            for _ in range(3):
                r.i8()
            r.array(lambda: (r.text(), r.text(), r.i8()))
            return found

        return Configured(error, dict(r.array(config)))

    return Request(32, 1, body, read)


def draw_last_changes(rng: random.Random) -> dict[str, int]:
    """Return until when each config is set, in microseconds: the last changes should meet faults."""
    return {name: rng.randint(5_000_000, 60_000_000) for name in SCALARS}


class Configurer(Actor):
    """Changes one config after the other."""

    def __init__(self, workload: Workload, topic: Topic, until_us: Mapping[str, int]) -> None:
        super().__init__(workload)
        self._topic = topic
        self._until_us = until_us
        self._appends = workload.cluster.shape.level >= CONFIG_BASE_LEVEL
        """Below it, of two changes at the same time one may be lost."""
        self._pause_s = self._rng.uniform(0.1, 2.0)

    async def run(self) -> None:
        """Run until the end."""
        w, rng = self._w, self._rng
        while not w.closing:
            await asyncio.sleep(rng.expovariate(1 / self._pause_s))
            if not self._topic.exists:
                continue
            if self._appends and rng.random() < APPENDS:
                (value,) = w.values(1)
                await self._alter(LIST, f"{value}:1", APPEND)
            else:
                name = rng.choice(list(SCALARS))
                if w.now_us() < self._until_us[name]:
                    await self._alter(name, rng.choice(SCALARS[name]), SET)
        self._client.close()

    async def _alter(self, name: str, value: str, operation: int) -> None:
        w, topic = self._w, self._topic
        op = w.history.begin(
            "append_config" if operation == APPEND else "set_config", self._process, w.now_us(), topic=topic.name,
            name=name, target=value,
        )  # fmt: skip
        try:
            if self._rng.random() < 0.3:
                await self._client.refresh(topic.name)
            error = await self._client.ask_any(alter_config(topic.wire, name, value, operation), ASK_S)
        except Lost as lost:
            w.history.end(op, "info", w.now_us(), error=str(lost))
            return
        w.history.end(op, "info" if error else "ok", w.now_us(), error=f"error {error}" if error else "")


async def audit_configs(workload: Workload, topic: Topic) -> None:
    """Record what each broker tells of the topic, when all changes have ended."""
    client = workload.client()
    for broker in workload.cluster.brokers:
        if broker.belongs:
            await _record(workload, client, topic, (broker.host, KAFKA_PORT))
    client.close()


async def _record(workload: Workload, client: Client, topic: Topic, address: Address) -> None:
    w, process = workload, workload.process()
    while True:
        began_us = w.now_us()
        try:
            found: Configured = await client.ask(address, describe_configs(topic.wire, (*SCALARS, LIST)), ASK_S)
        except Lost:
            found = Configured(-1, {})
        if not found.error:
            break
        await asyncio.sleep(0.2)
    for name, value in found.values.items():
        op = w.history.begin("config", process, began_us, topic=topic.name, name=name, target=value)
        w.history.end(op, "ok", w.now_us())
