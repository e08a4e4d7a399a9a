"""A benchmark whose bucket cannot be had on a machine has measured nothing, and says so by its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

from bench import (
    cold_read,
    cost_per_gb,
    limit_s3,
    log_compaction,
    object_stores,
    spark_scan,
    wal_s3,
)

ON_MINIO: dict[ModuleType, tuple[str, ...]] = {
    cold_read: ("--store", "minio"),
    cost_per_gb: (),
    limit_s3: ("--store", "minio"),
    log_compaction: (),
    object_stores: (),
    spark_scan: (),
    wal_s3: ("--store", "minio"),
}


@contextmanager
def no_minio(directory: Path) -> Iterator[None]:
    """As on a machine without Go."""
    yield None


@pytest.mark.parametrize("program", ON_MINIO, ids=lambda program: program.__name__)
def test_a_program_without_its_bucket_fails(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jars").mkdir()
    monkeypatch.setattr("bench._bucket.minio", no_minio)
    monkeypatch.setattr(spark_scan, "install", lambda _kind: tmp_path)
    monkeypatch.setattr(sys, "argv", [program.__name__, *ON_MINIO[program]])
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        sys.exit(program.main())
    assert ended.value.code not in (0, None)
