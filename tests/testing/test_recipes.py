"""The recipes of docs/testing.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.pytest_project import ROOT, outcome, run_pytest

pytestmark = pytest.mark.processes
PAGE = ROOT / "docs" / "testing.md"
BY_HAND = ("FastStream", "Quix")
"""Their packages are no part of the development tools; the page says how they were run."""
HERE = "tidelog_cluster_child = false\nasyncio_default_fixture_loop_scope = function"
"""The cluster in this process, too: it starts quicker."""


def recipes() -> dict[str, str]:
    """The code of each recipe, by its heading."""
    _, _, text = PAGE.read_text(encoding="utf-8").partition("## Recipes")
    found = {}
    for part in text.split("\n### ")[1:]:
        heading, _, body = part.partition("\n")
        found[heading] = "\n".join(re.findall(r"```python\n(.*?)```", body, re.DOTALL))
    return found


def test_the_first_example_and_the_recipes_of_clients_pass(tmp_path: Path) -> None:
    first, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    chosen = {heading: code for heading, code in recipes().items() if not heading.startswith(("Spark", *BY_HAND))}
    assert len(chosen) >= 4
    for number, code in enumerate([first, *chosen.values()]):
        (tmp_path / f"test_recipe_{number}.py").write_text(code)
    done = run_pytest(tmp_path, "-p", "no:warnings", "--durations=6", ini=HERE)
    assert outcome(done) == f"{1 + len(chosen)} passed", done.stdout


@pytest.mark.long
def test_the_recipe_of_spark_passes(tmp_path: Path) -> None:
    (code,) = (code for heading, code in recipes().items() if heading.startswith("Spark"))
    (tmp_path / "test_spark.py").write_text(code)
    done = run_pytest(tmp_path)
    assert outcome(done) == "1 passed", done.stdout
