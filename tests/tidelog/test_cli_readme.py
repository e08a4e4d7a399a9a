"""The README's first five minutes, pasted as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import environment
from tests.support.tidelog_process import running

pytestmark = pytest.mark.processes

README = Path(__file__).parents[2] / "README.md"
ACTIVATE = ". .venv/bin/activate\n"


def blocks(heading: str) -> list[tuple[str, str]]:
    """`(language, text)` of the code blocks under a heading."""
    section = README.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def test_the_first_five_minutes_work_as_pasted(tmp_path: Path) -> None:
    pasted = blocks("The first five minutes")
    assert [language for language, _ in pasted] == ["", "python", ""]
    assert pasted[0][1].startswith(ACTIVATE)
    bin_dir = Path(sys.executable).parent
    with running(tmp_path / "tidelog-data") as process:
        variables = environment(process.bootstrap)
        variables["PATH"] = f"{bin_dir}:{variables['PATH']}"
        printed = ""
        for language, text in pasted:
            body = text.removeprefix(ACTIVATE).replace("127.0.0.1:9092", process.bootstrap)
            command = [sys.executable, "-c", body] if language == "python" else ["bash", "-euo", "pipefail", "-c", body]
            done = subprocess.run(
                command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100, check=False
            )
            assert done.returncode == 0, done
            printed += done.stdout
    for part in ("created hello: 3 partitions", "one\n", "no problems", "b'", "readers", "WAL offsets"):
        assert part in printed, printed
