"""Consumer groups: the classic protocol's state machine, the offsets topic's record formats, and the coordinator.

Invariants: a group is served only by the leader of its partition of the offsets topic; a request of another generation
or of an unknown member is refused; an offset is acknowledged when its record is. The state machine is sans-I/O.

May import: `tidelog.broker.kafka.services` and the packages below. Entry:
`tidelog.broker.groups.coordinator`.
"""
