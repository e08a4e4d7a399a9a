"""Spark's tasks over real S3 servers, with no other right than docs/spark.md asks for: to get objects."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from pyspark_tidelog import TidelogSource
from pyspark_tidelog.options import read_options
from tests.e2e.backends import create_topic, faulty_proxy, s3_flags
from tests.pyspark_tidelog.harness import FLAGS, Row, World, expected, rows_of_batch
from tests.support.cluster_process import up_cluster
from tests.support.s3_servers import S3Server, new_bucket
from tidelog.chaos.faulty_s3 import Fault, Seen
from tidelog.runtime.errors import TidelogError

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("spark")]

DENIED = Fault(status=403, code="AccessDenied")


def read(options: dict[str, object]) -> list[Row]:
    """What a batch read has, driven as Spark drives it."""
    source = TidelogSource({name: str(value) for name, value in options.items()})
    reader: Any = source.reader(source.schema())
    found: list[Row] = []
    for partition in pickle.loads(pickle.dumps(reader.partitions())):
        for batch in reader.read(partition):
            found += rows_of_batch(batch)
    return sorted(found, key=lambda row: (row["topic"], row["partition"], row["offset"]))


@pytest.mark.gate_cases("minio")
def test_tasks_need_the_right_to_get_objects_and_no_other(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = new_bucket()

    def only_gets(seen: Seen) -> Fault | None:
        is_object = seen.path.startswith(f"/{bucket}/") and len(seen.path) > len(bucket) + 2
        return None if seen.method == "GET" and is_object else DENIED

    flags = [*FLAGS, *s3_flags(s3_server, bucket)]
    with up_cluster(tmp_path / "cluster", brokers=2, flags=flags) as up, faulty_proxy(s3_server) as proxy:
        world = World(up)
        create_topic(world.bootstrap, "t", 1)
        for number in range(3):
            world.produce("t", 0, 50 * number, 50)
            world.upload()
        proxy.fault = only_gets
        rights = {
            "s3.endpoint": proxy.server.endpoint,
            "s3.access_key_id": s3_server.access_key_id,
            "s3.secret_access_key": s3_server.secret_access_key,
        }
        for client in ("obstore", "aiobotocore"):
            given = world.options(subscribe="t", tail="skip", maxBytesPerTask=3_000, **rights, **{"s3.client": client})
            assert read(given) == expected("t", 0, 0, 150, headers=False)
        assert proxy.count("GET") > 0
        proxy.fault = lambda seen: DENIED
        with pytest.raises(TidelogError) as refused:
            read(world.options(subscribe="t", tail="skip", **rights))
        assert "AccessDenied" in str(refused.value)


def test_keys_are_not_shown_with_the_options() -> None:
    options = read_options(
        {
            "kafka.bootstrap.servers": "127.0.0.1:1",
            "subscribe": "t",
            "readToken": "the-secret",
            "s3.secret_access_key": "the-secret",
            "kafka.sasl.password": "the-secret",
        }
    )
    assert options.token == "the-secret" and "the-secret" not in repr(options)
