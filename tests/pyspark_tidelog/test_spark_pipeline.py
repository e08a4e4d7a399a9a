"""A part of the long run of `tests.harness.spark_pipeline`; `make spark-pipeline` is the whole of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.spark_pipeline import PipelineOptions, run
from tests.support.digests import Digest
from tests.support.s3_servers import S3Server

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("spark"),
    pytest.mark.usefixtures("java_runtime"),
]


def test_a_digest_knows_records_that_are_exchanged_and_one_of_pairs_does_not() -> None:
    there, exchanged = Digest(), Digest()
    for offset, value in enumerate((b"%016x" % 0, b"%016x" % 1)):
        there.add(offset, 0, None, value, None)
    for offset, value in enumerate((b"%016x" % 1, b"%016x" % 0)):
        exchanged.add(offset, 0, None, value, None)
    assert there.unlike(exchanged) == ["misplaced", "values"]
    assert there.unlike(exchanged, only=["records", "size", "pairs"]) == []


@pytest.mark.long
@pytest.mark.timeout(1_200)
def test_every_job_of_spark_gives_what_was_produced_while_a_broker_dies(tmp_path: Path, moto_server: S3Server) -> None:
    pipeline = run(PipelineOptions(gb=0.02, every_s=5.0), moto_server, tmp_path)
    assert not pipeline.problems, "\n".join(pipeline.problems)
    assert len(pipeline.steps) == 9
