"""Mutations of snapshots and branches of topics, what they hold, and where a branch begins; and of what readers outside
the cluster are told.

They are found where `tidelog.simulation.actors.brancher` is at work, in a third of the clusters at the newest level; or
`tidelog.simulation.actors.outside_reader`, in half of all.
Entry: `MUTATIONS_IN_SNAPSHOTS`.
"""

from __future__ import annotations

from tidelog.simulation.mutants.findings import LOUD
from tidelog.simulation.mutants.mutant import Edit, Mutation

GONE = ("deleted-under-reader", "held-objects", "branch-differs", "object-missing", "false-damage", *LOUD)
"""What shows that objects are gone that somebody holds."""
_INDEX = "tidelog.controller.machine.index:MetadataIndex._drop_unheld"

MUTATIONS_IN_SNAPSHOTS = [
    Mutation(
        "full-answer-told-complete",
        "readers",
        "an answer about slices that is full does not say where the next question begins",
        (
            Edit(
                "tidelog.controller.image.lookup:look_up",
                "if left == 0 and reached < min(row.end, row.committed_end):",
                "if left == 0 and reached < min(row.end, row.committed_end) and mutated():",
            ),
        ),
        ("manifest-differs",),
        ("kill",),
    ),
    Mutation(
        "held-objects-destroyed",
        "6",
        "objects that a snapshot or a branch holds are destroyed when their stream does not need them any more",
        (
            Edit(
                _INDEX,
                "if gone and self.pins.is_held(stream_id):",
                "if gone and self.pins.is_held(stream_id) and mutated():",
            ),
        ),
        GONE,
        ("kill",),
    ),
    Mutation(
        "source-trims-branch",
        "6",
        "what is deleted from a topic is deleted from its branches, too",
        (
            Edit(
                _INDEX,
                "self.pins.holds(stream_id, *each[:2])",
                "any(name or mutated() for name, _ in self.pins.holders(stream_id, *each[:2]))",
            ),
        ),
        GONE,
        ("kill",),
    ),
    Mutation(
        "held-objects-compacted",
        "7",
        "objects that a snapshot holds are replaced by compacted ones",
        (
            Edit(
                "tidelog.broker.objects.compaction_view:ImageView.objects",
                "if not image.is_held(object_id) and",
                "if (not image.is_held(object_id) or not mutated()) and",
            ),
            Edit(
                "tidelog.controller.machine.compaction:_input",
                "if holder is not None:",
                "if holder is not None and mutated():",
            ),
        ),
        ("deleted-under-reader",),
        ("kill",),
    ),
    Mutation(
        "branch-reads-past-cut",
        "branches",
        "a branch reads on in the objects of its source where its own offsets begin",
        (
            Edit(
                "tidelog.controller.image.image:Image.resolve",
                "min(end_offset, within) if within else end_offset",
                "min(end_offset, within) if within and (end_offset <= within or mutated()) else end_offset",
            ),
        ),
        ("branch-differs",),
        ("kill", "stop"),
    ),
    Mutation(
        "branch-keeps-producers",
        "branches",
        "a branch takes the producers of its source for its own",
        (
            Edit(
                "tidelog.stream.partition_log:PartitionLog.open",
                "if led.is_branch and not state.load_branch():",
                "if led.is_branch and not state.load_branch() and mutated():",
            ),
        ),
        ("branch-differs",),
        ("kill",),
    ),
]
