"""The commands of `tidelog`, one module for each family.

`tidelog.cli` imports a module only when its command is used: `tidelog --help` must not pay for clients and servers.
Entry: `tidelog.cli.COMMANDS` names the function of each command.
"""
