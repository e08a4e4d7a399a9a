"""The job `audit`: reads and checks every byte of every object on executors, and compares it with the metadata.

- every block, index and footer against its checksum, as `tidelog object verify` does in a broker;
- every record batch in them, down to its records (`audit_batches`), unless that is not wanted;
- every object that the metadata name: whether it is there, has this size, and has these offsets of these streams;
- the committed ranges of every partition: whether they follow one another;
- where the bucket may be listed: objects that no metadata know (orphans), and the records that were set aside.

The audit holds a lease. An object that is not there, or is not right, is looked up again in metadata that are newer
than that: one that was compacted or deleted meanwhile is no finding, and what replaced it is read in another round.

Changes nothing: it may be killed at any moment, and another run begins anew. A lease that it left ends by itself.

Entry: `run`, `plan`, `AuditOptions`.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark_tidelog.cluster import Lease, LeaseKeeper, Lookups
from pyspark_tidelog.fetch import open_bucket
from pyspark_tidelog.jobs.audit_tasks import AuditedObject, CheckedObject, check_objects
from pyspark_tidelog.jobs.frame import ClusterAccess, RunningJob, spark_job
from pyspark_tidelog.jobs.inventory import Inventory, Owner, take_inventory
from tidelog.runtime.errors import ConfigError, InvalidInput, Unavailable
from tidelog.storage.bucket.store import ObjectInfo, exists
from tidelog.storage.objects.key import all_quarantined_prefix
from tidelog.storage.objects.report import Problem, list_objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEASE_S = 120.0
"""Time to live of the lease, which the driver renews: so long it may be away."""
TASK_BYTES = 256 << 20
TASK_OBJECTS = 500
"""Bounds of one task."""
ROUNDS = 5
"""How often objects that were replaced while they were to be read are looked up again."""
REPORTS = (".parquet", ".csv")
ORPHAN = "orphan"


@dataclass(frozen=True)
class AuditOptions:
    """What to audit."""

    cluster: ClusterAccess
    report: str = ""
    """File on the driver's machine, `.parquet` or `.csv`, that gets a row for each finding; empty: none."""
    task_bytes: int = TASK_BYTES
    batches: bool = True
    """Decode record batches, too."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a report that cannot be written."""
        _check_report(self.report)


@dataclass(frozen=True)
class AuditPlan:
    """What an audit would read, by the metadata of now."""

    objects: int
    bytes: int
    partitions: int
    tasks: int
    report: str


@dataclass(frozen=True)
class AuditFinding:
    """One thing that is wrong; one for each stream that it concerns."""

    part: str
    """`block`, `index`, `footer`; `batch`: the block is sound, and a record batch in it is not; `object`: it is missing
    or truncated; `metadata`: it is sound, and differs from them; `range`: the metadata name two objects or none for
    offsets; `orphan`: no metadata know the object."""
    problem: str
    object_id: int | None = None
    key: str | None = None
    position: int | None = None
    """Byte of the object where the damage begins."""
    length: int | None = None
    topic: str | None = None
    partition: int | None = None
    stream_part: str | None = None
    """`data`: offsets are Kafka's. `meta`, `time`, `txn`: what the broker keeps beside."""
    stream_id: int | None = None
    start_offset: int | None = None
    end_offset: int | None = None
    """The offset after the last one that is concerned."""


@dataclass(frozen=True)
class AuditResult:
    """What an audit found."""

    objects: int
    """That were read, without those that were replaced meanwhile."""
    bytes: int
    blocks: int
    records: int
    """Appends, each of one or several records."""
    partitions: int
    replaced: int
    """Objects that were compacted or deleted while the audit ran."""
    findings: tuple[AuditFinding, ...]
    """Without orphans."""
    orphans: tuple[AuditFinding, ...] = ()
    not_listed: str = ""
    """Why orphans were not looked for; empty: they were."""


def plan(options: AuditOptions) -> AuditPlan:
    """Return what would be read. Raises `Unavailable`, `ConfigError`."""
    found = take_inventory(options.cluster, 0)
    total = sum(one.size for one in found.objects)
    tasks = len(_groups(found.objects, options.task_bytes))
    return AuditPlan(len(found.objects), total, found.partitions, tasks, options.report)


