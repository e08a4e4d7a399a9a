"""Facts about this process and its machine, for `tidelog doctor` and `tidelog debug bundle`.

Each module gathers one kind of fact, and says what it saw, not whether that is well: `tidelog.doctor` judges. A fact
that cannot be had is told as such, with the system's reason.

Invariants: gathering is bounded in time and size, changes nothing and leaves no file behind; no fact holds a secret.

May import: `tidelog.runtime`. Entry: `machine_facts`, `probe_disk`, `file_facts`, `Tries`, `stacks`.
"""
