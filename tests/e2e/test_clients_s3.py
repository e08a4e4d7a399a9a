"""The client scenario over moto, LocalStack and MinIO, by flags alone (issue: What it must show, 2).

With the WAL on disk for all servers and clients; with the WAL in the bucket for all clients on MinIO, and for one on
LocalStack, which has locks of its own around a conditional create.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.backends import s3_flags
from tests.e2e.scenario import round_trip
from tests.support.clients import KITS
from tests.support.s3_servers import S3Server
from tests.support.tidelog_process import TidelogProcess, running


@pytest.fixture(scope="module")
def tidelog_on_s3(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidelogProcess]:
    flags = [*s3_flags(s3_server), "--set", "upload.age_ms=500"]
    with running(tmp_path_factory.mktemp(f"tidelog-{s3_server.kind}") / "data", flags) as process:
        yield process
        assert process.stop() == 0, process.tail()


@pytest.mark.gate_cases("moto-kafka-python", "localstack-kcat", "minio-confluent-kafka")
@pytest.mark.parametrize("client", sorted(KITS))
def test_a_real_client_gets_back_every_byte_over_s3(client: str, tidelog_on_s3: TidelogProcess) -> None:
    round_trip(KITS[client](), tidelog_on_s3.bootstrap, f"trip-{client}")


@pytest.fixture(scope="module")
def tidelog_without_a_disk(
    minio_server: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TidelogProcess]:
    flags = [*s3_flags(minio_server), "--wal", "s3", "--set", "upload.age_ms=500"]
    data_dir = tmp_path_factory.mktemp("tidelog-wal-s3") / "data"
    with running(data_dir, flags) as process:
        yield process
        assert process.stop() == 0, process.tail()
        assert not (data_dir / "wal").exists()


@pytest.mark.gate_cases("confluent-kafka")
@pytest.mark.parametrize("client", sorted(KITS))
def test_a_real_client_gets_back_every_byte_with_the_wal_in_the_bucket(
    client: str, tidelog_without_a_disk: TidelogProcess
) -> None:
    round_trip(KITS[client](), tidelog_without_a_disk.bootstrap, f"trip-{client}")


@pytest.mark.long
def test_a_real_client_gets_back_every_byte_with_the_wal_in_localstack(
    tmp_path: Path, localstack_server: S3Server
) -> None:
    with running(tmp_path / "data", [*s3_flags(localstack_server), "--wal", "s3"]) as process:
        round_trip(KITS["confluent-kafka"](), process.bootstrap, "trip")
        assert process.stop() == 0, process.tail()
