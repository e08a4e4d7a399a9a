"""The structural figures of small trees, with rooms imported by their path and through the face's links."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.missing import lacking
from tools.figures import main, measure
from tools.report import Figure
from tools.source import Repository

pytestmark = pytest.mark.processes


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def figure(root: Path, key: str, files: dict[str, str]) -> Figure:
    write(root, files)
    return measure(root)[key]


def texts(figure: Figure) -> list[str]:
    return [f"{item.where} {item.what}".strip() for item in figure.items]


def test_an_empty_tree_has_all_figures(tmp_path: Path) -> None:
    assert all(not figure.items for figure in measure(tmp_path).values())


def test_folders_count_modules_directly_in_them_the_largest_first(tmp_path: Path) -> None:
    files = ["broker/a.py", "storage/__init__.py", "storage/a.py", "storage/sub/b.py", "tests/t.py", "bench/b.py"]
    found = figure(tmp_path, "folders", dict.fromkeys(files, ""))
    assert list(found.numbers.items()) == [("storage", 2), ("broker", 1), ("storage/sub", 1)]


def test_files_of_git_are_the_tracked_and_the_new_ones_without_links(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        lacking("git")
    write(tmp_path, {"storage/a.py": "", "storage/gone.py": "", "storage/ignored.py": "", ".gitignore": "ignored.py\n"})
    (tmp_path / "tidelog").mkdir()
    (tmp_path / "tidelog/storage").symlink_to("../storage")
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "storage/gone.py").unlink()
    write(tmp_path, {"storage/new.py": ""})
    assert Repository.read(tmp_path).files == (".gitignore", "storage/a.py", "storage/new.py")


def test_links_of_the_face_give_the_import_names(tmp_path: Path) -> None:
    write(
        tmp_path, {"tidelog/cli.py": "", "storage/__init__.py": "", "storage/bucket/s3.py": "", "runtime/clock.py": ""}
    )
    (tmp_path / "tidelog/storage").symlink_to("../storage")
    names = [source.name for source in Repository.read(tmp_path).sources]
    assert names == ["runtime.clock", "tidelog.storage", "tidelog.storage.bucket.s3", "tidelog.cli"]


def test_a_file_that_is_not_python_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"storage/a.py": "\ndef"})
    with pytest.raises(SystemExit, match=r"storage/a\.py:2"):
        measure(tmp_path)


def test_long_functions(tmp_path: Path) -> None:
    long = "def long():\n" + "    x = 1\n" * 70
    exact = "@mark\ndef exact():\n" + "    x = 1\n" * 69
    found = figure(tmp_path, "long_functions", {"broker/a.py": f"{long}{exact}class A:\n    def short(self): ...\n"})
    assert texts(found) == ["broker/a.py:1 long"]
    assert found.numbers == {"functions": 3, "over 70 lines": 1, "median length": 70, "longest": 71}


def test_parameters_do_not_count_self_and_fields(tmp_path: Path) -> None:
    code = """
class A:
    f1: int; f2: int; f3: int; f4: int; f5: int; f6: int; f7: int; f8: int; f9: int
    def __init__(self, a, b, c, d, /, e, f, *, g, h): ...
    @staticmethod
    def nine(a, b, c, d, e, f, g, *h, **i): ...
    @classmethod
    def eight(cls, a, b, c, d, e, f, g, h): ...
