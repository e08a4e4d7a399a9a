"""The driver of `tidelog spark compact` over a broker's admin HTTP, with executors in this process."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.serializers import CPickleSerializer

from pyspark_tidelog.cluster import Cluster, Lookups
from pyspark_tidelog.fetch import EMBEDDED
from pyspark_tidelog.jobs import compact
from pyspark_tidelog.jobs.compact import CompactOptions, CompactResult
from pyspark_tidelog.jobs.frame import ClusterAccess
from pyspark_tidelog.rewriting import RewriteReport, TaskProblem
from tests.support.compaction_world import CompactionWorld
from tests.support.ports import free_port
from tidelog.broker.admin.http import AdminHttp, AdminSources
from tidelog.broker.admin.outside_compaction import OutsideCompactionRoutes
from tidelog.broker.kafka.services import no_quorum
from tidelog.broker.settings import AdminSettings
from tidelog.broker.telemetry.metrics import Metrics
from tidelog.broker.telemetry.registry import PartRegistry
from tidelog.runtime.clock import SystemClock
from tidelog.runtime.errors import NotFound, Unavailable
from tidelog.runtime.network import TcpNetwork
from tidelog.storage.bucket.local import LocalObjectStore
from tidelog.storage.compaction.outside import OutsideCompaction
from tidelog.storage.objects.key import object_key


class LocalAccess(ClusterAccess):
    """One broker, and a bucket on this machine."""

    def connect(self, **more: object) -> Cluster:
        urls = tuple(self.bootstrap.split(","))
        found = SimpleNamespace(lookups=lambda: Lookups(urls, ""), bucket=lambda: dict(self.options))
        return cast(Cluster, found)


class LocalRows:
    """What the job uses of an RDD."""

    def __init__(self, rows: Iterable[Any], sent: list[bytes]) -> None:
        self._rows = list(rows)
        self._sent = sent

    def map(self, work: Callable[[Any], Any]) -> LocalRows:
        serializer: Any = CPickleSerializer
        self._sent.append(serializer().dumps((work, self._rows)))
        return LocalRows(map(work, self._rows), self._sent)

    def collect(self) -> list[Any]:
        return self._rows


class LocalContext:
    """What the job uses of a SparkContext."""

    defaultParallelism = 2  # noqa: N815  # Spark's name

    def __init__(self) -> None:
        self.waves: list[int] = []
        self.sent: list[bytes] = []
        """What executors get."""
        self._properties: dict[str, str | None] = {}

    def parallelize(self, rows: Sequence[Any], partitions: int) -> LocalRows:
        assert partitions == len(rows) > 0
        self.waves.append(len(rows))
        return LocalRows(rows, self.sent)

    def setJobGroup(self, *_arguments: object, **_more: object) -> None:  # noqa: N802  # Spark's name
        """No UI."""

    def setJobDescription(self, _text: str) -> None:  # noqa: N802  # Spark's name
        """No UI."""

    def cancelJobGroup(self, _group: str) -> None:  # noqa: N802  # Spark's name
        """Nothing goes on."""

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802  # Spark's name
        return self._properties.get(name)

    def setLocalProperty(self, name: str, value: str | None) -> None:  # noqa: N802  # Spark's name
        self._properties[name] = value

    def statusTracker(self) -> None:  # noqa: N802  # Spark's name
        """No progress bar asks."""


class JobWorld(CompactionWorld):
    """A broker whose admin HTTP plans and commits."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        directory.mkdir()
        super().__init__(LocalObjectStore(directory, SystemClock()), **settings)
        self.bucket = {EMBEDDED: directory.as_uri()}
        self.context = LocalContext()
        self.url = ""

    def options(self, **more: Any) -> CompactOptions:
        access = LocalAccess(more.pop("urls", self.url), options=self.bucket)
        return CompactOptions(access, **{"max_objects": 4, **more})

    async def run(self, **more: Any) -> CompactResult:
        spark = cast(Any, SimpleNamespace(sparkContext=self.context, createDataFrame=lambda *_: None))
        return await asyncio.to_thread(compact.run, spark, self.options(**more))


@contextlib.asynccontextmanager
async def serving(directory: Path, uploads: int = 30, **settings: Any) -> AsyncIterator[JobWorld]:
    world = JobWorld(directory / "bucket", **settings)
    compactor = world.compactor()
    outside = OutsideCompaction(compactor.data, SystemClock(), random.Random(1))
    routes = OutsideCompactionRoutes(compactor=compactor, outside=outside, image=lambda: world.image)
    sources = AdminSources(
        node_id=0,
        roles=["broker"],
        clock=SystemClock(),
        store=world.store,
        image=lambda: world.image,
        not_ready=list,
        upload_now=lambda: pytest.fail("nobody asked for an upload"),
        controllers=no_quorum,
    )
    server = AdminHttp(
        sources, PartRegistry(), Metrics(process=False), TcpNetwork(), AdminSettings(port=0), routes.routes()
    )
    world.url = await server.start()
    await world.fill(world.topic("a", 2) + world.topic("b", 1), uploads)
    try:
        yield world
    finally:
        await server.close()


