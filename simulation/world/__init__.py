"""The simulated world: time, disk, network, bucket and consensus, and clusters of the real code on top of them.

Invariants: one seed gives one trace; the simulated interfaces guarantee no more than the real ones.

May import: `tidelog.simulation.checkers`, `tidelog.broker` and below. Entry:
`tidelog.simulation.world.cluster.SimCluster`.
"""
