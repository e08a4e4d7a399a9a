"""Members of replicated WALs that come back with another disk than they had, that are replaced, and that are added:
what was acknowledged stays, and no member without it leads. Partitions move between replica sets meanwhile."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.backends import create_topic
from tests.support.hot_cluster import BROKERS, HotCluster, assert_equal_logs, hot_cluster, kept_log
from tests.support.partition_load import PartitionLoad
from tidelog.chaos.serve_cluster import eventually, tidelog_json
from tidelog.cli.client import ClusterConnection

PARTITIONS = 6
TOPIC = "kept"
WALS = ("wal", "replica-*")

pytestmark = pytest.mark.slow


def check(hot: HotCluster, load: PartitionLoad) -> None:
    assert load.verify(hot.bootstrap) == []
    hot.wait_full()
    ended = [each for each in hot.kafka_ports if not hot.nodes[each].is_running()]
    assert not ended, {each: hot.said(each) for each in ended}
    hot.kill(*hot.kafka_ports)
    assert_equal_logs(hot, BROKERS)


def lose(hot: HotCluster, broker: int, what: str) -> None:
    """Remove the WALs of a broker that has ended, or all but its identity."""
    for path in list(hot.files(broker).iterdir()):
        if path.is_symlink() or path.name == "identity.json":
            continue
        if what == "everything" or any(path.match(pattern) for pattern in WALS):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


@pytest.mark.parametrize("what", [pytest.param("wals", marks=pytest.mark.long), "everything"])
def test_a_member_without_its_disk_joins_anew(tmp_path: Path, what: str) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        before = {row["broker"]: row["wal"] for row in hot.described(101)["replicas"]}
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            hot.kill(101)
            lose(hot, 101, what)
            load.wait_grown()
            hot.begin(101)
            hot.ready(101)
            hot.wait_full()
            after = {row["broker"]: row["wal"] for row in hot.described(101)["replicas"]}
            assert after[101] != before[101] and after[102] == before[102]
            load.wait_grown()
            for replica_set in BROKERS:
                hot.elect(replica_set, 101)  # it may lead now, for it has everything
            load.wait_grown()
        check(hot, load)


@pytest.mark.long
@pytest.mark.parametrize("what", ["wals", pytest.param("everything", marks=pytest.mark.long)])
def test_a_member_without_its_disk_is_not_counted_where_it_would_decide(tmp_path: Path, what: str) -> None:
    """All are killed, one loses its disk, another one stays down: two brokers are up, one promise counts."""
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            hot.kill(*BROKERS)
            lose(hot, 101, what)
            count = load.count()
            hot.begin(101, 103)
            nobody_leads(hot)
            assert load.count() == count
            hot.begin(102)
            hot.ready(*BROKERS)
            load.wait_grown()
            hot.wait_full()
        check(hot, load)


def nobody_leads(hot: HotCluster) -> None:
    """101 is back without what it had, and 102 is down: no set has a master, and the status says why.

    A broker is ready when its replicas serve or follow, or after a while (`HotSets.wait_settled`), which is longer than
    elections wait for a living master.
    """
    hot.ready(101, 103)
    for replica_set in BROKERS:
        found = hot.described(replica_set)
        assert found["master"] is None, found
        counted = [each["broker"] for each in found["election"]["promises"] if each["counts"]]
        assert counted == [103], found
    problems = hot.ask("/status")["problems"]
    for replica_set in BROKERS:
        told = [each for each in problems if f"replica set {replica_set} has no master" in each]
        assert len(told) == 1 and told[0].endswith("1 more of the WALs on brokers 101, 102"), problems


@pytest.mark.long
def test_a_member_with_an_old_copy_of_its_directory_does_not_lead_with_what_is_missing(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            hot.kill(101)
            copy = tmp_path / "copy"
            shutil.copytree(hot.files(101), copy, symlinks=True)
            load.wait_grown()
            hot.begin(101)
            hot.ready(101)
            hot.wait_full()
            for replica_set in BROKERS:  # the controllers learn how far its WALs go beyond the copies
                hot.elect(replica_set, 101)
            load.wait_grown(200)
            rows = {each: hot.described(each)["replicas"] for each in BROKERS}
            old_ids = {each: next(row["wal"] for row in rows[each] if row["broker"] == 101) for each in BROKERS}
            hot.kill(*BROKERS)
            count = load.count()
            hot.swap(101, copy)
            hot.begin(101, 103)
            nobody_leads(hot)
            assert load.count() == count
            names = ["rejected-wal-1", "rejected-replica-102-1", "rejected-replica-103-1"]
            kept = [name for name in names if (hot.files(101) / name).exists()]
            assert not kept, "nobody has more yet than it has: it is left as it is"
            hot.begin(102)
            hot.ready(102)
            load.wait_grown()
            # Its sets have masters without it now: it keeps its old WALs aside, and is filled as another replica.
            eventually(lambda: all((hot.files(101) / name).is_dir() for name in names))
            hot.wait_full()
            known = {each: {row["broker"]: row["wal"] for row in hot.described(each)["replicas"]} for each in BROKERS}
            assert all(known[each][101] != old_ids[each] for each in BROKERS), (known, old_ids)
            problems = ClusterConnection(hot.address(101)).get("/status")["problems"]
            for name in names:
                assert any(name in each and "was refused" in each for each in problems), problems
            for replica_set in BROKERS:
                hot.elect(replica_set, 101)  # it may lead now, for it has everything
            load.wait_grown()
        check(hot, load)


@pytest.mark.long
def test_a_member_with_an_old_copy_of_its_directory_follows_a_living_master(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot", {"upload": {"size_bytes": 100_000, "age_ms": 1000}}) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS, value_bytes=1000) as load:
            load.wait_grown()
            hot.kill(101)
            copy = tmp_path / "copy"
            shutil.copytree(hot.files(101), copy, symlinks=True)
            hot.begin(101)
            hot.ready(101)
            hot.wait_full()
            load.wait_grown(200)
            hot.kill(101)
            hot.swap(101, copy)
            hot.begin(101)
            hot.ready(101)
            hot.wait_full()
            load.wait_grown()
            hot.kill(102)
            load.wait_grown()
            hot.begin(102)
            hot.ready(102)
        check(hot, load)


@pytest.mark.long
def test_a_member_that_joined_when_everything_was_uploaded_counts_after_a_kill(tmp_path: Path) -> None:
    """It begins at the end of its masters' WALs, with nothing, and is in sync."""
    with hot_cluster(tmp_path / "hot", {"upload": {"size_bytes": 100_000, "age_ms": 1000}}) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
        hot.kill(101)
        lose(hot, 101, "wals")
        hot.wait_masters([101])

        def uploaded() -> bool:
            replicas = [hot.ask("/status", [101, other])["replicas"].values() for other in (102, 103)]
            masters = [one for each in replicas for one in each if one["role"] == "leading"]
            return len(masters) == 3 and all(one["start_offset"] == one["end_offset"] for one in masters)

        eventually(uploaded)
        hot.begin(101)
        hot.ready(101)
        hot.wait_full()
        hot.kill(*BROKERS)
        assert not any(kept_log(hot.files(101), each, 101).records for each in BROKERS)
        hot.begin(101, 103)
        hot.ready(101, 103)
        hot.wait_masters([102])
        hot.begin(102)
        hot.ready(102)
        check(hot, load)


