"""The subcommands of `tidelog`, one module per family.

Invariants: `tidelog.cli.main` imports a module only when its subcommand is used, and a module imports clients and
servers only inside functions, so that `tidelog --help` is quick.

May import: `tidelog.cli` and everything below. Entry: `tidelog.cli.main.COMMANDS` names the function of each
subcommand.
"""
