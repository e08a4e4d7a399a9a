"""The ground of the house: what every other room stands on, and nothing that knows about streams or Kafka.

It holds three of the five doors to the world (`Clock`, `Disk`, `Network`; `ObjectStore` is in `storage`, `Consensus` in
`controller`), the kinds of errors, helpers for tasks and back-off, structured logs, and the framing of our own wire.
A simulator replaces the doors; nothing above this room calls `time`, opens a WAL file or a socket by itself.

May import: the standard library and third-party packages only. Entry: `runtime.errors`, then `runtime.clock`.
"""
