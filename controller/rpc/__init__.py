"""RPC of the controllers: connections, the handshake with the cluster's secret, and the listener.

Invariants: with credentials nothing is decoded before the peer has proved that it knows the secret; requests in flight,
waiting bytes and connections are bounded (rule 12).

May import: `tidelog.controller.model`, `tidelog.runtime`. Entry: `tidelog.controller.rpc.connection`,
`tidelog.controller.rpc.listener.RpcListener`.
"""
