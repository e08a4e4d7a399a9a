"""The operator of replica sets in a simulation: begins elections, sets priorities, adds and removes members.

It does with the controllers' RPC what the admin HTTP of a broker does for `tidelog replica-set elect`, `set-priority`,
`add-member` and `remove-member`. What it leaves behind is a cluster that settles: it removes no member without which a
set has fewer than its policy wants. Entry: `SetOperator.run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from tidelog.controller.model.records import NO_BROKER, ReplicaSetRecord
from tidelog.controller.model.replication import has_several, replicas_without
from tidelog.runtime.errors import TidelogError
from tidelog.simulation.actors.workload import Workload

COMMAND_S = 6.0
LEARNER = 0.3
"""The share of added replicas that are learners."""
PRIORITIES = (None, -1, 0, 1)


class SetOperator:
    """One operator, of a cluster with replicated WALs."""

    def __init__(self, workload: Workload) -> None:
        self._w = workload
        self._rng = workload.random()
        self._client = workload.cluster.controller_client("set-operator", workload.random(), COMMAND_S)

    async def run(self) -> None:
        """Run until the end, then remove the learners: nobody is promoted by itself in place of a member that goes."""
        w, rng = self._w, self._rng
        await self._client.start()
        while not w.closing:
            await asyncio.sleep(rng.uniform(1.0, 8.0))
            sets = [each for _, each in sorted(self._client.image.replica_sets.items()) if has_several(each)]
            if sets:
                await rng.choice((self._elect, self._prioritize, self._add, self._remove))(rng.choice(sets))
        while learners := [(row.id, each) for row in self._client.image.replication.values() for each in row.learning]:
            for set_id, broker_id in learners:
                work = self._client.replica_sets.remove_replica(set_id, broker_id)
                await self._do(f"removal of learner {broker_id} from set {set_id}", work)
            await asyncio.sleep(0.5)
        await self._client.close()

    async def _elect(self, record: ReplicaSetRecord) -> None:
        designated = self._rng.choice((NO_BROKER, *record.sync_state_set))
        sets = self._client.replica_sets
        work = sets.begin_election(record.id, record.master_epoch, "an operator", designated=designated)
        await self._do(f"election of {designated} in set {record.id}", work)

    async def _prioritize(self, record: ReplicaSetRecord) -> None:
        broker_id, priority = self._rng.choice(record.members), self._rng.choice(PRIORITIES)
        work = self._client.replica_sets.set_priority(record.id, broker_id, priority)
        await self._do(f"priority {priority} of broker {broker_id} in set {record.id}", work)

    async def _add(self, record: ReplicaSetRecord) -> None:
        row = self._client.image.replication[record.id]
        others = [each for each in sorted(self._client.image.brokers) if each not in row.assigned]
        if others:
            broker_id, is_learner = self._rng.choice(others), self._rng.random() < LEARNER
            work = self._client.replica_sets.assign_replica(record.id, broker_id, is_learner=is_learner)
            await self._do(f"{'learner' if is_learner else 'member'} {broker_id} of set {record.id}", work)

    async def _remove(self, record: ReplicaSetRecord) -> None:
        row, sets = self._client.image.replication[record.id], self._client.replica_sets
        broker_id = self._rng.choice(sorted(row.assigned or record.members))
        left = len(replicas_without(record, row, broker_id))
        if broker_id in row.learning or left >= row.policy.total_replicas:
            in_sync = broker_id in record.sync_state_set
            remove = sets.retire_replica if in_sync else sets.remove_replica
            await self._do(f"removal of {broker_id} from set {record.id}", remove(record.id, broker_id))

    async def _do(self, what: str, work: Awaitable[object]) -> None:
        told = what
        try:
            await work
        except TidelogError as error:
            told = f"{what} failed: {type(error).__name__}"
        self._w.cluster.note("operator", told)
