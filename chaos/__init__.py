"""Real processes under faults: clusters of `tidelog serve` processes, real clients, and fault injection.

The clients' operations are recorded as a history and checked by `tidelog.simulation.checkers`.

Invariants: a run is bounded in time, every wait has a deadline, and every process and port of a run is released, also
when it fails.

May import: `tidelog.simulation` and the packages below it. Entry: `tidelog.chaos.run`.
"""
