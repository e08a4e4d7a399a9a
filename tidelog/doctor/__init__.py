"""`tidelog doctor` and `tidelog debug bundle`: what is wrong with a node or a cluster, why it matters, and the cure.

Facts are gathered first (`tidelog.doctor.here`, `tidelog.doctor.cluster`), as far as each can be had, and judged
afterwards by functions without I/O (`tidelog.doctor.rules_config` and the other rules). What each finding means and
what cures it is one table (`tidelog.doctor.advice`).

Invariants: what could not be looked at is told as such and never taken for well; every finding but `ok` has its
reason and its cure; nothing that is written holds a secret; probes leave nothing behind.

May import: `tidelog.process`, `tidelog.config` and the packages below. Entry: `tidelog.doctor.judge.judge`,
`tidelog.doctor.bundle.Bundle`.
"""
