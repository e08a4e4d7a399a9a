"""A broker that cannot replicate names what can be changed: a policy in the metadata, or its own configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidelog.broker.hot_sets import is_replicated
from tidelog.controller.model.levels import NEWEST
from tidelog.controller.model.replication import PolicyRecord, ReplicationRecord
from tidelog.runtime.errors import ConfigError


@pytest.mark.parametrize("has_policy", [False, True])
def test_a_broker_whose_wal_cannot_be_replicated_names_what_decides(has_policy: bool) -> None:
    rows = {1: ReplicationRecord(1, PolicyRecord(total_replicas=3))} if has_policy else {}
    image = SimpleNamespace(replica_sets={}, replication=rows, level=NEWEST)
    base = SimpleNamespace(
        image=lambda: image,
        broker_id=1,
        settings=SimpleNamespace(replication=SimpleNamespace(total_replicas=1 if has_policy else 3)),
        wal=SimpleNamespace(kind="s3", replicas=None),
    )
    with pytest.raises(ConfigError, match="3 replicas, and") as refused:
        is_replicated(cast("Any", base))
    hint = refused.value.hint or ""
    assert "wal.kind = disk" in hint
    assert ("set-policy 1" in hint) is has_policy and ("replication.total_replicas" in hint) is not has_policy
