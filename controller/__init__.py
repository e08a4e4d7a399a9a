"""The controller: one deterministic state machine over a replicated log that owns all metadata.

`controller.model` has the records, `controller.commands` and `controller.state` what may change them,
`controller.consensus` the fifth door (`controller.raft`: pysyncobj, hardened), `controller.rpc` the wire,
`controller.image` the copy that brokers follow. docs/formats/controller.md has every byte,
docs/design/0002-raft-hardening.md why Raft is made as it is.

May import: `stream`, `storage`, `runtime`. Entry: `controller.node.ControllerNode` to run one,
`controller.client.ControllerClient` to talk to one.
"""
