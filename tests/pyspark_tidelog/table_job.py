"""`tidelog spark table`, whose driver dies at a step (`kill -9`): the steps are those of `table_steps.ingest`.

python -m tests.pyspark_tidelog.table_job STEP NUMBER spark table …    dies when it comes to STEP for the NUMBERth time
"""

from __future__ import annotations

import os
import signal
import sys

from tests.pyspark_tidelog.table_steps import at_steps
from tidelog.cli import main as command


def main() -> None:
    step, number = sys.argv[1], int(sys.argv[2])
    seen = 0

    def happen(now: str) -> None:
        nonlocal seen
        seen += now == step
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.argv[1:] = sys.argv[3:]
    with at_steps(happen):
        command.main()


if __name__ == "__main__":
    main()
