"""Work of the active controller: sessions, elections, drains, the balancer, quorum changes, deletion of objects.

Plans (`balance_plan`, `drain_plan`) are pure functions of the metadata and the load; their decisions become commands.
`duties` derives the due commands without I/O; `lifecycle` and `balancer` propose commands.

Invariants: a decision takes effect only as a command of the replicated log, which the state machine checks again; soft
state (sessions, load reports) is never replicated and never decides who may acknowledge (rule 16).

May import: `tidelog.controller.raft`, `image`, `machine`, `rpc`, `model`. Entry:
`tidelog.controller.active.lifecycle.Lifecycle`.
"""
