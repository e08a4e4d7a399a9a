"""The progress of a job on a terminal: the tasks of the stages that Spark runs for it.

A thread asks Spark's status tracker; where standard error is no terminal, there is no thread and no output.

Entry: `JobProgress`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tidelog.runtime.progress_bar import ProgressBar

if TYPE_CHECKING:
    from pyspark import SparkContext

INTERVAL_S = 0.5


class JobProgress:
    """A progress bar for the tasks of a job group, while the `with` statement lasts."""

    def __init__(self, context: SparkContext, group: str, description: str) -> None:
        self._tracker = context.statusTracker()
        self._group = group
        self._description = description
        self._bar = ProgressBar(description, unit="tasks", thread=False)
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> JobProgress:
        if self._bar.is_live:
            self._bar.__enter__()
            self._thread = threading.Thread(target=self._run, name="tidelog-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(10 * INTERVAL_S)
            self._bar.__exit__(*error)

    def describe(self, description: str) -> None:
        """Say what is being done now."""
        self._description = description

    def counts(self) -> tuple[int, int, int]:
        """Return the tasks that are done, that fail, and all tasks of the stages that Spark has begun."""
        done = failed = total = 0
        for job in self._tracker.getJobIdsForGroup(self._group):
            info = self._tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                about = self._tracker.getStageInfo(stage)
                if about is not None:
                    done, failed = done + about.numCompletedTasks, failed + about.numFailedTasks
                    total += about.numTasks
        return done, failed, total

    def _run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            try:
                done, failed, total = self.counts()
            except Exception:  # noqa: BLE001  # Spark has ended, in one of many ways: the job itself tells why
                return
            self._bar.describe(f"{self._description} ({failed} failed)" if failed else self._description)
            self._bar.update(done, total)
