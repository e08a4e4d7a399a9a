"""Processes on one machine: `tidelog serve`, and the supervisor of `tidelog up` that keeps several of them running.

Invariants: one process at a time uses a data directory; a directory belongs to one cluster and records which.

May import: `tidelog.config` and the packages below. Entry: `tidelog.process.serve.NodeProcess`,
`tidelog.process.supervisor`.
"""
