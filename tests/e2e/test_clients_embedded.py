"""Real clients against a real `tidelog up` on the embedded store (issue: What it must show, 1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.scenario import round_trip
from tests.support.clients import KITS
from tests.support.tidelog_process import TidelogProcess, running


@pytest.fixture(scope="module")
def tidelog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidelogProcess]:
    with running(tmp_path_factory.mktemp("tidelog") / "data") as process:
        yield process
        assert process.stop() == 0, process.tail()


@pytest.mark.parametrize("client", sorted(KITS))
def test_a_real_client_gets_back_every_byte(client: str, tidelog: TidelogProcess) -> None:
    round_trip(KITS[client](), tidelog.bootstrap, f"trip-{client}")


@pytest.mark.long
@pytest.mark.parametrize("wal", ["s3", "memory"])
def test_a_real_client_gets_back_every_byte_without_a_wal_on_disk(wal: str, tmp_path: Path) -> None:
    with running(tmp_path / "data", ["--wal", wal]) as process:
        told = [line for line in process.output if "are only in the memory of this process" in line]
        assert bool(told) == (wal == "memory")
        round_trip(KITS["confluent-kafka"](), process.bootstrap, "trip")
        assert process.stop() == 0, process.tail()
        assert not (tmp_path / "data" / "wal").exists()
