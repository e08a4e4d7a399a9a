"""Real clients against a real `tidelog up` on the embedded store (issue: What it must show, 1)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.scenario import round_trip
from tests.support.clients import KITS
from tests.support.tidelog_process import TidelogProcess, running


@pytest.fixture(scope="module")
def tidelog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TidelogProcess]:
    with running(tmp_path_factory.mktemp("tidelog") / "data") as process:
        yield process
        assert process.stop() == 0, process.tail()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("client", sorted(KITS))
def test_a_real_client_gets_back_every_byte(client: str, tidelog: TidelogProcess) -> None:
    round_trip(KITS[client](), tidelog.bootstrap, f"trip-{client}")
