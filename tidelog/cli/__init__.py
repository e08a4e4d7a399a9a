"""The command line: a group of subcommands that are imported on use, and their output for people and scripts.

Invariants: an error message states the problem and the next step, and each kind of error has its exit code;
`tidelog --help` imports no client and no server.

May import: everything below; nothing imports it. Entry: `tidelog.cli.entry.main`, then `tidelog.cli.main.main`.
"""
