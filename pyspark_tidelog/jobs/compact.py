"""Major compaction by Spark: brokers plan and commit, executors read small objects and write large ones.

In each round the brokers that lead replica sets say which of their objects belong together (as for their own
compaction, but whatever the objects' age), and executors rewrite them, a wave of tasks at a time. When a wave is
written, a broker commits each of its tasks by one command of the controller, which checks rule 7. Rounds follow until
nothing is left that can be done.

The driver has the token of administrators. Executors have the bucket, and the ids that the driver had prepared for them
(`pyspark_tidelog.rewriting`).

Killed at any moment: what was committed stays, the ids of the rest expire, and their objects are deleted by the
controller. The next run plans from the objects that there are. A task whose objects something else replaced meanwhile
(a broker's compaction, retention, a deleted topic, another run) is refused as a whole, and changes nothing.

Entry: `plan`, `run`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import msgspec

from pyspark_tidelog.jobs.compact_choice import CompactionChoice
from pyspark_tidelog.jobs.frame import ClusterAccess, RunningJob, spark_job
from pyspark_tidelog.rewriting import (
    COMPARE_BYTES,
    RewriteReport,
    RewriteTask,
    TaskProblem,
    count_outputs,
    needs_count,
    rewrite,
)
from tidelog.runtime.errors import ConfigError, InvalidInput, NotFound, TidelogError, Unavailable
from tidelog.storage.compaction.facts import ObjectFacts
from tidelog.storage.compaction.plan import TaskKind
from tidelog.storage.compaction.reader import READ_BYTES
from tidelog.storage.objects.reader import TAIL_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

DEFAULT_MAX_OBJECTS = 256
"""Inputs of one task, at most: the smaller the objects, the more of them an output of the target size has."""
DEFAULT_IDS_TTL_S = 3_600
"""For how long ids are prepared, from before a wave is written until it is committed."""
IDS_AT_ONCE = 1_024
"""Ids of one command."""
WAVE_RANGES = 200_000
"""Stream ranges of the tasks of one wave, which the driver holds: some 50 MB."""
TASKS_PER_SLOT = 2
"""Tasks of one wave for each task that Spark runs at a time: the more, the later a wave is committed."""
MAX_ROUNDS = 100
COMMIT_S = 120.0
"""For how long a commit is asked for again while no broker carries it out."""
SHOWN = 20
"""Problems that a result lists."""


@dataclass(frozen=True)
class CompactOptions:
    """What to compact."""

    cluster: ClusterAccess
    admin_token: str = field(default="", repr=False)
    """The token of administrators; empty where the cluster has no secret. It stays on the driver."""
    topics: tuple[str, ...] = ()
    """Only objects with data of these topics (which are rewritten as a whole); none: of all."""
    target_bytes: int = 0
    """Size of the outputs, 4 KiB to 1 GiB; 0: as the brokers have it. An executor's task takes three times that."""
    max_objects: int = DEFAULT_MAX_OBJECTS
    ids_ttl_s: int = DEFAULT_IDS_TTL_S


@dataclass(frozen=True)
class CompactPlan:
    """The first round: what `run` would begin with. Later rounds put together what is small still."""

    cluster_id: str
    tasks: int
    kinds: dict[str, int]
    """Tasks by kind: gather, merge, sort, shed (`tidelog.storage.compaction.plan`)."""
    objects: int
    """To be read and replaced."""
    bytes: int
    """Of these objects."""
    estimated_bytes: int
    """To be written."""
    requests: int
    """Of the bucket, about."""
    problems: tuple[str, ...]
    """Brokers that did not say what they would compact."""


@dataclass(frozen=True)
class CompactResult:
    """What was done."""

    cluster_id: str
    rounds: int
    tasks: int
    """Committed."""
    refused: int
    """Not committed, because something else had replaced an object meanwhile, or all of it was trimmed or deleted."""
    damaged: int
    """Not committed, because an object is damaged or missing, which stays as it is."""
    failed: int
    """Not committed, because the bucket or the brokers did not do what was asked."""
    inputs: int
    outputs: int
    read_bytes: int
    written_bytes: int
    problems: tuple[str, ...]
    """The first `SHOWN` of them."""


