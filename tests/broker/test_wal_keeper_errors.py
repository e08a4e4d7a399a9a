"""What a broker tells of its WAL, when telling fails in a way that nobody expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.support.clients import wait_until
from tests.support.cluster import Cluster
from tidelog.controller.client.client import ControllerClient
from tidelog.controller.model.wal_notes import WalNote, note_in

pytestmark = pytest.mark.timeout(120)


def known(cluster: Cluster) -> WalNote:
    found = note_in(cluster.image.kv, 1)
    assert found is not None
    return found


@pytest.mark.parametrize(("error", "times"), [(RuntimeError, 1 << 30), (AssertionError, 1)])
def test_records_are_confirmed_and_told_although_notes_fail_unexpectedly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], times: int
) -> None:
    with Cluster(tmp_path, brokers=1) as cluster:
        cluster.run(cluster.nodes[1].controller.create_topic("t", 1, {}))
        wait_until(lambda: cluster.serves(1, "t", 0), "the partition is served")
        data = cluster.nodes[1].parts.data

        def is_settled() -> bool:
            cluster.run(data.upload_now())
            return not known(cluster).may_grow

        wait_until(is_settled, "the controllers take the WAL for wholly committed")
        note_wal, failed = ControllerClient.note_wal, list[WalNote]()

        async def fails(client: ControllerClient, replica_set: int, note: WalNote) -> None:
            if len(failed) < times:
                failed.append(note)
                raise error("nobody expected this")
            await note_wal(client, replica_set, note)

        monkeypatch.setattr(ControllerClient, "note_wal", fails)
        producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})
        producer.produce("t", b"x")
        assert producer.flush(20) == 0, "the record is not acknowledged"
        assert failed and failed[0].may_grow
        monkeypatch.undo()
        wait_until(lambda: known(cluster).may_grow, "the controllers know that there may be more")
