"""The file of a history, and `tidelog check` over it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.histories import Story
from tests.support.cli import Cli
from tidelog.runtime.errors import CorruptData, NotFound
from tidelog.simulation.checkers.history import FORMAT, Op, load


def told() -> Story:
    story = Story()
    story.history.about = {"seed": 7}
    story.send(1, 11, 12, at=0, idempotent=True)
    story.op("commit", 2, "info", group="g", offset=2, error="timed out")
    story.history.begin("send", 1, 99_000_000, topic="orders", partition=0, values=[13])
    return story


def test_a_file_gives_back_the_history(tmp_path: Path) -> None:
    history = told().history
    history.save(tmp_path / "run.jsonl")
    found = load(tmp_path / "run.jsonl")
    assert found.ops == history.ops and found.about == {"seed": 7}
    assert found.begin("heal", 0, 1).index == len(history)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 1 + len(history)


def test_operations_that_threads_began_at_once_are_saved_in_order(tmp_path: Path) -> None:
    history = told().history
    history.ops.reverse()
    history.save(tmp_path / "run.jsonl")
    assert [op.index for op in load(tmp_path / "run.jsonl").ops] == [0, 1, 2]


HEADER = f'{{"tidelog_history": {FORMAT}}}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no header"),
        ("{}\n", "no header"),
        ("\xff\n", "no header"),
        (f'{{"tidelog_history": {FORMAT + 1}}}\n', "version"),
        (HEADER + '{"index": 0}\n', "line 2"),
        (
            HEADER + '{"index": 1, "kind": "heal", "process": 0, "began_us": 0}\n',
            "line 2",
        ),
        (
            HEADER + '{"index": 0, "kind": "poll", "process": 0, "began_us": 0, "values": [1, 2], "offsets": [1]}\n',
            "number of offsets",
        ),
        (
            HEADER + '{"index": 0, "kind": "poll", "process": 0, "began_us": 0, "values": [1]}\n',
            "without their offsets",
        ),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "run.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptData, match=says):
        load(tmp_path / "run.jsonl")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"run\.jsonl"):
        load(tmp_path / "run.jsonl")


def test_an_operation_on_one_line_says_what_matters() -> None:
    op = Op(index=3, kind="poll", process=2, began_us=0, topic="t", partition=1, values=list(range(9)), error="gone")
    assert op.text() == "#3 p2 poll t-1 0.000000–… s open, error gone, values [0, 1, … 6 more …, 8]"


@pytest.mark.processes
def test_the_command_exits_with_what_it_found(tmp_path: Path) -> None:
    cli, path = Cli(), tmp_path / "run.jsonl"
    story = told()
    story.history.save(path)
    assert "3 operations, worst lag 0.0 ms: nothing is wrong" in cli("check", path).text
    story.poll(2, (1, 12), (3, 11))
    story.history.save(path)
    broken = cli("check", path, code=1)
    assert broken.text.startswith("duplicate: orders-0: value 11") and "#0 p1 send orders-0" in broken.text
    document = cli("check", path, "--format", "json", code=1).json()
    assert [one["rule"] for one in document["findings"]] == ["duplicate"]
    assert document["findings"][0]["ops"][0]["values"] == [11, 12]
    cli("check", tmp_path / "none.jsonl", code=3)
    path.write_text("no\n")
    cli("check", path, code=7)
