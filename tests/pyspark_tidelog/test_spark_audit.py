"""The job `audit` with a real Spark and a real cluster, whose bucket is damaged in every way; and its parts alone."""

from __future__ import annotations

import contextlib
import csv
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from pyspark_tidelog.cluster import KnownObject, Lease, Lookups
from pyspark_tidelog.jobs.inventory import range_problems
from pyspark_tidelog.plan import DATA, STREAM_PARTS, PlannedRange, Slice
from tests.e2e.backends import create_topic
from tests.pyspark_tidelog.harness import Spark
from tests.pyspark_tidelog.job_harness import LOCAL, MARKS, JobWorld, answer
from tests.support.cli import until
from tests.support.ports import free_port
from tidelog.broker.objects import report as brokers
from tidelog.cli.subcommands.spark_audit import audit as command
from tidelog.controller.model.wal_notes import DATA_STREAM
from tidelog.runtime.errors import ConfigError, Unavailable
from tidelog.storage.commits import ObjectKind
from tidelog.storage.objects.format import FOOTER, Block, Footer, ObjectIndex
from tidelog.storage.objects.report import verify_bytes
from tidelog.storage.objects.writer import build_object
from tidelog.storage.records import StreamEntry

pytestmark = MARKS


def fill(world: JobWorld, topic: str, objects: int) -> list[int]:
    """Make a topic with so many objects, 20 offsets each; return their ids, in the order of the offsets."""
    create_topic(world.bootstrap, topic, 1)
    for number in range(objects):
        world.produce(topic, 0, 20 * number, 20)
        world.upload()
    return sorted(world.objects(topic))


def audit(spark: Spark, world: JobWorld, step: str = "audit", **more: object) -> dict[str, Any]:
    return dict(answer(spark, step, {"bootstrap": world.bootstrap, "token": world.token, **more}))


@pytest.mark.long
def test_a_cluster_under_load_and_eager_compaction_has_no_findings(spark: Spark, world: JobWorld) -> None:
    world.upload()  # what other tests have left: an object with it would be too large to be rewritten with small ones
    world.compact()
    ids = fill(world, "loaded", 4)
    done = threading.Event()
    rounds = [0]

    def load() -> None:
        at = 80
        while not done.is_set():
            world.produce("loaded", 0, at, 20)
            at += 20
            world.upload()
            world.compact()
            rounds[0] += 1

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        try:
            for _ in range(3):
                before = rounds[0]
                found = audit(spark, world)
                assert (found["findings"], found["orphans"], found["not_listed"]) == ([], [], "")
                assert found["objects"] and found["blocks"] and found["bytes"]
                until(lambda before=before: rounds[0] > before)  # type: ignore[misc]
        finally:
            done.set()
        loading.result()
    assert not set(ids) & world.objects("loaded"), "compaction had something to do"


@pytest.mark.long
def test_objects_that_are_replaced_before_they_are_read_are_looked_up_again(
    spark: Spark, world: JobWorld, tmp_path: Path
) -> None:
    ids = fill(world, "replaced", 4)
    with ThreadPoolExecutor(1) as pool:
        auditing = pool.submit(audit, spark, world, "audit_in_steps", directory=str(tmp_path))
        until((tmp_path / "looked").exists)
        world.end_leases()
        world.compact()
        world.wait_deleted(set(ids))
        (tmp_path / "go").touch()
        found = auditing.result(300)
    assert found["findings"] == []
    assert found["replaced"] >= len(ids)


@contextlib.contextmanager
def damaged(files: dict[Path, bytes | None]) -> Iterator[None]:
    """Give files other contents, or none, for a while."""
    before = {file: file.read_bytes() if file.exists() else None for file in files}
    try:
        for file, data in files.items():
            _set(file, data)
        yield
    finally:
        for file, data in before.items():
            _set(file, data)


def _set(file: Path, data: bytes | None) -> None:
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)


