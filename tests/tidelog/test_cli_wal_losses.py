"""`tidelog wal losses`: that a loss is not told to be smaller than it may be."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from tidelog.cli.client import ClusterConnection
from tidelog.cli.subcommands.wal import losses
from tidelog.controller.model.wal_notes import StakeRange, WalLoss


@pytest.mark.parametrize(
    ("to_offset", "may_be_more", "told"), [(1145, True, "1145 or more"), (1145, False, "1145"), (-1, True, "unknown")]
)
def test_the_end_of_a_loss_is_told_as_far_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch, to_offset: int, may_be_more: bool, told: str
) -> None:
    """After a crash the controllers do not know of the records of the last second, which are lost, too."""
    loss = WalLoss(3, 1, 0, "a test", 0, 900, may_be_more, (StakeRange("t", 0, 739, to_offset),))
    monkeypatch.setattr(ClusterConnection, "get", lambda *_: {"losses": [as_row(loss)]})
    done = CliRunner().invoke(losses, ["--bootstrap", "127.0.0.1:1"])
    assert done.exception is None, done.exception
    last = done.output.splitlines()[-1]
    assert last.split("739", 1)[1].split("a test")[0].strip() == told


def as_row(loss: WalLoss) -> dict[str, object]:
    """As `GET /losses/accepted` answers."""
    return {**msgspec.structs.asdict(loss), "partitions": [msgspec.structs.asdict(each) for each in loss.partitions]}
