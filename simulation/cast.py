"""Who takes part in a simulation: topics and actors, drawn from the seed.

Entry: `start`.
"""

from __future__ import annotations

from simulation.consumers import Consumer
from simulation.groups import Member
from simulation.operator import Operator
from simulation.pipelined import PipelinedProducer
from simulation.topics import Deleter, TopicKeeper
from simulation.workload import Producer, Topic, Workload
from simulation.zombie import Zombie

GROUP = "g"
BY_ID = 0.7
"""The share of clusters with topics that come and go where they come again under old names."""
PIPELINED = 0.4
"""The share of idempotent producers that have several requests on their way."""


def _retention(workload: Workload) -> dict[str, str]:
    """By size, in half of the clusters: segments of 8 KiB roll and go within seconds."""
    if workload.rng.random() < 0.5:
        return {}
    return {"retention.bytes": str(workload.rng.choice((10_000, 40_000)))}


def start(workload: Workload) -> None:
    """Draw the actors and start them."""
    rng, partitions = workload.rng, workload.cluster.shape.partitions
    keeps_topics = rng.random() < 0.5
    workload.by_id = keeps_topics and rng.random() < BY_ID
    workload.topics = [Topic("t1", partitions, False), Topic("t2", rng.randint(1, 2), True, _retention(workload))]
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
        workload.spawn(Member(workload, GROUP).run(), f"member-{number}")
    workload.spawn(Deleter(workload).run(), "deleter")
    if keeps_topics:
        workload.spawn(TopicKeeper(workload).run(), "topics")
    if rng.random() < 0.6:
        workload.spawn(Operator(workload).run(), "operator")
    if rng.random() < 0.4:
        workload.spawn(Zombie(workload).run(), "zombie")
