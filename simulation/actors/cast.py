"""The topics and actors of a simulation, drawn from the seed.

Entry: `start`.
"""

from __future__ import annotations

from typing import NamedTuple

from tidelog.simulation.actors.bank import Bank
from tidelog.simulation.actors.compacted import CompactedTopic
from tidelog.simulation.actors.configurer import Configurer, draw_last_changes
from tidelog.simulation.actors.consumers import Consumer
from tidelog.simulation.actors.groups import MemberActor
from tidelog.simulation.actors.lookups import Seeker
from tidelog.simulation.actors.operator import Operator
from tidelog.simulation.actors.outside_reader import OutsideReader
from tidelog.simulation.actors.pipelined import PipelinedProducer
from tidelog.simulation.actors.set_operator import SetOperator
from tidelog.simulation.actors.topics import Deleter, Grower, TopicKeeper
from tidelog.simulation.actors.workload import Producer, Topic, Workload
from tidelog.simulation.actors.zombie import Zombie

GROUP = "g"
BY_ID = 0.7
"""Of the clusters that create and delete topics: the share in which names are reused."""
PIPELINED = 0.4
"""The share of idempotent producers with several requests in flight."""
CONFIGURED = 0.5
"""The share of clusters in which administrators change a topic's configs."""
GROWERS = 0.3
"""The share of clusters in which partitions are added to a topic."""
SEEKERS = 0.5
"""The share of clusters with a client that looks up offsets by time, and the ends of leader epochs."""
SETS_OPERATED = 0.5
"""The share of clusters with replicated WALs in which an operator changes replica sets."""


def _retention(workload: Workload) -> dict[str, str]:
    """Retention by size, in half of the clusters: segments of 8 KiB are rolled and deleted within seconds."""
    if workload.rng.random() < 0.5:
        return {}
    return {"retention.bytes": str(workload.rng.choice((10_000, 40_000)))}


class Cast(NamedTuple):
    """Those with something to do when all has ended, where there are any."""

    bank: Bank | None
    table: CompactedTopic | None
    seeker: Seeker | None
    configured: Topic | None
    """The topic whose configs somebody changes."""


def start(workload: Workload) -> Cast:
    """Draw the actors and start them."""
    rng, partitions = workload.rng, workload.cluster.shape.partitions
    keeps_topics = rng.random() < 0.5
    workload.by_id = keeps_topics and rng.random() < BY_ID
    interval = {"index.interval.bytes": str(workload.random().choice((0, 200, 4096)))}
    workload.topics = [
        Topic("t1", partitions, False, interval),
        Topic("t2", rng.randint(1, 2), True, _retention(workload) | interval),
    ]
    for topic in workload.topics:
        workload.spawn(workload.create(topic), f"create-{topic.name}")
    for number in range(rng.randint(1, 3)):
        pipelined = rng.random() < PIPELINED
        producer = PipelinedProducer(workload) if pipelined else Producer(workload, idempotent=True)
        workload.spawn(producer.run(), f"producer-{number}")
    if rng.random() < 0.5:
        workload.spawn(Producer(workload, idempotent=False).run(), "plain-producer")
    for number in range(rng.randint(1, 2)):
        workload.spawn(Consumer(workload).run(), f"consumer-{number}")
    for number in range(rng.randint(0, 3)):
        workload.spawn(MemberActor(workload, GROUP).run(), f"member-{number}")
    workload.spawn(Deleter(workload).run(), "deleter")
    if keeps_topics:
        workload.spawn(TopicKeeper(workload).run(), "topics")
    if rng.random() < 0.6:
        workload.spawn(Operator(workload).run(), "operator")
    if workload.cluster.shape.replicas > 1 and rng.random() < SETS_OPERATED:
        workload.spawn(SetOperator(workload).run(), "set-operator")
    if rng.random() < 0.4:
        workload.spawn(Zombie(workload).run(), "zombie")
    if rng.random() < 0.5:
        workload.spawn(OutsideReader(workload, "outside-reader").run(), "outside-reader")
    shape = workload.cluster.shape
    bank = Bank.open(workload, workload.random()) if shape.bank else None
    table = CompactedTopic.open(workload, workload.random()) if shape.table else None
    others = (*(bank.topics if bank else ()), *(table.topics if table else ()))
    seeker = Seeker(workload, others) if rng.random() < SEEKERS else None
    if seeker is not None:
        workload.spawn(seeker.run(), "seeker")
    if rng.random() < GROWERS:
        workload.spawn(Grower(workload, rng.choice(workload.topics[:2])).run(), "grower")
    configured = workload.topics[0] if rng.random() < CONFIGURED else None
    if configured is not None:
        until_us = draw_last_changes(workload.random())
        for number in range(rng.randint(1, 2)):
            workload.spawn(Configurer(workload, configured, until_us).run(), f"configurer-{number}")
    return Cast(bank, table, seeker, configured)
