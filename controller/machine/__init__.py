"""Deterministic state machine: takes commands, returns changes and results. No I/O, no clock, no randomness.

Invariants: rules 3 to 7 are asserted here for every command; a command is applied wholly or not at all; the same
commands give the same state on every member.

May import: `tidelog.controller.model`, the protocols and checks of `tidelog.storage` and `tidelog.stream`.
Entry: `tidelog.controller.machine.state.ControllerState`. There is one module of handlers for each family of commands.
"""
