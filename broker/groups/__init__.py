"""Consumer groups: the classic protocol's state machine, the offsets topic's record formats, and the coordinator shell.

The state machine does no I/O. May import: `broker.services` and the rooms below. Entry: `broker.groups.coordinator`.
"""
