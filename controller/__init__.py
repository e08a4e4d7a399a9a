"""The controller: a deterministic state machine over a replicated log that holds all metadata.

`tidelog.controller.model.records` has the records, `tidelog.controller.model.commands` and
`tidelog.controller.machine.state` their changes, `tidelog.controller.raft.consensus` the fifth interface (implemented
by `tidelog.controller.raft.thread` with pysyncobj), `tidelog.controller.rpc.connection` the wire protocol,
`tidelog.controller.image.image` the copy that brokers follow. docs/formats/controller.md specifies every byte,
docs/design/0002-raft-hardening.md the changes to pysyncobj.

Invariants: metadata changes only by commands of the replicated log; only the controller whose `BecomeActive` was
applied in the current term takes commands; a command is answered after a majority has it durably.

May import: `stream`, `storage`, `runtime`. Entry: `tidelog.controller.node.ControllerNode` to run a controller,
`tidelog.controller.client.client.ControllerClient` to connect to one.
"""
