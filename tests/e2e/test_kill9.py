"""A part of the long `kill -9` run (issue: What it must show, 3); `make reliability` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.backends import s3_flags
from tests.harness.kill9 import run
from tests.support.s3_servers import S3Server

ROUNDS = 20


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kill_9_loses_doubles_and_reorders_nothing(tmp_path: Path) -> None:
    report = run(ROUNDS, seed=7, data_dir=tmp_path / "data")
    assert report.clean, report.text()
    assert report.count("send", "ok", idempotent=True) > ROUNDS * 10, report.text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_9_over_s3_loses_doubles_and_reorders_nothing(tmp_path: Path, minio_server: S3Server) -> None:
    report = run(8, seed=8, data_dir=tmp_path / "data", flags=tuple(s3_flags(minio_server)))
    assert report.clean, report.text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kill_9_with_the_wal_in_the_bucket_loses_doubles_and_reorders_nothing(
    tmp_path: Path, minio_server: S3Server
) -> None:
    report = run(10, seed=9, data_dir=tmp_path / "data", flags=("--wal", "s3", *s3_flags(minio_server)))
    assert report.clean, report.text()
    assert not (tmp_path / "data" / "wal").exists()
