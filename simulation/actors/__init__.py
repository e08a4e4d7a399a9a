"""The actors of a simulation: clients, consumers, groups, operators, zombies, and the faults.

Invariants: every result that an actor gets, with its time, is in the history; actors are drawn from the seed.

May import: `tidelog.simulation.world`, `checkers`, `tidelog.controller` and below. Entry:
`tidelog.simulation.actors.cast`.
"""
