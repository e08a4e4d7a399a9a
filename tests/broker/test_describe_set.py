"""What operators are told of a replica set from the metadata."""

from __future__ import annotations

from tests.controller.replica_cluster import ReplicaCluster
from tidelog.broker.admin.replica_sets import describe_set
from tidelog.controller.model import replica_set_commands as r


def test_a_replica_that_replaces_another_one_is_named_with_it_until_it_has() -> None:
    cluster = ReplicaCluster(["", "", ""])
    cluster.settle()
    policy = cluster.image.replication[0].policy
    cluster.start(3, "")
    cluster.run(r.SetReplicaSetPolicy(3, policy))
    cluster.join(3, 3)
    assert describe_set(cluster.image, cluster.record(0))["exchange"] is None
    cluster.run(r.AssignReplica(0, 3, instead_of=2))
    document = describe_set(cluster.image, cluster.record(0))
    assert document["exchange"] == {"newcomer": 3, "replaced": 2}
    assert [row["role"] for row in document["replicas"]] == ["master", "follower", "follower", "joining"]
    cluster.settle(60)
    document = describe_set(cluster.image, cluster.record(0))
    assert document["exchange"] is None and 3 in document["in_sync"] and len(document["in_sync"]) == 3