def run(spark: SparkSession, options: AuditOptions) -> AuditResult:
    """Audit a cluster. Raises `Unavailable` if cluster or bucket do not answer, `ConfigError`."""
    with spark_job(spark, "audit", f"audit of {options.cluster.bootstrap}") as job:
        result = _Audit(spark, job, options).run()
    if options.report:
        write_report(options.report, [*result.findings, *result.orphans])
    return result


@dataclass
class _State:
    """What is known so far."""

    checked: dict[str, CheckedObject] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)
    owners: dict[int, Owner] = field(default_factory=dict)
    audited: dict[str, AuditedObject] = field(default_factory=dict)

    def located(self, found: AuditFinding, stream: int, start: int, end: int) -> AuditFinding:
        """Return a finding with the stream that it concerns."""
        topic, partition, part = self.owners.get(stream, (None, None, None))
        return replace(
            found,
            topic=topic,
            partition=partition,
            stream_part=part,
            stream_id=stream,
            start_offset=start,
            end_offset=end,
        )

    def described(self, one: AuditedObject, problem: Problem) -> list[AuditFinding]:
        """Return a finding for each stream whose offsets cannot be read because of a problem."""
        found = AuditFinding(
            problem.part,
            problem.message,
            one.id if one.id >= 0 else None,
            one.key,
            problem.position if problem.position >= 0 else None,
            problem.length if problem.length >= 0 else None,
        )
        if problem.stream_id >= 0:
            return [self.located(found, problem.stream_id, problem.start_offset, problem.end_offset)]
        return [self.located(found, *each) for each in one.ranges] or [found]


class _Audit:
    def __init__(self, spark: SparkSession, job: RunningJob, options: AuditOptions) -> None:
        self._context = spark.sparkContext
        self._job = job
        self._options = options
        cluster = options.cluster.connect()
        self._lookups = cluster.lookups()
        self._bucket = cluster.bucket()
        self._state = _State()

    def run(self) -> AuditResult:
        listed, aside, not_listed = asyncio.run(_listing(self._bucket, self._lookups.cluster_id()))
        first: Inventory | None = None
        found: list[AuditFinding] = []
        for number in range(ROUNDS):
            with _lease(self._lookups) as lease:
                inventory = take_inventory(self._options.cluster, lease.version)
                first = first or inventory
                self._state.owners.update(inventory.owners)
                due = [*inventory.objects, *(aside if number == 0 else ())]
                self._check([one for one in due if one.key not in self._state.checked])
                replaced = len(self._state.replaced)
                found = self._confirm()
            if len(self._state.replaced) == replaced:
                break
        else:
            raise Unavailable(
                f"objects were replaced while they were read, {ROUNDS} times over: their lease does not last",
                hint="does someone end it (`tidelog lease list`), or is controller.lease_max_hold_ms short?",
            )
        assert first is not None
        ranges = [
            self._state.located(AuditFinding("range", one.message), one.stream, one.start, one.end)
            for one in first.problems
        ]
        return self._result(first, ranges + found, self._orphans(listed, first.known), not_listed)

    def _check(self, due: Sequence[AuditedObject]) -> None:
        """Have objects checked on executors."""
        state, bucket, batches = self._state, self._bucket, self._options.batches
        groups = _groups(due, self._options.task_bytes)
        if not groups:
            return
        total = sum(one.size for one in due)
        with self._job.stage(f"audit: check {len(due)} objects ({total} bytes)"):
            spread = self._context.parallelize(groups, len(groups))
            results = spread.flatMap(lambda group: check_objects(group, bucket, batches=batches)).collect()
        state.audited.update({one.key: one for one in due})
        state.checked.update({one.key: one for one in results})

    def _confirm(self) -> list[AuditFinding]:
        """Return all findings so far that metadata of now confirm; note objects that are not in them any more."""
        state = self._state
        wrong = [one for one in state.checked.values() if one.problems or one.is_gone]
        if not wrong:
            return []
        with _lease(self._lookups) as lease:  # its version is newer than what was found
            now = {one.id for one in self._lookups.objects(lease.version) if one.state == "committed"}
        found: list[AuditFinding] = []
        for one in wrong:
            audited = state.audited[one.key]
            if audited.id >= 0 and audited.id not in now:
                state.replaced.add(audited.id)
                continue
            if one.is_gone and audited.id < 0:
                continue  # records set aside, which an operator has deleted
            missing = Problem(part="object", message=f"object {one.key} is not in the bucket")
            for problem in one.problems if not one.is_gone else (missing,):
                found += state.described(audited, problem)
        return found

    def _orphans(self, listed: Sequence[tuple[int, ObjectInfo]], known: frozenset[int]) -> list[AuditFinding]:
        """Return what was listed before the metadata were asked for, is not in them, and is still there."""
        unknown = [(id_, info) for id_, info in listed if id_ not in known]
        if not unknown:
            return []
        still = asyncio.run(_still_there(self._bucket, [info.key for _, info in unknown]))
        return [
            AuditFinding(ORPHAN, f"no metadata know this object of {info.size} bytes", id_, info.key, 0, info.size)
            for id_, info in unknown
            if info.key in still
        ]

    def _result(
        self, first: Inventory, findings: list[AuditFinding], orphans: list[AuditFinding], not_listed: str
    ) -> AuditResult:
        state = self._state
        read = [one for one in state.checked.values() if not one.is_gone]
        return AuditResult(
            objects=len(read),
            bytes=sum(one.size for one in read),
            blocks=sum(one.blocks for one in read),
            records=sum(one.records for one in read),
            partitions=first.partitions,
            replaced=len(state.replaced),
            findings=tuple(findings),
            orphans=tuple(orphans),
            not_listed=not_listed,
        )


