"""`tidelog object compact|clean` against real processes: plans, runs, refusals, crashes, a bucket that goes away."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.backends import s3_flags
from tests.support.bucket_files import bucket_files
from tests.support.cli import Cli, until
from tests.support.object_jobs import BY_HAND, fill, objects
from tests.support.s3_servers import S3Server, new_bucket
from tests.support.tidelog_process import TidelogProcess, running
from tidelog.storage.bucket.s3_client import open_client
from tidelog.storage.objects.key import object_key
from tidelog.storage.settings import S3Settings

pytestmark = pytest.mark.processes

SLOW = (*BY_HAND, "--set", "compaction.throttle_bytes_per_s=1024")
"""A compaction that lasts until somebody ends it."""


@contextmanager
def compacting(cli: Cli, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A compaction that is going on when the block begins, and over when it ends."""
    job = cli.start("object", "compact", "--eager", "--format", "json", *args)
    try:
        until(lambda: bool(cli("object", "compact", "--dry-run", "--format", "json").json()["running"]))
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)


def conserves(process: TidelogProcess) -> None:
    cli = Cli(process.bootstrap)
    cli("topic", "create", "one", "two", "-p", 1)
    produced = {topic: fill(cli, topic, 4) for topic in ("one", "two")}
    before = objects(cli)
    plan = cli("object", "compact", "--dry-run", "--format", "json").json()["plan"]
    [task] = plan
    assert task["kind"] == "gather"
    assert set(task["inputs"]) <= {one["id"] for one in before}
    assert task["bytes"] == sum(one["size_bytes"] for one in before if one["id"] in task["inputs"])
    assert 0 < task["estimated_bytes"] <= task["bytes"]
    assert {"one", "two"} <= set(task["topics"])
    assert "small objects" in task["reason"]
    assert "nothing was changed" in cli("object", "compact", "--dry-run").text
    assert objects(cli) == before

    done = cli("object", "compact", "--format", "json").json()
    assert (done["tasks"], done["inputs"], done["given_up"]) == (1, len(task["inputs"]), [])
    assert done["read_bytes"] >= task["bytes"]
    assert done["outputs"] == len(objects(cli)) - len(before) + done["inputs"]
    assert cli("object", "verify").text.startswith("sound: ")
    for topic, lines in produced.items():
        assert cli("consume", topic, "--exit").out == lines
    assert "nothing to compact" in cli("object", "compact").text


def test_a_compaction_does_what_its_plan_said_and_keeps_every_record(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        conserves(process)


@pytest.mark.long
@pytest.mark.servers("minio")
def test_a_compaction_keeps_every_record_on_minio(tmp_path: Path, minio_server: S3Server) -> None:
    with running(tmp_path / "data", [*BY_HAND, *s3_flags(minio_server)]) as process:
        conserves(process)


@pytest.mark.long
def test_it_compacts_by_itself_when_enabled(tmp_path: Path) -> None:
    with running(tmp_path / "data", ("--set", "compaction.interval_ms=200")) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "many", "-p", 1)
        produced = fill(cli, "many", 9)
        until(lambda: cli("object", "compact", "--dry-run", "--format", "json").json()["tasks"] > 0)
        assert cli("consume", "many", "--exit").out == produced


# --- one at a time, and how it ends ------------------------------------------------------------------------------


@pytest.mark.long
def test_a_second_one_is_refused_and_ctrl_c_ends_the_first_and_now_ignores_the_throttle(tmp_path: Path) -> None:
    with running(tmp_path / "data", SLOW) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "slow", "-p", 1)
        produced = fill(cli, "slow", 3)
        before = objects(cli)
        with compacting(cli) as job:
            refused = cli("object", "compact", "--eager", code=5)
            assert "already running" in refused.err
            shown = cli("object", "compact", "--dry-run").text
            assert "running" in shown
            assert "RUNNING" in shown
            job.send_signal(signal.SIGINT)
            job.wait(30)
            assert job.returncode == 130

        def idle() -> bool:
            return not cli("object", "compact", "--dry-run", "--format", "json").json()["active"]

        until(idle)
        assert objects(cli) == before
        done = cli("object", "compact", "--eager", "--now", "--format", "json").json()
        assert done["inputs"] == len(before)
        assert cli("consume", "slow", "--exit").out == produced


