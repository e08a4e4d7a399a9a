"""The replicated log of the controllers: the interface `Consensus`, and its implementation with pysyncobj.

Invariants: votes, appends and acknowledgements are sent only after what they promise is durable; a peer's bytes are
decoded only after it has authenticated itself, and are never unpickled.

May import: `tidelog.controller.rpc` (the handshake), `model`, `tidelog.runtime`. Entry:
`tidelog.controller.raft.consensus.Consensus`, made by `tidelog.controller.raft.thread.RaftConsensus`; why Raft is
hardened this way is in docs/design/0002-raft-hardening.md. Private: `core`, `member`, `transfer`, `transport` and
`links`; `core` alone knows pysyncobj's private names. `surroundings` is what a member reaches the world by, so that the
simulator runs the same code (docs/design/0012-raft-in-the-simulator.md).
"""
