"""The hot tier's shell: the sockets, files and timers around `tidelog.storage.replication`, for one broker.

    replica      one broker's replica of a set: promises, follows, or leads; one after the other
    master       a master's side: live bytes, reads for those behind, acknowledgements, the SyncStateSet
    served       one follower's connection, as its master serves it
    follower     a follower's side: connects, cuts, receives, acknowledges; again and again
    door         connections of followers that a listener has authenticated, to the master of their set
    connection   frames over one connection
    warm         the records that a follower keeps in memory, so that it can become master without reading
    inputs       what all of this gets from outside
    authority    what a master asks of the controllers, over their client
    duty         one replica, kept doing what the metadata say: it joins, promises, leads, follows

It is a room of the broker because it needs the sockets' handshake (`tidelog.controller.rpc`), the WAL, and the cache;
`tidelog.storage` has no sockets, and its rooms do not know each other. Of the controllers only `authority` and `duty`
know more than the handshake: what a master asks of them is the protocol `SetAuthority`, and what they decide is told to
a replica by method calls.

Invariants: what may be confirmed, cut, or begun is decided in `tidelog.storage.replication` and held by the WAL itself
(docs/design/0015-hot-tier.md), so nothing here that goes wrong, is late, or is cancelled loses a confirmed byte; bytes
on their way, kept for sending, and received and not written are bounded (rule 12); no time-out decides anything but
when to hang up, try again, or answer a producer.

May import: `tidelog.controller.rpc`, `tidelog.storage`, `tidelog.runtime`; `authority` and `duty` also
`tidelog.controller.client`, `image` and `model`. Entry: `tidelog.broker.replication.duty`,
`tidelog.broker.replication.replica`, `tidelog.broker.replication.door`, `tidelog.broker.replication.authority`.
"""
