"""A cluster's metadata from its bucket alone (docs/design/0014-rebuild-from-the-bucket.md).

`tidelog.controller.rebuild.source` reads the bucket; `tidelog.controller.rebuild.plan` decides which objects continue
which streams; `tidelog.controller.rebuild.adopt` changes the state to that of a cluster that has not started yet;
`tidelog.controller.rebuild.directory` writes it as a controller's directory.

Invariants: the bucket is only read; a plan is a function of what was read; no number that the old cluster may have used
is given out again.

May import: `raft`, `machine`, `model`. Entry: `tidelog.process.rebuild` ties the steps together.
"""