def test_a_broker_that_is_added_replaces_one_that_is_gone_for_good(tmp_path: Path) -> None:
    settings = {"controller": {"replica_repair_after_ms": 3000, "session_timeout_ms": 3000}}
    with hot_cluster(tmp_path / "hot", settings) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            hot.join(104)
            hot.kill(103)

            def replaced() -> bool:
                rows = {row["id"]: row for row in tidelog_json(hot.but(103), "replica-set", "list")}
                home = set(rows[103]["members"]) >= {101, 102, 104}  # its home broker stays a member
                return home and all(rows[each]["in_sync"] == [101, 102, 104] for each in rows if each in (101, 102))

            eventually(replaced)
            load.wait_grown()
            master = hot.sets([103])[103]["master"]
            hot.kill(master)
            hot.wait_masters([103, master])
            load.wait_grown()
            hot.begin(master)
            hot.ready(master)
        others = hot.but(103)
        assert load.verify(others) == []


@pytest.mark.long
def test_a_broker_that_comes_later_gets_replicas_of_the_sets_of_others(tmp_path: Path) -> None:
    """Until each of the four has three; and with what it has then it leads, and another one dies."""
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            hot.join(104)

            def even() -> dict[int, Any]:
                rows = hot.sets()
                held = Counter(broker for row in rows.values() for broker in row["members"])
                whole = len(rows) == 4 and all(len(row["in_sync"]) == 3 == len(row["members"]) for row in rows.values())
                return rows if whole and set(held.values()) == {3} else {}

            rows = eventually(even)
            followed = [each for each in BROKERS if 104 in rows[each]["members"]]
            assert len(followed) == 2, rows
            load.wait_grown()
            one = followed[0]
            hot.elect(one, 104)  # it has everything, for it may lead
            load.wait_grown()
            hot.kill(one)
            hot.wait_masters([one])
            load.wait_grown()
            hot.begin(one)
            hot.ready(one)
            hot.wait_full()
        assert load.verify(hot.bootstrap) == []
        for replica_set, row in hot.sets().items():
            assert row["members"] == rows[replica_set]["members"], "nothing moved any more"


