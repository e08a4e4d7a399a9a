"""What the tests of jobs have Spark do (`spark_child`): each function is given the session."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pyspark_tidelog.jobs import audit as audit_job
from pyspark_tidelog.jobs.frame import ClusterAccess
from pyspark_tidelog.jobs.inventory import Inventory, take_inventory
from tests.support.cli import until


def audit(spark: SparkSession, bootstrap: str, token: str, report: str = "") -> dict[str, Any]:
    """Audit a cluster."""
    options = audit_job.AuditOptions(ClusterAccess(bootstrap, token), report, task_bytes=10_000)
    return asdict(audit_job.run(spark, options))


def audit_in_steps(spark: SparkSession, bootstrap: str, token: str, directory: str) -> dict[str, Any]:
    """Audit a cluster; wait between the first look at the metadata and the first read until the file `go` is there."""
    looked, go = Path(directory) / "looked", Path(directory) / "go"

    def slowly(access: ClusterAccess, version: int) -> Inventory:
        found = take_inventory(access, version)
        looked.touch()
        until(go.exists)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_job, "take_inventory", slowly)
        return audit(spark, bootstrap, token)
