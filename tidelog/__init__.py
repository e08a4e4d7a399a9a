"""The top level of Tidelog: the command line, the configuration model and the process supervisor.

Invariants: nothing below it imports it; every value of the configuration is checked when it is loaded, and knows where
it came from.

May import: all other packages. Entry: `tidelog.cli.main` (the `tidelog` command), `tidelog.config.load`.
"""

from tidelog.runtime import version

__version__ = version.VERSION
