"""The simulated world and what judges it: workloads, faults, histories and the checkers that read them.

Two harnesses stand on this package. `tidelog simulate` runs a whole cluster in one process with virtual time;
`tidelog chaos` drives real processes. Both write a *history* (`simulation.history`) of what clients asked for and were
told, and both are judged by the same checkers (`simulation.checkers`, also as `tidelog check HISTORY`).

It may import everything below it (broker, controller, stream, storage, runtime); only `tidelog` imports it.
"""
