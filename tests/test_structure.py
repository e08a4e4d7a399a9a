"""What holds for the structure of the repository: import names, arrows, and the floors of `tools.figures`."""

from __future__ import annotations

import ast
import fnmatch
import logging
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

from tidelog.runtime.version import VERSION
from tools.figures import measure
from tools.report import Figure

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("batch", "broker", "chaos", "console", "controller", "runtime", "simulation", "storage", "stream")

IMPORT_ALL = """
import importlib, pkgutil, sys, tidelog
for module in pkgutil.walk_packages(tidelog.__path__, "tidelog."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name, module in list(sys.modules.items()):
    file = getattr(module, "__file__", None)
    if file is not None:
        print(name, file, sep="\\t")
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, Path]:
    """The file of every module, by its name, in a process that has imported all of tidelog."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=True)
    pairs = (line.split("\t") for line in done.stdout.splitlines())
    return {name: Path(file).resolve() for name, file in pairs}


@pytest.fixture(scope="module")
def figures() -> dict[str, Figure]:
    return measure(ROOT)


def test_every_module_of_the_product_has_exactly_one_import_name(loaded: dict[str, Path]) -> None:
    names: dict[Path, list[str]] = defaultdict(list)
    for name, file in loaded.items():
        names[file].append(name)
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    files += [file for file in (ROOT / "tidelog").rglob("*.py") if file.name != "__main__.py"]
    wrong = {str(file.relative_to(ROOT)): names[file] for file in set(files) if len(names[file]) != 1}
    assert wrong == {}
    assert [name for file in files for name in names[file] if name.split(".")[0] != "tidelog"] == []


def test_no_folder_is_a_package_of_its_own(loaded: dict[str, Path]) -> None:
    assert [name for name in FOLDERS if name in loaded] == []


def test_packages_import_down_and_leave_alone_what_is_private(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "disabled", logger.disabled)  # the checker disables those that exist
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert code == 0, capsys.readouterr().out


def docstring(folder: Path) -> str:
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""


def packages() -> list[Path]:
    return [file.parent for top in (*FOLDERS, "tidelog") for file in (ROOT / top).rglob("__init__.py")]


def test_every_package_tells_its_invariants_its_imports_and_its_entry() -> None:
    parts = ("Invariants:", "May import:", "Entry:")
    missing = {
        str(folder.relative_to(ROOT)): [part for part in parts if part not in docstring(folder)]
        for folder in packages()
    }
    assert {folder: names for folder, names in missing.items() if names} == {}


def test_every_package_names_what_the_contracts_keep_private_in_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    modules = [name for contract in settings["contracts"] for name in contract.get("protected_modules", [])]
    assert modules
    missing = []
    for module in modules:
        package, _, name = module.removeprefix("tidelog.").rpartition(".")
        _, private, names = docstring(ROOT / package.replace(".", "/")).partition("Private:")
        told = re.findall(r"`(\w+\*?)`", names.partition(".")[0])
        if not private or not any(fnmatch.fnmatchcase(name, pattern) for pattern in told):
            missing.append(module)
    assert missing == []


def test_every_route_of_the_admin_server_is_on_the_page_for_operators() -> None:
    sources = [file.read_text(encoding="utf-8") for file in (ROOT / "broker" / "admin").glob("*.py")]
    routes = {route for text in sources for route in re.findall(r'web\.(get|post|put|delete)\(\s*"([^"]+)"', text)}
    assert len(routes) > 30
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    told = [f"{method.upper()} {path}" for method, path in sorted(routes)]
    assert [each for each in told if not re.search(rf"`{re.escape(each)}[`?]", page)] == []


def test_every_test_that_a_page_names_exists() -> None:
    written: dict[str, str] = defaultdict(str)
    for file in (ROOT / "tests").rglob("test_*.py"):
        written[file.name] += file.read_text(encoding="utf-8")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"\b(test_\w+\.py)::(test_\w+)", pages))
    assert len(named) > 50
    assert [f"{file}::{name}" for file, name in sorted(named) if f"def {name}(" not in written[file]] == []


def test_no_two_test_modules_have_the_same_name() -> None:
    """Their folders are no packages: pytest refuses the second one, and only in a run that collects both."""
    places = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        places[path.name].append(path.relative_to(ROOT).as_posix())
    assert [found for found in places.values() if len(found) > 1] == []


def test_there_are_no_circles_and_no_upward_arrows(figures: dict[str, Figure]) -> None:
    assert [f"{item.where} {item.what}" for item in figures["arrows"].items if "by types" not in item.what] == []


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION


def test_no_class_name_of_the_product_is_defined_twice(figures: dict[str, Figure]) -> None:
    assert [f"{item.where} {item.what}" for item in figures["same_names"].items] == []


def test_no_reference_dangles(figures: dict[str, Figure]) -> None:
    assert [f"{item.where} {item.what}" for item in figures["references"].items] == []


def test_tests_touch_no_private_member(figures: dict[str, Figure]) -> None:
    assert [f"{item.where} {item.what}" for item in figures["private_touches"].items] == []
