"""What a rebuild refuses between the reading of the bucket and the claim: nobody has lost the bucket then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.tidelog.test_rebuild_last_state import CLUSTER, CommittedCluster
from tidelog.cli.options import load_config
from tidelog.cli.subcommands.cluster_rebuild import say_rebuilt
from tidelog.config import Loaded
from tidelog.controller.model.bucket_state import claim_key, owner_key, owner_text
from tidelog.process.data_dir import WrongDataDirectory
from tidelog.process.rebuild import UNFINISHED_FILE, carry_out, prepare
from tidelog.runtime.errors import ConfigError, Unavailable


def settings(data: Path, **flags: int | str) -> Loaded:
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


@pytest.mark.processes
def test_no_process_starts_over_a_directory_that_a_rebuild_has_not_finished(tmp_path: Path) -> None:
    """It would make another cluster there, with a bucket that has the objects of the first."""
    (tmp_path / UNFINISHED_FILE).touch()
    refused = Cli()("serve", "--set", f"node.data_dir={tmp_path}", code=WrongDataDirectory.exit_code)
    assert "was interrupted" in refused.err and "tidelog cluster rebuild" in refused.err
    assert [each.name for each in tmp_path.iterdir()] == [UNFINISHED_FILE]


async def test_the_command_that_starts_what_was_rebuilt_names_its_bucket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = CommittedCluster()
    await bucket.write_state(closed=True)
    loaded = settings(tmp_path / "my data", s3__endpoint="http://127.0.0.1:9000", s3__bucket="mine")
    report = (await prepare(loaded.config, bucket, 1, CLUSTER)).report
    say_rebuilt(loaded, report, 1)
    said = capsys.readouterr().err
    assert f"tidelog up --brokers 1 --data-dir '{tmp_path}/my data' --s3-endpoint http://127.0.0.1:9000" in said
    assert " --bucket mine" in said