@contextmanager
def _lease(lookups: Lookups) -> Iterator[Lease]:
    """Hold a lease for the time being."""
    lease = lookups.take_lease(f"spark audit on {platform.node()}", LEASE_S)
    with LeaseKeeper(lookups, lease):
        yield lease
    with suppress(Unavailable):  # it ends by itself
        lookups.end_lease(lease)


def _groups(objects: Sequence[AuditedObject], task_bytes: int) -> list[list[AuditedObject]]:
    """Divide objects into tasks, each of about so many bytes."""
    groups: list[list[AuditedObject]] = []
    size = 0
    for one in objects:
        if not groups or size + one.size > task_bytes or len(groups[-1]) >= TASK_OBJECTS:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.size
    return groups


async def _listing(
    bucket: Mapping[str, str], cluster_id: str
) -> tuple[list[tuple[int, ObjectInfo]], list[AuditedObject], str]:
    """Return what the bucket has of the cluster: objects by id, records set aside; or why it cannot be listed."""
    store = open_bucket(bucket)
    try:
        objects = [each async for each in list_objects(store, cluster_id)]
        aside = [each async for each in store.list(all_quarantined_prefix(cluster_id))]
    except (Unavailable, InvalidInput) as error:
        return [], [], error.message
    finally:
        await store.close()
    return objects, [AuditedObject(-1, each.key, "", each.size, ()) for each in aside], ""


async def _still_there(bucket: Mapping[str, str], keys: Sequence[str]) -> set[str]:
    store = open_bucket(bucket)
    found = set()
    try:
        for key in keys:
            if await exists(store, key):
                found.add(key)
    finally:
        await store.close()
    return found


def _check_report(path: str) -> None:
    if path and not path.endswith(REPORTS):
        raise ConfigError(f"the report {path!r} has no known format", hint=f"name it …{' or …'.join(REPORTS)}")
    if path and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"there is no directory {Path(path).absolute().parent} for the report")


def write_report(path: str, findings: Sequence[AuditFinding]) -> None:
    """Write a table with a row for each finding, in place of one that is there. Raises `ConfigError`."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    kinds = {"str": pa.string(), "str | None": pa.string(), "int | None": pa.int64()}
    schema = pa.schema([(name, kinds[str(kind)]) for name, kind in AuditFinding.__annotations__.items()])
    table = pa.Table.from_pylist([asdict(one) for one in findings], schema=schema)
    draft = f"{path}.{os.getpid()}"
    try:
        if path.endswith(".csv"):
            csv.write_csv(table, draft)
        else:
            parquet.write_table(table, draft)
        os.replace(draft, path)
    except OSError as error:
        Path(draft).unlink(missing_ok=True)
        raise ConfigError(f"cannot write the report {path}: {error.strerror or error}") from error
