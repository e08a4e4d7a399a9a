"""Every command has a man page, which says what its help says, and which groff formats without a complaint."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.missing import lacking
from tools.man_pages import DIRECTORY, main, pages

PAGES = pages()


def test_the_pages_are_those_of_the_commands() -> None:
    there = {file.name: file.read_text(encoding="utf-8") for file in DIRECTORY.iterdir()}
    stale = sorted(name for name in PAGES.keys() | there.keys() if PAGES.get(name) != there.get(name))
    assert stale == [], "python -m tools.man_pages writes them anew"


def test_a_page_has_what_its_command_says() -> None:
    page = PAGES["tidelog-topic-alter.1"]
    for text in ("Change a topic's configs or add partitions", "\\-\\-delete\\-config KEY", "TIDELOG_BOOTSTRAP"):
        assert text in page
    assert "tidelog\\-topic\\-alter (1)" in PAGES["tidelog-topic.1"]
    assert "tidelog\\-topic (1)" in PAGES["tidelog.1"] and "port in use" in PAGES["tidelog.1"]


def test_pages_of_commands_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone, other = tmp_path / "tidelog-gone.1", tmp_path / "README"
    gone.touch()
    other.touch()
    main([str(tmp_path)])
    assert not gone.exists() and other.exists() and len(list(tmp_path.iterdir())) == len(PAGES) + 1


@pytest.mark.processes
def test_groff_has_nothing_to_complain_of(tmp_path: Path) -> None:
    groff = shutil.which("groff")
    if groff is None:
        lacking("groff")
    main([str(tmp_path)])
    command = [groff, "-man", "-ww", "-Tutf8", "-z", *sorted(map(str, tmp_path.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
