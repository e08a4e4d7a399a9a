"""Plain data: records, commands, errors, addresses, load reports and settings of the controller.

Invariants: everything that is stored or sent has a type here, and its bytes are in docs/formats/controller.md.

May import: the protocols of `tidelog.storage` and `tidelog.stream`, `tidelog.runtime`.
Entry: `tidelog.controller.model.records`, `tidelog.controller.model.commands`.
"""