"""
    write(tmp_path, {"broker/a.py": code})
    figures = measure(tmp_path)
    assert texts(figures["many_parameters"]) == ["broker/a.py:6 A.nine"]
    assert [item.value for item in figures["constructors"].items] == [8]


@pytest.mark.parametrize(
    "code",
    [
        "async def f(): ...",
        "import asyncio",
        "import time",
        "def f():\n    import socket",
        "from concurrent.futures import Future",
        "from concurrent import futures",
        "from pathlib import Path",
        "import pathlib\npathlib.Path('x')",
        "import aiohttp.web",
        "from os import urandom\nurandom(1)",
        "import os as system\nsystem.path.exists('x')",
        "import random\nrandom.random()",
        "from random import Random\nRandom()",
        "from datetime import datetime\ndatetime.now()",
        "open('x')",
        "def f(path): path.read_bytes()",
    ],
)
def test_modules_that_do_io(tmp_path: Path, code: str) -> None:
    assert figure(tmp_path, "sans_io", {"storage/a.py": code}).numbers["storage, %"] == 0


@pytest.mark.parametrize(
    "code",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio",
        "import random\ndef f(rng: random.Random) -> random.Random: return rng",
        "from random import Random\nRandom(7)",
        "import os\nos.path.join(os.fspath('a'), 'b')\ndef f(path: os.stat_result): ...",
        "from pathlib import PurePosixPath\nPurePosixPath('a')",
        "from datetime import datetime\ndatetime(1970, 1, 1)",
        "class A:\n    def open(self): ...\nA().open()",
        "import logging\nlogging.getLogger('x').info('asyncio')",
    ],
)
def test_modules_that_do_no_io(tmp_path: Path, code: str) -> None:
    assert figure(tmp_path, "sans_io", {"storage/a.py": code}).numbers["storage, %"] == 100


def test_sans_io_shares_are_of_lines_of_server_rooms(tmp_path: Path) -> None:
    files = {
        "storage/io.py": "import asyncio\n",
        "storage/plan.py": "import storage.io\n" + "x = 1\n" * 2,
        "batch/codec.py": "x = 1\n" * 4,
        "runtime/clock.py": "import time\n",
    }
    numbers = figure(tmp_path, "sans_io", files).numbers
    assert numbers["storage, %"] == 75
    assert numbers["batch, %"] == 100
    assert numbers["all, %"] == 87.5
    assert numbers["storage, with all that they import, %"] == 0
    assert numbers["all, with all that they import, %"] == 50
    assert numbers["lines"] == 8


def test_circles_without_and_with_types(tmp_path: Path) -> None:
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from storage import {}\n"
    files = {
        "storage/a.py": "from storage.b import x\n",
        "storage/b.py": "def f():\n    import storage.c\n",
        "storage/c.py": "from storage import a\n",
        "storage/d.py": types.format("e"),
        "storage/e.py": "from storage.d import y\n",
        "storage/f.py": "import storage.a\n",
    }
    found = figure(tmp_path, "arrows", files)
    assert (found.numbers["circles"], found.numbers["modules in circles"]) == (1, 3)
    assert found.numbers["circles, with type imports"] == 2
    assert texts(found)[0] == "storage.a circle: storage.a storage.b storage.c"


def test_upward_arrows(tmp_path: Path) -> None:
    files = {
        "tidelog/cli.py": "from tidelog.broker import node\n",
        "broker/node.py": "from tidelog.cli import x\nfrom tidelog.storage.wal import Wal\n",
        "storage/wal.py": "if TYPE_CHECKING:\n    from typing import Any\n    from tidelog.broker.node import Node\n",
        "chaos/run.py": "from tidelog import simulation\n",
        "simulation/__init__.py": "import tidelog.chaos.run\n",
    }
    write(tmp_path, files)
    for room in ("broker", "storage", "chaos", "simulation"):
        (tmp_path / "tidelog" / room).symlink_to(f"../{room}")
    found = measure(tmp_path)["arrows"]
    assert (found.numbers["upward imports"], found.numbers["upward type imports"]) == (2, 1)
    assert [text for text in texts(found) if "upward" in text] == [
        "broker/node.py:1 upward: tidelog.cli",
        "simulation/__init__.py:1 upward: tidelog.chaos.run",
        "storage/wal.py:3 upward by types: tidelog.broker.node",
    ]


def test_class_names_defined_more_than_once(tmp_path: Path) -> None:
    files = {
        "broker/a.py": "class A: ...\nclass B:\n    class C: ...\n",
        "storage/a.py": "class A: ...\nclass C: ...\n",
    }
    found = figure(tmp_path, "same_names", {**files, "tests/a.py": "class B: ...\n"})
    assert texts(found) == ["A broker/a.py:1, storage/a.py:1", "C broker/a.py:3, storage/a.py:2"]


def test_references_to_files(tmp_path: Path) -> None:
    files = {
        "README.md": "See docs/a.md, gone.md, https://example.org/b.md and\nbroker/node.py.\n",
        "docs/a.md": "```\n../README.md missing/a.md\n```\n",
        "CHANGELOG.md": "gone.md\n",
        "broker/node.py": '"""See a.md and old.md."""\nX = "string.md"\n"""As node.py and none.py say."""\n# lost.md\n',
    }
    assert texts(figure(tmp_path, "references", files)) == [
        "README.md:1 page: gone.md",
        "docs/a.md:2 page: missing/a.md",
        "broker/node.py:1 page: old.md",
        "broker/node.py:4 page: lost.md",
        "broker/node.py:3 source file: none.py",
    ]


def test_links_and_anchors(tmp_path: Path) -> None:
    links = "[a](docs/a.md) [b](docs/b.md) [c](docs) [d](#here) [e](docs/a.md#it-s) [f](docs/a.md#its-_x_-1)\n"
    files = {
        "README.md": f"# Here\n{links}`[g](none)` [h](https://example.org/x) [i](broker/x.py#L3)\n\n[j]: none.md\n",
        "docs/a.md": "# It's `_x_`\n## Its _x_!\n```\n# no heading\n```\n[k](#no-heading) [l](/README.md)\n",
        "broker/x.py": "",
    }
    assert texts(figure(tmp_path, "references", files)) == [
        "README.md:2 link: docs/b.md",
        "README.md:5 link: none.md",
        "README.md:2 anchor: docs/a.md#it-s",
        "docs/a.md:6 anchor: #no-heading",
    ]


WAL = """
from collections import deque
LIMIT = 1
class Base:
    def close(self): self.closed = True
