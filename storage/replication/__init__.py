"""The hot tier's protocol: how the replicas of one WAL stay equal, and what their quorum has confirmed. Sans-IO.

Everything here is plain state: events in (a frame arrived, an acknowledgement, a tick), decisions out (send these
bytes, truncate there, ask the controller for that). Time is passed in as monotonic seconds and decides only when to
give up waiting, never what is safe (rule 16). Sockets, files and the controller are the caller's.

    configuration   the SyncStateSet and the write quorum, which change together; what they confirm and elect
    policy          what operators set, and the write quorum that follows from who is in sync
    master          a master's view: acknowledgements, confirm offset, changes of the configuration that it wants
    sending         what a master sends over one follower's connection, and when it drops it
    following       what a follower does with a master's epochs and bytes
    election        which promises elect whom
    frames          the bytes on the wire

Invariants: a byte is confirmed only when, in every configuration that may be in force, each set of members that may
elect a master holds it (`configuration`); the confirm offset never moves back; a follower truncates nothing below its
confirm offset; no batch crosses a master epoch.

May import: `tidelog.storage.wal`, `tidelog.runtime`. Entry: `Master`, `WalFollower`, `elected`. The reasons are in
docs/design/0015-hot-tier.md.
"""
