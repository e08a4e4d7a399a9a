"""Where the process of a `tidelog` command begins: Ctrl-C ends it with its exit code also while modules are imported.

Entry: `main`.
"""

import sys


def main() -> None:
    """Run the command line and exit with its exit code."""
    try:
        from tidelog.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
