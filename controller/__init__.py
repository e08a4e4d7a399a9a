"""The controller: one deterministic state machine over a replicated log that owns all metadata.

`controller.model` has the records, `controller.state` the commands, `controller.consensus` the fifth door (pysyncobj,
hardened), `controller.server` and `controller.client` the RPC, `controller.image` the copy that brokers follow.

May import: `stream`, `storage`, `runtime`. Entry: `controller.node.ControllerNode` to run one,
`controller.client.ControllerClient` to talk to one.
"""
