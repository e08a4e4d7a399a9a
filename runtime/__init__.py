"""Foundations for all other packages, independent of streams and Kafka.

It holds three of the five interfaces (`Clock`, `Disk`, `Network`; `ObjectStore` is in `storage`, `Consensus` in
`controller`), the base classes of errors, helpers for tasks and back-off, structured logs, and the framing of Tidelog's
own wire protocol. A simulator replaces the interfaces. No other package calls `time`, opens a WAL file or opens a
socket directly, except Raft's own thread (`tidelog.controller.raft`) and libraries (aiohttp, the S3 clients).

Invariants: it knows nothing of streams, Kafka or clusters; every error says whether a retry can help, and with which
exit code a process ends.

May import: the standard library and third-party packages only. Entry: `tidelog.runtime.errors`, then
`tidelog.runtime.clock`.
"""