def plan(options: CompactOptions) -> CompactPlan:
    """Ask what would be compacted. Raises `ConfigError`, `NotFound`, `Unavailable`."""
    brokers = _Brokers(options)
    tasks = brokers.plan(())
    kinds = Counter(task.kind for task in tasks)
    return CompactPlan(
        brokers.cluster_id,
        len(tasks),
        dict(sorted(kinds.items())),
        sum(len(task.inputs) for task in tasks),
        sum(task.bytes for task in tasks),
        sum(task.estimated_bytes for task in tasks),
        sum(_requests(task) for task in tasks),
        tuple(brokers.problems[:SHOWN]),
    )


def run(spark: SparkSession, options: CompactOptions) -> CompactResult:
    """Compact until nothing is left that can be done. Raises `ConfigError`, `NotFound`, `Unavailable`."""
    what = ", ".join(options.topics) or "all topics"
    with spark_job(spark, "compact", f"compact objects of {what}") as job:
        return _Compaction(spark, options, job).run()


@dataclass(frozen=True)
class _Planned:
    """A task as a broker plans it."""

    kind: TaskKind
    inputs: tuple[int, ...]
    bytes: int
    estimated_bytes: int
    target_bytes: int
    stream_bytes: int
    block_bytes: int


def _requests(task: _Planned) -> int:
    """Estimate the requests of a task: all of a small object comes with its index."""
    objects = len(task.inputs)
    outputs = max(1, round(task.estimated_bytes / task.target_bytes))
    reads = objects if task.kind == "merge" else 2 * objects
    if task.bytes > objects * TAIL_BYTES:
        reads += objects + task.bytes // READ_BYTES
    compared = outputs + task.estimated_bytes // COMPARE_BYTES
    return reads + 2 * outputs + compared


class _Brokers:
    """The brokers' admin HTTP, as an administrator has it."""

    def __init__(self, options: CompactOptions) -> None:
        self._options = options
        cluster = options.cluster.connect()
        self._lookups = replace(cluster.lookups(), token=self._options.admin_token)
        self._urls = self._lookups.urls
        self.bucket = cluster.bucket()
        self.cluster_id = ""
        self.problems: list[str] = []

    def _ask(self, path: str, body: object = None, urls: Sequence[str] = ()) -> Any:
        try:
            return replace(self._lookups, urls=tuple(urls or self._urls)).post(path, body)
        except ConfigError as error:
            error.hint = "give the cluster's secret with --secret-file FILE; docs/operations.md, section Security"
            raise

    def plan(self, excluded: Iterable[int]) -> list[_Planned]:
        """Ask every broker what it would compact; no object is in two tasks.

        Raises `Unavailable` when none tells, `NotFound` for an unknown topic.
        """
        query: list[tuple[str, object]] = [("topic", each) for each in self._options.topics]
        query.append(("max_objects", self._options.max_objects))
        if self._options.target_bytes:
            query.append(("target_bytes", self._options.target_bytes))
        found: list[_Planned] = []
        taken = set(excluded)
        self.problems = []
        for url in self._urls:
            try:
                answer = self._ask(f"/compaction/tasks?{urlencode(query)}", {"excluded": sorted(taken)}, [url])
            except Unavailable as error:
                self.problems.append(error.message)
                continue
            except NotFound as error:
                if self._options.topics:
                    raise
                self.problems.append(f"{url} is of an older version: {error.message}")
                continue
            self._check_cluster(answer["cluster_id"])
            layout = {name: answer[name] for name in ("target_bytes", "stream_bytes", "block_bytes")}
            for each in answer["tasks"]:
                inputs = tuple(each["inputs"])
                if taken.isdisjoint(inputs):
                    taken.update(inputs)
                    found.append(_Planned(each["kind"], inputs, each["bytes"], each["estimated_bytes"], **layout))
        if len(self.problems) == len(self._urls):
            raise Unavailable(f"no broker says what to compact: {self.problems[0]}", hint="see `tidelog status`")
        return found

    def _check_cluster(self, cluster_id: str) -> None:
        if self.cluster_id and cluster_id != self.cluster_id:
            raise InvalidInput(f"brokers of two clusters answer: {self.cluster_id} and {cluster_id}")
        self.cluster_id = cluster_id

    def names(self, object_id: int) -> bool:
        """Return whether the metadata, which are proven current, still name an object."""
        return "gone" not in self._ask("/compaction/task?current=true", {"inputs": [object_id]})

    def facts(self, task: _Planned) -> RewriteTask | int:
        """Return what an executor needs for a task, or the input that is not committed any more."""
        answer = self._ask("/compaction/task", {"inputs": task.inputs})
        if "gone" in answer:
            return int(answer["gone"])
        self._check_cluster(answer["cluster_id"])
        return RewriteTask(
            cluster_id=self.cluster_id,
            kind=task.kind,
            inputs=tuple(msgspec.convert(answer["inputs"], list[ObjectFacts])),
            starts=tuple((stream_id, start) for stream_id, start in answer["starts"]),
            target_bytes=task.target_bytes,
            stream_bytes=task.stream_bytes,
            block_bytes=task.block_bytes,
            created_ms=time.time_ns() // 1_000_000,
        )

    def prepare(self, count: int) -> int:
        """Return the first of `count` ids."""
        query = urlencode({"count": count, "ttl_ms": 1_000 * self._options.ids_ttl_s})
        return int(self._ask(f"/compaction/prepare?{query}")["first"])

    def commit(self, task: RewriteTask, report: RewriteReport) -> str:
        """Commit a task, and return why the metadata refuses it; empty when it is committed.

        Raises `Unavailable` when the outcome stays unknown, `CorruptData`, `InvalidInput`.
        """
        body = {
            "cluster_id": task.cluster_id,
            "inputs": [one.object_id for one in task.inputs],
            "outputs": [
                {"id": one.object_id, "kind": one.kind, "size": one.size, "ranges": one.ranges}
                for one in report.outputs
            ],
        }
        deadline = time.monotonic() + COMMIT_S
        pause_s = 0.2
        while True:
            try:
                answer = self._ask("/compaction/commit", body)
            except Unavailable:
                if time.monotonic() + pause_s > deadline:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                continue
            return "" if answer["committed"] else str(answer["refused"])


