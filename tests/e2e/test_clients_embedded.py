"""Real clients against a real `tidelog up` on the embedded store (issue: What it must show, 1)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import TransactionalIdAuthorizationFailed
from confluent_kafka import KafkaException, Producer

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


@pytest.mark.parametrize("wal", ["s3", "memory"])
def test_a_real_client_gets_back_every_byte_without_a_wal_on_disk(wal: str, tmp_path: Path) -> None:
    with running(tmp_path / "data", ["--wal", wal]) as process:
        told = [line for line in process.output if "are only in the memory of this process" in line]
        assert bool(told) == (wal == "memory")
        round_trip(KITS["confluent-kafka"](), process.bootstrap, "trip")
        assert process.stop() == 0, process.tail()
        assert not (tmp_path / "data" / "wal").exists()


def test_a_transactional_producer_of_librdkafka_fails_at_once_with_the_reason(tidelog: TidelogProcess) -> None:
    producer = Producer({"bootstrap.servers": tidelog.bootstrap, "transactional.id": "t", "log_level": 0})
    with pytest.raises(KafkaException) as refused:
        producer.init_transactions(60)
    error = refused.value.args[0]
    assert error.fatal() and error.code() == 53 and "transactions are not served yet" in error.str()


async def test_a_transactional_producer_of_aiokafka_fails_at_once(tidelog: TidelogProcess) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=tidelog.bootstrap, transactional_id="t")
    try:
        with pytest.raises(TransactionalIdAuthorizationFailed):
            await asyncio.wait_for(producer.start(), 60)
    finally:
        await producer.stop()
