"""What a rebuild refuses between the reading of the bucket and the claim: nobody has lost the bucket then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidelog.test_rebuild_last_state import CLUSTER, CommittedCluster
from tidelog.cli.options import load_config
from tidelog.config import Loaded
from tidelog.controller.model.bucket_state import claim_key, owner_key, owner_text
from tidelog.process.rebuild import carry_out, prepare
from tidelog.runtime.errors import ConfigError, Unavailable


def settings(data: Path, **flags: int) -> Loaded:
    return load_config(None, (), node__data_dir=str(data), **flags)


async def was_claimed(bucket: CommittedCluster) -> bool:
    return any([info.key == claim_key(CLUSTER, 2) async for info in bucket.list(CLUSTER)])


async def test_settings_that_no_cluster_can_have_take_the_bucket_from_nobody(tmp_path: Path) -> None:
    bucket = CommittedCluster()
    await bucket.write_state(closed=True)
    loaded = settings(tmp_path, kafka__port=65_535)
    prepared = await prepare(loaded.config, bucket, 3, CLUSTER)
    with pytest.raises(ConfigError, match="65537"):
        await carry_out(loaded, bucket, prepared, take_over=False)
    assert not await was_claimed(bucket)


@pytest.mark.parametrize("what", ["it stopped again", "it died before its first metadata", "it runs"])
async def test_a_cluster_that_was_started_while_the_operator_was_asked_is_not_rolled_back(
    what: str, tmp_path: Path
) -> None:
    """What it acknowledged, and uploaded, is not in what was read."""
    bucket = CommittedCluster()
    await bucket.write_state(closed=True)
    loaded = settings(tmp_path)
    prepared = await prepare(loaded.config, bucket, 1, CLUSTER)
    if what == "it died before its first metadata":
        await bucket.put(owner_key(CLUSTER), [owner_text(1, 2, 0)])
    else:
        await bucket.write_state(closed=what == "it stopped again", term=2)
    with pytest.raises(Unavailable, match="has changed since it was read"):
        await carry_out(loaded, bucket, prepared, take_over=True)
    assert not await was_claimed(bucket)
    again = await prepare(loaded.config, bucket, 1, CLUSTER)
    await carry_out(loaded, bucket, again, take_over=True)
    assert await was_claimed(bucket)
