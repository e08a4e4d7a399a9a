"""The wheel holds `tidelog` only, and an installed Tidelog takes nobody's import names."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
OWN = ("storage", "broker", "runtime")
BUILD = """
import os, sys
os.chdir(sys.argv[2])
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[3]))
"""

pytestmark = pytest.mark.processes


def call(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(one) for one in command], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """A `wheel` or `sdist` by the project's build backend as it is installed here, without a network."""
    target.mkdir()
    return target / call(sys.executable, "-c", BUILD, kind, source, target, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that git knows: building writes beside them."""
    target = tmp_path_factory.mktemp("checkout")
    archive = target.with_suffix(".tar")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tarfile.open(archive, "w") as packed:
        for name in filter(None, files.split("\0")):
            if (ROOT / name).exists() or (ROOT / name).is_symlink():
                packed.add(ROOT / name, name, recursive=False)
    with tarfile.open(archive) as packed:
        packed.extractall(target)
    return target


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("built") / "wheel")


@pytest.fixture(scope="module")
def wheel_of_sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("built")
    with tarfile.open(build("sdist", checkout, place / "sdist")) as packed:
        packed.extractall(place / "unpacked")
    (source,) = (place / "unpacked").iterdir()
    return build("wheel", source, place / "wheel")


def modules(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return {name for name in packed.namelist() if ".dist-info/" not in name and ".data/" not in name}


def man_pages(wheel: Path) -> set[str]:
    """What is installed beside the packages."""
    with zipfile.ZipFile(wheel) as packed:
        return {name.partition(".data/")[2] for name in packed.namelist() if ".data/" in name}


def test_a_wheel_has_the_man_pages(wheel: Path, wheel_of_sdist: Path) -> None:
    expected = {f"data/share/man/man1/{file.name}" for file in (ROOT / "man").glob("*.1")}
    assert expected and man_pages(wheel) == man_pages(wheel_of_sdist) == expected


def test_a_wheel_holds_tidelog_only(wheel: Path) -> None:
    names = modules(wheel)
    assert {name.split("/")[0] for name in names} <= {"tidelog", "pyspark_tidelog"}
    expected = {str(file.relative_to(ROOT)) for file in (ROOT / "tidelog").glob("*.py")}
    for folder in (ROOT / "tidelog").iterdir():
        if folder.is_dir() and folder.name != "__pycache__":
            expected |= {f"tidelog/{folder.name}/{file.relative_to(folder)}" for file in folder.rglob("*.py")}
    assert {name for name in names if name.startswith("tidelog/") and name.endswith(".py")} == expected
    assert "tidelog/py.typed" in names
    pages = {f"tidelog/console/static/{file.name}" for file in (ROOT / "console" / "static").iterdir()}
    assert "tidelog/console/static/index.html" in pages <= names


def test_a_wheel_of_the_source_distribution_is_the_same(wheel: Path, wheel_of_sdist: Path) -> None:
    assert modules(wheel_of_sdist) == modules(wheel)


def test_a_project_with_packages_of_the_same_names_keeps_them(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index",
         "--disable-pip-version-check", wheel, cwd=tmp_path)  # fmt: skip
    # The dependencies that are installed here, but not the checkout: a .pth in a directory named by a .pth is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    project = tmp_path / "project"
    for name in OWN:
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text(f"WHOSE = 'the project, {name}'\n")
    program = f"import {', '.join(OWN)}; print({'; '.join(f'{name}.WHOSE' for name in OWN).replace(';', ',')})"
    program += "; import tidelog.broker.node, tidelog.storage.storage; print(tidelog.broker.node.__file__)"
    said = call(python, "-c", program, cwd=project)
    assert said.splitlines()[0] == " ".join(f"the project, {name}" for name in OWN)
    assert said.splitlines()[1].startswith(str(packages))
    tidelog = environment / "bin" / "tidelog"
    for place in (tmp_path, project):
        assert call(tidelog, "--version", cwd=place).startswith("tidelog")
        assert "node.data_dir" in call(tidelog, "config", cwd=place)