class _Compaction:
    """One run."""

    def __init__(self, spark: SparkSession, options: CompactOptions, job: RunningJob) -> None:
        self._context = spark.sparkContext
        self._job = job
        self._brokers = _Brokers(options)
        self._choice = CompactionChoice(self._brokers.prepare(1))
        self._counts: Counter[str] = Counter()
        self._problems: list[str] = []

    def run(self) -> CompactResult:
        rounds, choice = 0, self._choice
        while rounds < MAX_ROUNDS:
            tasks = [task for task in self._brokers.plan(choice.excluded) if choice.wants(task.inputs)]
            if not tasks:
                break
            rounds += 1
            for number, wave in enumerate(self._waves(tasks), 1):
                self._carry_out(wave, f"round {rounds}, wave {number}: {sum(len(one.inputs) for one in wave)} objects")
        self._problems += self._brokers.problems
        names = ("tasks", "refused", "damaged", "failed", "inputs", "outputs", "read_bytes", "written_bytes")
        counts = {name: self._counts[name] for name in names}
        return CompactResult(self._brokers.cluster_id, rounds, **counts, problems=tuple(self._problems[:SHOWN]))

    def _waves(self, tasks: Sequence[_Planned]) -> Iterator[list[RewriteTask]]:
        """Ask for what executors need, for so many tasks as are carried out together."""
        most = TASKS_PER_SLOT * max(1, self._context.defaultParallelism)
        wave: list[RewriteTask] = []
        ranges = 0
        for task in tasks:
            self._choice.begins(task.inputs)
            found = self._brokers.facts(task)
            if isinstance(found, int):
                self._give_up(task.inputs, TaskProblem("refused", f"object {found} is no longer committed"))
                continue
            wave.append(found)
            ranges += sum(len(one.ranges) for one in found.inputs)
            if len(wave) >= most or ranges >= WAVE_RANGES:
                yield wave
                wave, ranges = [], 0
        if wave:
            yield wave

    def _carry_out(self, wave: list[RewriteTask], what: str) -> None:
        with self._job.stage(f"{what}: look at them"):
            wave = self._with_ids(wave)
        if not wave:
            return
        with self._job.stage(f"{what}: rewrite them"):
            reports = self._on_executors(rewrite, wave)
        for task, report in zip(wave, reports, strict=True):
            self._counts["read_bytes"] += report.read_bytes
            problem = report.problem or self._commit(task, report)
            if problem is not None:
                self._give_up(_ids(task), problem)
        self._stop_if_all_fail(len(wave), reports)

    def _with_ids(self, wave: list[RewriteTask]) -> list[RewriteTask]:
        """Have ids prepared for the outputs of each task that has any."""
        asked = [task for task in wave if needs_count(task)]
        reports = self._on_executors(count_outputs, asked) if asked else []
        self._stop_if_all_fail(len(asked), reports)
        counted = [(task, 1) for task in wave if not needs_count(task)]
        for task, report in zip(asked, reports, strict=True):
            if report.problem is not None:
                self._give_up(_ids(task), report.problem)
            elif report.count > IDS_AT_ONCE:
                self._give_up(_ids(task), TaskProblem("refused", f"it would become {report.count} objects"))
            else:
                counted.append((task, report.count))
        found: list[RewriteTask] = []
        for group in _groups(counted):
            at = self._brokers.prepare(sum(count for _, count in group))
            for task, count in group:
                found.append(replace(task, first_id=at, ids=count))
                at += count
        return found

    def _on_executors(self, work: Any, tasks: Sequence[RewriteTask]) -> list[RewriteReport]:
        rdd = self._context.parallelize(tasks, len(tasks))
        return list(rdd.map(partial(work, self._brokers.bucket)).collect())

    def _commit(self, task: RewriteTask, report: RewriteReport) -> TaskProblem | None:
        try:
            refused = self._brokers.commit(task, report)
        except TidelogError as error:
            return TaskProblem("failed", error.message)
        if refused:
            return TaskProblem("refused", refused)
        self._choice.committed(one.object_id for one in report.outputs)
        self._counts["tasks"] += 1
        self._counts["inputs"] += len(task.inputs)
        self._counts["outputs"] += len(report.outputs)
        self._counts["written_bytes"] += report.written_bytes
        return None

    def _give_up(self, inputs: tuple[int, ...], problem: TaskProblem) -> None:
        """Note why a task is not done. What is damaged is left out of the next plan, so that its neighbours go on."""
        kind, message = problem.kind, problem.message
        if kind == "gone":
            kind = "damaged" if self._brokers.names(problem.object_id) else "refused"
            message = f"object {problem.object_id} is not in the bucket: {message}"
        self._counts[kind] += 1
        is_known = kind == "damaged" and problem.object_id >= 0
        self._choice.gave_up(inputs, problem.object_id if is_known else None)
        logger.info("objects %s to %s are not compacted: %s", inputs[0], inputs[-1], message)
        if len(self._problems) < SHOWN:
            self._problems.append(f"{len(inputs)} objects from {inputs[0]} on: {kind}: {message}")

    def _stop_if_all_fail(self, tasks: int, reports: Sequence[RewriteReport]) -> None:
        """Raise `Unavailable` when no executor can do what it is to do: with the next wave it would be the same."""
        failed = [
            report.problem for report in reports if report.problem is not None and report.problem.kind == "failed"
        ]
        if failed and len(failed) == tasks:
            raise Unavailable(
                f"all {tasks} tasks failed: {failed[0].message}",
                hint="executors need s3:GetObject and s3:PutObject on the objects of the cluster; see docs/spark.md",
            )


def _ids(task: RewriteTask) -> tuple[int, ...]:
    return tuple(one.object_id for one in task.inputs)


def _groups(counted: Sequence[tuple[RewriteTask, int]]) -> Iterator[list[tuple[RewriteTask, int]]]:
    """Yield tasks whose ids are prepared by one command."""
    group: list[tuple[RewriteTask, int]] = []
    for task, count in counted:
        if group and sum(each for _, each in group) + count > IDS_AT_ONCE:
            yield group
            group = []
        group.append((task, count))
    if group:
        yield group