def test_a_topic_that_does_not_exist_is_not_found_and_nothing_is_done(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        cli = Cli(process.bootstrap)
        assert "nosuch" in cli("object", "compact", "--topic", "nosuch", code=3).err
        assert "nothing to compact" in cli("object", "compact").text
        assert "--eager" in cli("object", "compact").text


@pytest.mark.long
def test_only_objects_with_the_topic_are_compacted(tmp_path: Path) -> None:
    flags = (*BY_HAND, "--set", "upload.split_bytes=1024", "--set", "compaction.min_objects=3")
    with running(tmp_path / "data", flags) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "here", "there", "-p", 1)
        fill(cli, "here", 3)
        fill(cli, "there", 3)
        tasks = cli("object", "compact", "--topic", "here", "--dry-run", "--format", "json").json()["plan"]
        assert [task["topics"] for task in tasks if task["kind"] == "merge"] == [["here"]]
        everything = cli("object", "compact", "--dry-run", "--format", "json").json()["plan"]
        assert len(everything) > len(tasks)


# --- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_bucket_that_goes_away_in_the_middle_ends_it_with_an_error_and_without_a_change(tmp_path: Path) -> None:
    with running(tmp_path / "data", BY_HAND) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "kept", "-p", 1)
        produced = fill(cli, "kept", 4)
        before = objects(cli)
        bucket = tmp_path / "data" / "bucket"
        bucket.rename(tmp_path / "away")
        bucket.touch()  # a file where the bucket's directory was
        result = cli("object", "compact", "--eager", code=5)
        assert "given up" in result.err
        assert "GIVEN UP" in result.text
        assert cli("object", "clean", "--dry-run", code=5).err.startswith("error: ")
        bucket.unlink()
        (tmp_path / "away").rename(bucket)
        assert objects(cli) == before
        assert cli("object", "compact", "--eager", "--format", "json").json()["inputs"] == len(before)
        assert cli("consume", "kept", "--exit").out == produced


def test_what_the_controller_refuses_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    with running(tmp_path / "data", SLOW) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "gone", "-p", 1)
        fill(cli, "gone", 2, records=20)
        cli("topic", "create", "stays", "-p", 1)
        stays = fill(cli, "stays", 2, records=20)
        with compacting(cli, "--topic", "gone") as job:
            cli("topic", "delete", "gone", "--yes")  # its objects are destroyed: they can be replaced by nothing
            out, err = job.communicate(timeout=60)
        assert job.returncode == 5, err
        assert "no longer committed" in json.loads(out)["given_up"][0]["error"] or b"trimmed or deleted" in out
        assert cli("consume", "stays", "--exit").out == stays


@pytest.mark.long
@pytest.mark.slow  # a prepared id outlasts the slowest throttle
def test_what_a_killed_compaction_left_is_found_and_orphans_are_deleted(tmp_path: Path) -> None:
    flags = (
        *BY_HAND,
        *("--set", "compaction.throttle_bytes_per_s=2048"),
        *("--set", "compaction.stream_bytes=1024"),  # several outputs: some are written when it dies
        *("--set", "upload.prepare_ttl_ms=1000"),
        *("--set", "upload.delete_delay_ms=0"),
    )
    with running(tmp_path / "data", flags) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "first", "second", "-p", 1)
        produced = {topic: fill(cli, topic, 2, records=100) for topic in ("first", "second")}
        committed = {one["key"] for one in objects(cli)}
        bucket = tmp_path / "data" / "bucket"

        def left_over() -> list[Path]:
            prefix = next(iter(committed)).split("/")[0]
            found = bucket_files(bucket / prefix / "objects")
            return [path for path in found if str(path.relative_to(bucket)) not in committed]

        with compacting(cli):
            until(lambda: bool(left_over()), 90)
            process.kill_broker()
        [written, *_] = left_over()
        copy = tmp_path / "copy"
        shutil.copy(written, copy)
        process.wait_for_line("ready again")
        found = cli("object", "clean", "--dry-run", "--format", "json").json()
        assert found["orphans"] == []  # its id is prepared: the controller will give it up by itself
        states = {one["key"]: one["state"] for one in found["waiting"]}
        assert states.get(str(written.relative_to(bucket))) in ("prepared", "destroyed", None)
        assert {one["key"] for one in objects(cli)} == committed

        until(lambda: not written.exists() and not objects(cli, "prepared") and not objects(cli, "destroyed"), 90)
        written.parent.mkdir(exist_ok=True)
        shutil.copy(copy, written)  # the put of an upload that hung all that time arrives after all
        key = str(written.relative_to(bucket))
        young = cli("object", "clean", "--dry-run", "--format", "json").json()
        assert (young["orphans"], young["young"]) == ([], 1)
        listed = cli("object", "clean", "--min-age", "0", "--dry-run", "--format", "json").json()
        assert [(one["key"], one["size_bytes"]) for one in listed["orphans"]] == [(key, copy.stat().st_size)]
        assert "no metadata names it" in cli("object", "clean", "--min-age", "0", "--dry-run").text
        assert "--yes" in cli("object", "clean", "--min-age", "0", code=2).err
        assert written.exists()
        assert cli("object", "clean", "--min-age", "0", "--yes", "--format", "json").json()["deleted"] == 1
        assert not written.exists()
        assert cli("object", "clean", "--min-age", "0").text.startswith("0 orphans")
        for topic, lines in produced.items():
            assert cli("consume", topic, "--exit").out == lines


