"""`tidelog controller config` against a real process: shown with its source, set, taken back, kept over a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Cli
from tests.support.tidelog_process import running

pytestmark = pytest.mark.processes

SESSION, PREFERRED = "controller.session_timeout_ms", "controller.preferred_master_enable"


def settings(cli: Cli, *more: str) -> dict[str, dict[str, Any]]:
    rows = cli("controller", "config", "list", *more, "--format", "json").json()
    return {row["key"]: row for row in rows}


def test_settings_are_shown_set_taken_back_and_kept_over_a_restart(tmp_path: Path) -> None:
    with running(tmp_path / "data") as process:
        cli = Cli(process.bootstrap)
        found = settings(cli)
        assert (found[SESSION]["value"], found[SESSION]["source"], found[SESSION]["dynamic"]) == (
            10_000,
            "default",
            True,
        )
        assert "controller.members" not in found and "controller.members" in settings(cli, "--all")
        assert f"{SESSION} = 20000 on all controllers" in cli("controller", "config", "set", SESSION, "20000").text
        assert "as before" in cli("controller", "config", "set", SESSION, "20000").text
        cli("controller", "config", "set", PREFERRED, "false")
        found = settings(cli)
        assert (found[SESSION]["value"], found[SESSION]["source"], found[SESSION]["configured"]) == (
            20_000,
            "override",
            10_000,
        )
        assert [SESSION, "20000", "override", "10000", "now"] in cli("controller", "config", "list").rows()
        assert "is as configured" in cli("controller", "config", "unset", PREFERRED).text
        assert settings(cli)[PREFERRED]["value"] is True

        refused = cli("controller", "config", "set", "controller.read_grace_ms", "1000", code=2).err
        assert "would read objects that are deleted" in refused and "restart" in refused
        assert "3 heartbeat intervals" in cli("controller", "config", "set", SESSION, "100", code=2).err
        assert "no setting 'controller.x'" in cli("controller", "config", "set", "controller.x", "1", code=2).err
        assert "no setting 'x'" in cli("controller", "config", "unset", "x", code=2).err
        assert "readers need no token" in cli("cluster", "read-token", code=3).err, "a cluster without a secret"
    with running(tmp_path / "data") as process:
        found = settings(Cli(process.bootstrap))
        assert (found[SESSION]["value"], found[SESSION]["source"]) == (20_000, "override")