def flipped(file: Path, at: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    return bytes(data)


@pytest.mark.long
def test_each_damaged_object_is_named_with_what_it_held(spark: Spark, world: JobWorld, tmp_path: Path) -> None:
    ids = fill(world, "damaged", 6)
    block, index, footer, short, missing, sound = ids
    files = {each: world.file(each) for each in ids}
    orphan = files[sound].parent / f"{(0x7000 << 8) + (sound & 0xFF):016x}"
    changes: dict[Path, bytes | None] = {
        files[block]: flipped(files[block], 60),
        files[index]: flipped(files[index], -100),
        files[footer]: flipped(files[footer], -20),
        files[short]: files[short].read_bytes()[:-30],
        files[missing]: None,
        orphan: files[sound].read_bytes(),
    }
    table = tmp_path / "found.parquet"
    with damaged(changes):
        found = audit(spark, world, report=str(table))
        mine = [each for each in found["findings"] if each["topic"] == "damaged" and each["stream_part"] == "data"]
        told = {each["object_id"]: each for each in mine if each["part"] != "footer" or each["object_id"] == footer}
        assert set(told) == {block, index, footer, short, missing}
        assert {id_: each["part"] for id_, each in told.items()} == {
            block: "block",
            index: "index",
            footer: "footer",
            short: "object",
            missing: "object",
        }
        for number, id_ in enumerate(ids[:5]):
            one = told[id_]
            assert (one["partition"], one["start_offset"], one["end_offset"]) == (0, 20 * number, 20 * number + 20)
            assert one["key"].endswith(f"{id_:016x}")
        assert told[block]["position"] == 0 and "crc32c" in told[block]["problem"]
        size = len(files[short].read_bytes())
        assert f"ends at byte {size}; its metadata says {size + 30}" in told[short]["problem"]
        assert "is not in the bucket" in told[missing]["problem"]
        assert [Path(each["key"]).name for each in found["orphans"]] == [orphan.name]
        rows = pq.read_table(table).to_pylist()
        assert rows == [*found["findings"], *found["orphans"]]

        report = tmp_path / "found.csv"
        printed = world.cli("spark", "audit", "--report", report, "--format", "json", *LOCAL, code=7)
        assert "problems found in the bucket" in printed.err and "Traceback" not in printed.err
        document = printed.json()
        assert {one["object_id"] for one in document["findings"]} == {block, index, footer, short, missing}
        with report.open() as lines:
            assert len(list(csv.DictReader(lines))) == len(document["findings"]) + 1
    assert audit(spark, world)["findings"] == []


def rewritten(file: Path, offset: int) -> bytes:
    """An object with one byte of a record of its data stream changed, and all its own checksums right."""
    data = file.read_bytes()
    footer = Footer.decode(data[-FOOTER.size :], object_size=len(data), key="")
    index = ObjectIndex.decode(data[footer.index_position : -FOOTER.size], footer, key="")
    parts: dict[int, list[StreamEntry]] = {}
    for entry in index:
        for each in Block.decode(data[entry.position : entry.end_position], entry, key=""):
            payload = bytearray(each.payload)
            is_inside = each.base_offset <= offset < each.base_offset + each.count
            if entry.stream_id % len(STREAM_PARTS) == DATA and is_inside:
                payload[-1] ^= 1
            parts.setdefault(entry.stream_id, []).append(StreamEntry(each.base_offset, each.count, bytes(payload)))
    built = build_object(
        object_id=footer.object_id,
        kind=ObjectKind(footer.kind),
        cluster_id=file.parts[file.parts.index("objects") - 1],
        created_ms=footer.created_ms,
        parts=list(parts.items()),
        block_bytes=1 << 20,
    )
    body = b"".join(built.body)
    assert verify_bytes(body, "") == [] and len(body) == len(data)
    return body


@pytest.mark.long
def test_a_batch_that_is_damaged_in_a_sound_block_is_named(spark: Spark, world: JobWorld) -> None:
    ids = fill(world, "garbled", 2)
    file = world.file(ids[1])
    with damaged({file: rewritten(file, 25)}):
        (found,) = audit(spark, world)["findings"]
        assert (found["part"], found["topic"], found["partition"], found["stream_part"]) == (
            "batch", "garbled", 0, "data",
        )  # fmt: skip
        assert found["start_offset"] <= 25 < found["end_offset"] <= 40 and found["object_id"] == ids[1]
        assert found["key"].endswith(f"{ids[1]:016x}") and "fails its CRC32C" in found["problem"]
        printed = world.cli("spark", "audit", *LOCAL, code=7)
        assert "garbled" in printed.text and "fails its CRC32C" in printed.text
        assert audit(spark, world, batches=False)["findings"] == []
    assert audit(spark, world)["findings"] == []


def test_the_command_says_what_it_would_do_and_refuses_what_is_wrong(world: JobWorld, tmp_path: Path) -> None:
    fill(world, "planned", 1)

    def refusal(*arguments: str) -> str:
        told = CliRunner().invoke(command, ["--bootstrap", world.bootstrap, *arguments]).exception
        assert isinstance(told, ConfigError), told
        return str(told)

    document = json.loads(world.cli("spark", "audit", "--dry-run", "--format", "json").out)
    assert document["objects"] >= 1 and document["bytes"] > 0 and document["tasks"] == 1
    assert "nothing was read" in world.cli("spark", "audit", "--dry-run").text
    for report, told in (("x.txt", "no known format"), (str(tmp_path / "no" / "x.csv"), "no directory")):
        assert told in refusal("--report", report)
    assert (
        "cannot read --read-token-file" in world.cli("spark", "audit", "--read-token-file", tmp_path / "no", code=2).err
    )
    token = tmp_path / "token"
    token.write_text("wrong")
    assert (
        "tidelog cluster read-token" in world.cli("spark", "audit", "--read-token-file", token, "--dry-run", code=2).err
    )
    assert "no option of the cluster" in world.cli("spark", "audit", "--option", "subscribe=t", code=2).err


def planned(*slices: tuple[int, int], start: int = 0, end: int = 100) -> PlannedRange:
    pieces = tuple(Slice(number, 1, 10, *each) for number, each in enumerate(slices))
    return PlannedRange("t", "id", 3, 7, start, end, end, pieces)


@pytest.mark.parametrize(
    ("one", "wrong"),
    [
        (planned((0, 50), (50, 100)), []),
        (planned((0, 60), (60, 120), start=20), []),
        (planned((0, 50), (60, 100)), [(50, 60, "no object")]),
        (planned((10, 100)), [(0, 10, "no object")]),
        (planned((0, 90)), [(90, 100, "no object")]),
        (planned(), [(0, 100, "no object")]),
        (planned((0, 50), (40, 100)), [(40, 50, "two objects")]),
        (planned((0, 100), (40, 50)), [(40, 50, "two objects")]),
        (planned(start=5, end=5), []),
    ],
)
def test_committed_ranges_follow_one_another(one: PlannedRange, wrong: list[tuple[int, int, str]]) -> None:
    found = range_problems(one)
    assert [(each.start, each.end) for each in found] == [each[:2] for each in wrong]
    assert all(each.topic == "t" and each.stream == 7 for each in found)
    assert [what in each.message for each, (_, _, what) in zip(found, wrong, strict=True)] == [True] * len(wrong)


def test_the_streams_of_a_partition_are_those_of_the_controller() -> None:
    assert brokers.STREAM_PARTS == STREAM_PARTS
    assert DATA_STREAM == DATA


@contextlib.contextmanager
def answering(answer: Callable[[str], tuple[int, Any]]) -> Iterator[str]:
    """The URL of a server that answers each path with a status and a document."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_POST = do_GET  # noqa: N815  # the server's name for it

        def log_message(self, *_arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def row(object_id: int) -> dict[str, Any]:
    return {"id": object_id, "state": "committed", "kind": None, "size_bytes": 10}


def test_objects_are_told_by_a_broker_whose_metadata_are_new_enough() -> None:
    versions = iter([3, 4, 5])
    pages = {
        "/objects?limit=1000&after=-1": {"objects": [row(1), row(7)], "next_after": 7},
        "/objects?limit=1000&after=7": {"objects": [row(9)], "next_after": None},
    }

    def answer(path: str) -> tuple[int, Any]:
        return (200, {"version": next(versions)}) if path == "/leases" else (200, pages[path])

    with answering(answer) as url:
        found = Lookups((url,), "").objects(5)
    assert found == [KnownObject(each, "committed", "", 10) for each in (1, 7, 9)]


def test_another_broker_tells_the_objects_when_one_does_not() -> None:
    with answering(lambda path: (503, {"error": "not now"})) as refusing:
        dead = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(Unavailable, match="no broker tells all objects"):
            Lookups((refusing, dead), "").objects(1)
        whole = {"version": 1, "objects": [], "next_after": None}
        with answering(lambda path: (200, whole)) as url:
            for _ in range(8):  # they are asked in any order
                assert Lookups((refusing, dead, url), "").objects(1) == []


def test_the_end_of_a_lease_that_is_over_is_no_error() -> None:
    with answering(lambda path: (404, {"error": "no such lease"})) as url:
        Lookups((url,), "").end_lease(Lease(3, 1, 1.0))
