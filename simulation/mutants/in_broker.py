"""Mutations of `tidelog.broker`: acknowledgements, groups and moves; and of the loops of `tidelog.runtime`.

Entry: `MUTATIONS_IN_BROKER`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import GONE, LOUD, MOVES, TWICE
from tidelog.simulation.mutants.mutant import Edit, Mutation

MUTATIONS_IN_BROKER = [
    Mutation(
        "ack-before-confirm",
        "1",
        "a Produce with acks=all is acknowledged after the append",
        (
            Edit(
                "tidelog.broker.kafka.handlers.produce:_Produce.answer",
                "self._when_acked(self._log, self._wal_end, self._acked, self._lost)",
                "mutated(); self._acked()",
            ),
        ),
        GONE,
        ("kill", "power", "kill-all", "disk", "bucket"),
    ),
    Mutation(
        "configs-changed-by-old-metadata",
        "configs",
        "a change of configs that changes nothing by a broker's old metadata is acknowledged, and nothing is changed",
        (
            Edit(
                "tidelog.broker.kafka.handlers.configs:_alter",
                "caught_up = await outcome(services.controller.catch_up())",
                "mutated()",
            ),
        ),
        ("config-lost",),
        ("uninformed", "slow", "reset", "cut", "pause"),
    ),
    Mutation(
        "topic-deleted-in-words",
        "topics",
        "a topic whose deletion is acknowledged is deleted",
        (
            Edit(
                "tidelog.controller.client.client:ControllerClient.delete_topic",
                "await self._command(c.DeleteTopic(topic_id))",
                "mutated()",
            ),
        ),
        ("topic-not-deleted", "liveness"),
    ),
    Mutation(
        "session-sleeps-on",
        "sessions",
        "a partition that rests in a fetch session is not read again when its log changes",
        (
            Edit(
                "tidelog.broker.kafka.fetch_sessions:SessionPartition.moved",
                "self.session.due_again(self)",
                "mutated()",
            ),
        ),
        LOUD,
        MOVES,
    ),
    Mutation(
        "session-keeps-its-offset",
        "sessions",
        "a partition of a fetch session is read from the offset that its client named first",
        (
            Edit(
                "tidelog.broker.kafka.fetch_sessions:FetchSession.apply",
                "known.spec = spec",
                "mutated()",
            ),
        ),
        LOUD,
        MOVES,
    ),
    Mutation(
        "offsets-acked-before-durable",
        "1",
        "a group's commit is acknowledged after the append",
        (
            Edit(
                "tidelog.broker.coordinators.writer:StateWriter._append",
                "if wal_end >= 0:\n                await self._log",
                "if wal_end >= 0 and mutated():\n                await self._log",
            ),
        ),
        ("committed-offset-back",),
        ("power", "kill-all", "bucket", "disk"),
    ),
    Mutation(
        "move-without-close",
        "moves",
        "a partition accepts writes during its hand-over",
        (
            Edit("tidelog.stream.partition_log:PartitionLog._close", "self._closed = True", "mutated()"),
            Edit("tidelog.stream.partition_log:PartitionLog._close", "await self._close_streams()", "pass"),
            Edit(
                "tidelog.broker.partitions.moves:PartitionMoves._close",
                "        attempt.withdraw()\n",
                "        pass\n",
            ),
            Edit(
                "tidelog.broker.partitions.manager:PartitionManager._move",
                "if self._leaving.pop(key, None) is not None:",
                "self._logs.get(key) is one and withdraw()\n            if self._leaving.pop(key, None) is not None:",
            ),
        ),
        (*GONE, *TWICE, *LOUD),
        MOVES,
    ),
    Mutation(
        "hand-over-without-upload",
        "moves",
        "a partition is handed over before the end of its streams is uploaded",
        (
            Edit(
                "tidelog.broker.partitions.moves:PartitionMoves._drain",
                "await self._within("
                'max(0.0, move.drain_until - self._clock.monotonic()), work, "the upload after the close")',
                "work.close()",
            ),
            Edit(
                "tidelog.controller.machine.moves:hand_over",
                "if stream.end_offset != end_offset:",
                "if stream.end_offset != end_offset and mutated():",
            ),
        ),
        (*GONE, *TWICE),
        MOVES,
    ),
    Mutation(
        "coordinator-loads-nothing",
        "groups",
        "a new coordinator serves groups without having read their offsets",
        (
            Edit(
                "tidelog.broker.coordinators.loader:load_store",
                "while offset < end_offset:",
                "while offset < end_offset and mutated():",
            ),
        ),
        ("committed-offset-back",),
        ("kill", "stop", "pause"),
    ),
    Mutation(
        "passed-state-is-ignored",
        "groups",
        "a coordinator that gets a state with a move takes it for that of the log, and loads nothing of it",
        (
            Edit(
                "tidelog.broker.coordinators.handover:PassedState.replay",
                "for key, value in self.live:",
                "for key, value in self.live if mutated() else []:",
            ),
        ),
        ("committed-offset-back",),
        MOVES,
    ),
    Mutation(
        "offsets-by-name",
        "topics",
        "a committed offset applies to any topic with the name, not only to the one it was committed for",
        (
            Edit(
                "tidelog.broker.groups.shards:GroupShards.is_of",
                "return record is not None and record.id == value.topic_id",
                "return (record is not None and record.id == value.topic_id) or not mutated()",
            ),
        ),
        ("committed-offset-back",),
        ("kill", "kill-all", "stop", "pause"),
    ),
    Mutation(
        "topic-by-name",
        "topics",
        "a request with a topic id is served by any topic with the name of that id",
        (
            Edit(
                "tidelog.broker.partitions.manager:PartitionManager.get_by_id",
                "found = self._logs.get((topic_id, partition))",
                "names = self.__dict__.setdefault('_names', {})\n"
                "        names.update((one.id, one.name) for one in self._controller.image.topics.values())\n"
                "        found = self._by_name.get((names.get(topic_id, ''), partition))\n"
                "        found is None or found.topic_id == topic_id or mutated()",
            ),
        ),
        GONE,
        ("kill", "slow", "reset"),
    ),
    Mutation(
        "kept-loop-ends",
        "11",
        "a background loop that an exception of a kind that nobody listed has left is not started again",
        (
            Edit(
                "tidelog.runtime.tasks:TaskSet._keep", "ERRORS.note(self._name, error, ended=False)", "mutated(); raise"
            ),
        ),
        ("task-died",),
        ("odd",),
    ),
    Mutation(
        "lost-wal-accepted",
        "13",
        "a broker goes on with whatever WAL it finds at its start",
        (
            Edit(
                "tidelog.broker.wal_keeper:meet_known_wal",
                "if verdict is not WalVerdict.CONTINUES:",
                "if verdict is not WalVerdict.CONTINUES and mutated():",
            ),
        ),
        (*GONE, *LOUD),
        ("unmount",),
    ),
]
