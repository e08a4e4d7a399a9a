"""The client scenario over moto, LocalStack and MinIO, by flags alone (issue: What it must show, 2)."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("client", sorted(KITS))
def test_a_real_client_gets_back_every_byte_over_s3(client: str, tidelog_on_s3: TidelogProcess) -> None:
    round_trip(KITS[client](), tidelog_on_s3.bootstrap, f"trip-{client}")