async def test_a_run_compacts_in_waves_and_rounds_until_nothing_is_left(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        plan = await asyncio.to_thread(compact.plan, world.options())
        assert (plan.tasks, plan.kinds, plan.objects) == (7, {"gather": 7}, 28)
        assert 0 < plan.estimated_bytes <= plan.bytes and plan.requests > plan.objects
        before = world.committed()
        result = await world.run()
        assert result.rounds > 1 and result.tasks > 7 and max(world.context.waves) == 4
        assert (result.refused, result.damaged, result.failed, result.problems) == (0, 0, 0, ())
        assert before.isdisjoint(world.committed())
        assert result.inputs - result.outputs == len(before) - len(world.committed())
        assert result.read_bytes > 0 and result.written_bytes > 0
        await world.check()
        assert (await world.run()).tasks == 0
        await world.pass_time()
        assert await world.in_bucket() == world.committed()


async def test_executors_get_no_token(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        assert (await world.run(admin_token="0123456789abcdef")).tasks > 0
        assert b"cluster-of-the-compaction" in world.context.sent[0]
        assert not any(b"0123456789abcdef" in each for each in world.context.sent)


async def test_only_objects_of_the_named_topics_are_rewritten(tmp_path: Path) -> None:
    async with serving(tmp_path, 0) as world:
        (other,) = world.topic("other")
        ids = [(await world.upload({other: [b"x"]}, alone=[other]))[0] for _ in range(3)]
        mine = [one.first_stream + 1 for one in world.image.partitions(world.image.topic_ids["b"])]
        for _ in range(3):
            await world.upload({mine[0]: [b"y"]}, alone=mine)
        assert (await world.run(topics=("b",))).inputs == 3
        assert set(ids) <= world.committed()
        with pytest.raises(NotFound, match="'nothing'"):
            await world.run(topics=("nothing",))


@pytest.mark.parametrize("missing", [False, True])
async def test_a_damaged_or_missing_object_stays_and_its_neighbours_are_compacted(
    tmp_path: Path, missing: bool
) -> None:
    async with serving(tmp_path) as world:
        before = world.committed()
        bad = sorted(before)[12]
        key = object_key(world.image.cluster_id, bad)
        body = bytearray(await world.store.get(key))
        body[len(body) // 2] ^= 1
        await world.store.delete([key])
        if not missing:
            await world.store.put(key, [bytes(body)])
        result = await world.run()
        assert (result.damaged, result.refused, result.failed) == (1, 0, 0)
        assert key in result.problems[0] and "damaged" in result.problems[0]
        assert before & world.committed() == {bad}


async def test_objects_that_are_replaced_after_the_plan_are_refused_and_planned_anew(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        stolen: list[int] = []

        def steal(what: str) -> None:
            """A topic's data is deleted between planning and commit."""
            if what == "compact" and not stolen:
                stolen.append(1)
                world.delete_topic("a")
                world.delete_topic("b")

        world.metadata.on_call = steal
        result = await world.run()
        assert stolen and result.refused > 0 and result.damaged == result.failed == 0
        assert "refused" in result.problems[0]
        assert world.committed() == set()


async def test_a_commit_whose_answer_is_lost_is_asked_for_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        world.metadata.fail_after = world.metadata.fail_before = 2
        result = await world.run()
        assert result.tasks > 0 and result.failed == result.refused == 0
        await world.check()


async def test_executors_that_can_do_nothing_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as world:
        failed = RewriteReport(TaskProblem("failed", "access denied"))
        monkeypatch.setattr(compact, "rewrite", lambda bucket, task: failed)
        before = world.committed()
        with pytest.raises(Unavailable, match="all 4 tasks failed: access denied") as caught:
            await world.run()
        assert "s3:PutObject" in str(caught.value.hint)
        assert world.committed() == before


async def test_a_dead_broker_is_told_and_the_others_are_asked(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        dead = f"http://127.0.0.1:{free_port()}"
        result = await world.run(urls=f"{dead},{world.url}")
        assert result.tasks > 0 and any(dead in each for each in result.problems)
        with pytest.raises(Unavailable, match="no broker"):
            await world.run(urls=dead)