def test_a_length_of_time_that_is_none_is_refused() -> None:
    assert "10m" in Cli()("object", "clean", "--min-age", "soon", code=2).err


@pytest.mark.servers("moto")
async def test_an_interrupted_multipart_upload_is_listed_and_aborted(tmp_path: Path, moto_server: S3Server) -> None:
    bucket = new_bucket()

    async def begin(key: str) -> None:
        settings = S3Settings(
            endpoint=moto_server.endpoint,
            bucket=bucket,
            access_key_id=moto_server.access_key_id,
            secret_access_key=moto_server.secret_access_key,
        )
        async with AsyncExitStack() as resources:
            client = await open_client(settings, resources)
            await client.create_multipart_upload(Bucket=bucket, Key=key)

    with running(tmp_path / "data", [*BY_HAND, *s3_flags(moto_server, bucket)]) as process:
        cli = Cli(process.bootstrap)
        key = object_key(cli("status", "--format", "json").json()["cluster_id"], 77)
        await begin(key)
        listed = cli("object", "clean", "--min-age", "0", "--dry-run", "--format", "json").json()
        assert [one["key"] for one in listed["unfinished"]] == [key]
        assert "1 unfinished uploads found" in cli("object", "clean", "--min-age", "0", "--dry-run").text
        assert "--yes" in cli("object", "clean", "--min-age", "0", code=2).err
        assert "1 aborted" in cli("object", "clean", "--min-age", "0", "--yes").text
        left = cli("object", "clean", "--min-age", "0", "--dry-run", "--format", "json").json()
        assert left["unfinished"] == []


@pytest.mark.long
def test_it_yields_to_producers_and_says_so(tmp_path: Path) -> None:
    flags = (*BY_HAND, "--set", "compaction.busy_bytes_per_s=1")
    with running(tmp_path / "data", flags) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "busy", "-p", 1)
        fill(cli, "busy", 3)
        producing = cli.start("produce", "busy", stdin=subprocess.PIPE)
        assert producing.stdin is not None
        pipe = producing.stdin

        def busy() -> bool:
            pipe.write(b"one more\n" * 200)
            pipe.flush()
            return bool(cli("object", "compact", "--dry-run", "--format", "json").json()["busy"])

        try:
            until(busy)
            pipe.write(b"one more\n")
            pipe.flush()
            assert "a tenth" in cli("object", "compact", "--eager").err
        finally:
            producing.communicate(timeout=60)
        assert producing.returncode == 0

        def idle() -> bool:
            return not cli("object", "compact", "--dry-run", "--format", "json").json()["busy"]

        until(idle)


def test_orphans_are_looked_for_by_itself_when_enabled(tmp_path: Path) -> None:
    flags = ("--set", "clean.interval_ms=200", "--set", "clean.orphan_age_ms=0")
    with running(tmp_path / "data", flags) as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "t", "-p", 1)
        fill(cli, "t", 1)
        [one] = objects(cli)
        bucket = tmp_path / "data" / "bucket"
        cluster_id = one["key"].split("/")[0]
        orphan = bucket / object_key(cluster_id, 0)  # the first id is 1: nobody is ever given this one
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"left behind")
        until(lambda: not orphan.exists())
        assert (bucket / one["key"]).exists()