def reassignment(turn: int) -> Any:
    """A file for kafka-reassign-partitions."""
    rows = [{"topic": TOPIC, "partition": at, "replicas": [BROKERS[(at + turn + 1) % 3]]} for at in range(PARTITIONS)]
    return {"version": 1, "partitions": rows}


@pytest.mark.long
def test_partitions_move_between_replica_sets_under_load_and_a_broker_dies_meanwhile(tmp_path: Path) -> None:
    with hot_cluster(tmp_path / "hot") as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown()
            for turn in range(3):
                plan = tmp_path / f"plan-{turn}.json"
                plan.write_text(json.dumps(reassignment(turn)))
                tidelog_json(hot.bootstrap, "partition", "move", "--file", str(plan))
                rows = hot.ask(f"/partitions?topic={TOPIC}")["partitions"]
                assert [row["broker"] for row in rows] == [BROKERS[(at + turn + 1) % 3] for at in range(PARTITIONS)]
                load.wait_grown()
            moves = [{"topic": TOPIC, "partition": at, "to": BROKERS[at % 3]} for at in range(PARTITIONS)]
            ClusterConnection(hot.but(101)).post("/moves", {"moves": moves})
            hot.kill(101)
            hot.wait_masters([101])
            load.wait_grown()
            hot.begin(101)
            hot.ready(101)
            load.wait_grown()
        check(hot, load)


@pytest.mark.long
@pytest.mark.parametrize("ends", [pytest.param("stopped", marks=pytest.mark.long), "killed"])
def test_a_cluster_with_one_replica_gets_three_when_it_is_started_with_them(tmp_path: Path, ends: str) -> None:
    with hot_cluster(tmp_path / "hot", {"replication": {"total_replicas": 1}}) as hot:
        create_topic(hot.bootstrap, TOPIC, PARTITIONS)
        with PartitionLoad(hot.bootstrap, TOPIC, PARTITIONS) as load:
            load.wait_grown(100)
            for broker in BROKERS:
                if ends == "stopped":
                    assert hot.nodes[broker].stop() == 0
                else:
                    hot.kill(broker)
            hot.sections["replication"]["total_replicas"] = 3
            hot.begin(*BROKERS)
            hot.ready(*BROKERS)
            hot.wait_full()
            load.wait_grown()
            hot.kill(102)
            hot.wait_masters([102])
            load.wait_grown()
            hot.begin(102)
            hot.ready(102)
        check(hot, load)
