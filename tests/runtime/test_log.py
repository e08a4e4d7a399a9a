"""Log lines: one event each, whatever clients have chosen of what is in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from tidelog.runtime import log

FORGED = "x\n12:00:00.000 ERROR broker.losses an operator accepted the loss of a WAL broker=1\x1b[2J\r\u2028\x85"


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was before when the test has ended."""
    found = logging.getLogger()
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_what_a_client_has_chosen_makes_no_line_and_commands_no_terminal(root: logging.Logger) -> None:
    stream = io.StringIO()
    log.configure("info", "text", stream)
    root.info("a coordinator does not answer", extra={"transactional_id": FORGED, "named": [FORGED], "id": "größe 7"})
    root.info("refused: %s", FORGED)
    assert len(lines(stream)) == 2
    assert all(each.isprintable() for each in lines(stream))
    assert "transactional_id=x\\n12:00:00.000 ERROR" in lines(stream)[0] and lines(stream)[0].endswith(" id=größe 7")


def test_a_traceback_is_readable_and_none_of_its_lines_looks_like_an_event(root: logging.Logger) -> None:
    stream = io.StringIO()
    log.configure("info", "text", stream)
    try:
        raise ValueError(FORGED)
    except ValueError:
        root.exception("a request failed")
    first, *others = lines(stream)
    assert first.endswith("ERROR root a request failed")
    assert others[0] == "    Traceback (most recent call last):" and any("ValueError: x" in each for each in others)
    assert all(each.startswith("    ") and each.isprintable() for each in others)


def test_json_has_one_document_on_each_line(root: logging.Logger) -> None:
    stream = io.StringIO()
    log.configure("info", "json", stream)
    root.info("an event", extra={"path": FORGED})
    (line,) = lines(stream)
    assert json.loads(line)["path"] == FORGED
