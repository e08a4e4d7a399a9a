"""The face of Tidelog: the command line, the configuration model and the process supervisor.

May import everything below it. Entry: `tidelog.cli.main` (the `tidelog` command), `tidelog.config.load`.
"""

__version__ = "0.1.0"
