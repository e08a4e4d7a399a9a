"""The simulated world and the checkers: workloads, faults, histories and the checkers that read them.

Two test harnesses use this package. `tidelog simulate` runs a whole cluster in one process with virtual time;
`tidelog chaos` runs real processes. Both record a *history* (`tidelog.simulation.checkers.history`) of the clients'
operations and their results, and apply the same checkers (`tidelog.simulation.checkers`, also available as
`tidelog check HISTORY`).

Invariants: one seed gives one trace; a finding is always a violation; the code under test is the product's own.

May import: everything below it (broker, controller, stream, storage, runtime); only `tidelog.cli` and `tidelog.chaos`
import it. Entry: `tidelog.simulation.run`.
"""