class Wal(Base):
    size: int
    def append(self): ...
class Other(deque): ...
class Settings:
    max_bytes: int
class Config:
    storage: Settings
KEY = "storage.some.key"
"""


def test_names_of_modules(tmp_path: Path) -> None:
    there = (
        "`storage.wal` `storage.wal.Wal.append(x, y)` `storage.wal.Wal.closed` `storage.wal.LIMIT.x` `storage.wal`\n"
    )
    free = "`storage.wal.Other.popleft` `storage.max_bytes` `storage.some.key` `storage.toml` `python -m bench.run`\n"
    gone = (
        "`storage.wall` `storage.wal.Wal.none` `storage.wal.\nWal` `tidelog.storage.wal` `python -m bench.gone --x`\n"
    )
    files = {"README.md": there + free + gone, "storage/wal.py": WAL, "bench/run.py": "", "tidelog/cli.py": ""}
    found = texts(figure(tmp_path, "references", files))
    names = ["storage.wall", "storage.wal.Wal.none", "tidelog.storage.wal", "bench.gone"]
    assert [text.partition(" ")[2] for text in found] == [f"module: {name}" for name in names]


def test_names_of_modules_behind_links(tmp_path: Path) -> None:
    text = "`tidelog.storage.wal.Wal` `tidelog.storage` `storage.wal` tidelog/storage/wal.py storage/wal.py\n"
    write(tmp_path, {"docs/a.md": text, "storage/wal.py": WAL, "tidelog/cli.py": ""})
    (tmp_path / "tidelog/storage").symlink_to("../storage")
    assert texts(measure(tmp_path)["references"]) == ["docs/a.md:1 module: storage.wal"]


def test_private_members_touched_by_tests(tmp_path: Path) -> None:
    code = (
        "class A:\n    def f(self, x):\n"
        "        self._a, x._b, self.x._c, x._, x.__dict__, x._replace(), super()._d, x.y()._b\n"
        "import os, tidelog.a as a\nos._exit(1), os.x._c, a._b\n"
    )
    found = figure(tmp_path, "private_touches", {"tests/t.py": code, "broker/a.py": "x._z"})
    assert texts(found) == ["tests/t.py _b _c"]
    assert found.numbers == {"touches": 5, "distinct names": 2, "files that touch": 1}


@pytest.mark.parametrize(
    "code",
    [
        "from tidelog.a import _x",
        "from tidelog.a import _x as x",
        "monkeypatch.setattr(a, '_x', 1)",
        "monkeypatch.setattr('tidelog.a._x', 1)",
        "getattr(a, '_x')",
        "mock.patch.object(a, '_x')",
        "def f(self: A): return self._x",
    ],
)
def test_a_private_member_is_found_by_whatever_way_it_is_reached(tmp_path: Path, code: str) -> None:
    assert texts(figure(tmp_path, "private_touches", {"tests/t.py": code})) == ["tests/t.py _x"]


def test_any_in_signatures_of_handlers(tmp_path: Path) -> None:
    code = "async def f(a: Any, *b: dict[str, typing.Any]) -> Any:\n    x: Any\ndef g(a: int): ...\n"
    found = figure(tmp_path, "handler_any", {"broker/kafka/handlers/a.py": code, "broker/b.py": code})
    assert found.numbers == {"functions": 2, "functions with Any": 1, "Any in signatures": 3}


def test_members_that_may_be_none(tmp_path: Path) -> None:
    code = """
class Many:
    a: int | None
    b: Optional[int]
    c: ClassVar[str | bytes | None] = None
    no: list[int | None]
    def __init__(self):
        self.d: int | None = None
        self.e: None | int = None
        self.e: None | int = None
class Few:
    a: int | None
"""
    found = figure(tmp_path, "optional_members", {"broker/a.py": code})
    assert texts(found) == ["broker/a.py:2 Many: a b c d e"]
    assert found.numbers == {"classes with 5 or more": 1, "members that may be None, in all": 6}


def test_the_program_prints_a_table_json_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    write(tree, {"storage/a.py": "", "storage/b.py": "", "runtime/c.py": ""})
    main(["--root", str(tree), "--format", "json"])
    baseline = tmp_path / "before.json"
    baseline.write_text(capsys.readouterr().out, encoding="utf-8")
    assert json.loads(baseline.read_text(encoding="utf-8"))["folders"]["numbers"] == {"storage": 2, "runtime": 1}
    (tree / "runtime/c.py").rename(tree / "storage/c.py")
    main(["--root", str(tree), "--baseline", str(baseline)])
    table = capsys.readouterr().out.splitlines()
    assert ["storage", "2", "→", "3"] in map(str.split, table)
    assert ["runtime", "1", "→", "–"] in map(str.split, table)
    main(["--root", str(tree)])
    assert ["storage", "3"] in map(str.split, capsys.readouterr().out.splitlines())
