"""Mutations: protections of the product that can be switched off, to show that the simulator detects their absence.

Invariants: a mutation that no longer fits the code is an error, not a mutation that is never found.

May import: `tidelog.simulation` only by name, at run time. Entry: `tidelog.simulation.mutants.mutations.MUTATIONS`.
"""
