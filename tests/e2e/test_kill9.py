"""A part of the long `kill -9` run (issue: What it must show, 3); `make reliability` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.backends import s3_flags
from tests.harness.kill9 import holes, run
from tests.support.s3_servers import S3Server
from tidelog.chaos.clients import FINAL_PROCESS, TOPIC
from tidelog.simulation.checkers.history import History

ROUNDS = 8


def history_of(*polls: tuple[int, int, list[int]], deleted: int | None = None) -> History:
    """`polls` are (process, partition, offsets)."""
    history = History()
    if deleted is not None:
        op = history.begin("delete_records", 31, 0, topic=TOPIC, partition=deleted, offset=2)
        history.end(op, "info", 1)  # nobody knows: it may have been done
    for process, partition, offsets in polls:
        op = history.begin("poll", process, 2, topic=TOPIC, partition=partition)
        history.end(op, "ok", 3, offsets=offsets, values=offsets)
    return history


def test_contiguous_offsets_have_no_holes() -> None:
    polls = [(FINAL_PROCESS, 1, [0, 1]), (FINAL_PROCESS, 2, [0]), (FINAL_PROCESS, 1, [2, 3]), (11, 1, [5, 7])]
    assert holes(history_of(*polls)) == []


@pytest.mark.parametrize(
    ("offsets", "says"),
    [([0, 1, 3, 4], "offset 3 was read where 2 was due"), ([1, 2], "offset 1 was read where 0 was due")],
)
def test_a_hole_in_the_offsets_is_found_unless_records_were_deleted(offsets: list[int], says: str) -> None:
    polls = [(FINAL_PROCESS, 1, offsets[:2]), (FINAL_PROCESS, 1, offsets[2:]), (FINAL_PROCESS, 2, [0, 1])]
    assert holes(history_of(*polls)) == [f"{TOPIC}-1: {says}"]
    assert holes(history_of(*polls, deleted=2)) == [f"{TOPIC}-1: {says}"]
    assert holes(history_of(*polls, deleted=1)) == []


@pytest.mark.slow
def test_kill_9_loses_doubles_and_reorders_nothing(tmp_path: Path) -> None:
    report = run(ROUNDS, seed=7, data_dir=tmp_path / "data")
    assert report.clean, report.text()
    assert report.count("send", "ok", idempotent=True) > ROUNDS * 10, report.text()


@pytest.mark.long
@pytest.mark.slow
def test_kill_9_over_s3_loses_doubles_and_reorders_nothing(tmp_path: Path, minio_server: S3Server) -> None:
    report = run(8, seed=8, data_dir=tmp_path / "data", flags=tuple(s3_flags(minio_server)))
    assert report.clean, report.text()


@pytest.mark.long
@pytest.mark.slow
def test_kill_9_with_the_wal_in_the_bucket_loses_doubles_and_reorders_nothing(
    tmp_path: Path, minio_server: S3Server
) -> None:
    report = run(10, seed=9, data_dir=tmp_path / "data", flags=("--wal", "s3", *s3_flags(minio_server)))
    assert report.clean, report.text()
    assert not (tmp_path / "data" / "wal").exists()
