"""TAB completes commands and the cluster's names; a cluster that does not answer completes to nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.cli import Cli, environment
from tests.support.clients import wait_until
from tests.support.tidelog_process import running

pytestmark = pytest.mark.processes


def completed(bootstrap: str, *words: str) -> list[str]:
    """What bash would be offered for the last of the words."""
    asked = {
        "_TIDELOG_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["tidelog", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tidelog"],
        env={**environment(bootstrap), **asked},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not done.stderr, done.stderr
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    with running(tmp_path_factory.mktemp("completion") / "data") as process:
        cli = Cli(process.bootstrap)
        cli("topic", "create", "orders", "-p", 2)
        cli("topic", "create", "other", "-p", 1)
        cli("produce", "orders", stdin=b"one\n")
        cli("consume", "orders", "--group", "readers", "--max-records", 1, "--from-beginning")
        yield cli


def test_topics_partitions_and_groups_are_completed_from_the_cluster(cli: Cli) -> None:
    assert completed(cli.bootstrap, "topic", "describe", "o") == ["orders", "other"]
    assert completed(cli.bootstrap, "consume", "or") == ["orders"]
    assert completed("127.0.0.1:1", "consume", "--bootstrap", cli.bootstrap, "ot") == ["other"]
    assert completed(cli.bootstrap, "partition", "move", "orders:") == ["orders:0", "orders:1"]
    wait_until(lambda: completed(cli.bootstrap, "group", "describe", "r") == ["readers"], "the group")
    assert completed(cli.bootstrap, "consume", "orders", "--group", "rea") == ["readers"]
    assert completed(cli.bootstrap, "group", "reset-offsets", "readers", "--topic", "oth") == ["other"]


@pytest.mark.long
def test_an_internal_topic_is_offered_once_it_is_being_typed(cli: Cli) -> None:
    assert completed(cli.bootstrap, "topic", "describe", "") == ["orders", "other"]
    assert completed(cli.bootstrap, "topic", "describe", "__") == ["__consumer_offsets"]


def test_without_a_cluster_only_commands_are_completed() -> None:
    assert completed("127.0.0.1:1", "topic", "describe", "o") == []
    assert completed("127.0.0.1:1", "group", "describe", "") == []
    assert "describe" in completed("127.0.0.1:1", "topic", "d")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_asks_tidelog(shell: str) -> None:
    assert f"_TIDELOG_COMPLETE={shell}_complete" in Cli()("completion", shell).text
