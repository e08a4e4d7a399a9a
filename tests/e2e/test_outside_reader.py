"""A reader outside the cluster: the read token, a lease, and the records of a topic straight from the bucket."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support.cli import Cli, until
from tests.support.cluster_process import up_cluster
from tidelog.batch.batch import iter_batches, iter_records
from tidelog.cli.client import ClusterConnection
from tidelog.runtime.clock import SystemClock
from tidelog.storage.bucket.open import open_store
from tidelog.storage.bucket.store import ObjectNotFound, ObjectStore
from tidelog.storage.objects.format import Block
from tidelog.storage.objects.key import object_key
from tidelog.storage.objects.reader import get_range, load_index
from tidelog.storage.settings import S3Settings

FLAGS = ("--set", "upload.delete_delay_ms=100", "--set", "clean.enabled=false", "--set", "compaction.enabled=false")
ROUNDS = 4


class Reader:
    """What a program needs that is no broker: an address, a token, and the bucket."""

    def __init__(self, admin_url: str, token: str, data_dir: Path) -> None:
        self._url = admin_url
        self._token = token
        self._data_dir = data_dir

    def post(self, path: str, body: object = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, method="POST")
        request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def read(self, cluster_id: str, rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, bytes]]]:
        """Offsets and values by partition, from the objects that a lookup has named."""
        return asyncio.run(self._read(cluster_id, rows))

    async def _read(self, cluster_id: str, rows: list[dict[str, Any]]) -> dict[int, list[tuple[int, bytes]]]:
        store = open_store(S3Settings(), self._data_dir, SystemClock(), random.Random())
        found: dict[int, list[tuple[int, bytes]]] = {}
        try:
            for row in rows:
                mine = found.setdefault(row["partition"], [])
                for object_id, _kind, size, _start, _end in row["slices"]:
                    mine += await _records(store, object_key(cluster_id, object_id), size, row["stream"])
        finally:
            await store.close()
        return found


async def _records(store: ObjectStore, key: str, size: int, stream: int) -> list[tuple[int, bytes]]:
    index = await load_index(store, key, size)
    found: list[tuple[int, bytes]] = []
    for entry in index.entries_from(index.find(stream, 0)):
        if entry.stream_id != stream:
            break
        data = await get_range(store, key, entry.position, entry.end_position)
        for piece in Block.decode(memoryview(bytes(data)), entry, key=key):
            for header, batch in iter_batches(piece.payload):
                found += [(each.offset, bytes(each.value or b"")) for each in iter_records(batch, header=header)]
    return found


def test_a_lease_keeps_what_a_reader_has_looked_up_while_the_cluster_replaces_it(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with up_cluster(data_dir, brokers=2, flags=FLAGS) as up:
        cli = Cli(up.bootstrap)
        create_topic(up.bootstrap, "t", 1)
        for number in range(ROUNDS):
            lines = "".join(f"{number}-{line}\n" for line in range(50))
            cli("produce", "t", stdin=lines.encode())
            for node in ClusterConnection(up.bootstrap).get("/brokers")["brokers"]:
                ClusterConnection(up.bootstrap).at(node["admin_url"], node["id"]).post("/upload")
        connection = ClusterConnection(up.bootstrap)
        token = cli("cluster", "read-token").text.strip()
        reader = Reader(connection.admin_url, token, data_dir)

        for path in ("/upload", "/brokers/drain?id=2", "/compaction"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                reader.post(path)
            assert refused.value.code == 401
            refused.value.close()

        lease = reader.post("/leases?holder=a%20job&ttl_ms=600000")
        ranges = [{"topic": "t", "partition": 0}]
        found = reader.post("/slices", {"version": lease["version"], "ranges": ranges})
        assert found["next"] is None and found["cluster_id"] == lease["cluster_id"]
        planned = {each[0] for row in found["ranges"] for each in row["slices"]}
        assert len(planned) >= ROUNDS

        while cli("object", "compact", "--eager", "--format", "json").json()["tasks"]:
            pass
        row = cli("lease", "list", "--format", "json").json()[0]
        assert (row["id"], row["holder"]) == (lease["id"], "a job") and row["held_objects"] >= len(planned)
        assert "a job" in cli("lease", "list").text and "a job" in cli("status").text
        after = reader.post("/slices", {"version": lease["version"], "ranges": ranges})
        assert planned.isdisjoint(each[0] for row in after["ranges"] for each in row["slices"]), "all are replaced"

        wanted = sorted(f"{number}-{line}".encode() for number in range(ROUNDS) for line in range(50))
        for rows in (found["ranges"], after["ranges"]):
            records = reader.read(lease["cluster_id"], rows)
            assert sorted(value for each in records.values() for _, value in each) == wanted
            for each in records.values():
                assert [offset for offset, _ in each] == list(range(len(each)))

        assert "kept" in cli("lease", "end", lease["id"]).text
        assert "there are no leases" in cli("lease", "list").err
        assert "there is no lease" in cli("lease", "end", lease["id"], code=3).err
        with pytest.raises(urllib.error.HTTPError) as over:
            reader.post(f"/leases/renew?id={lease['id']}")
        assert over.value.code == 404
        over.value.close()

        def is_gone() -> bool:
            try:
                reader.read(lease["cluster_id"], found["ranges"])
            except ObjectNotFound:
                return True
            return False

        until(is_gone)
