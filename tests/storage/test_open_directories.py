"""Directories are kept open within a bound, and none is closed under its user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidelog.storage.bucket.directories import OpenDirectories


def open_under(root: Path) -> set[str]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            path = Path(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that listed them
            continue
        if path.is_relative_to(root):
            found.add(str(path.relative_to(root)))
    return found


def test_the_directories_used_last_are_open_and_no_others(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    directories = OpenDirectories(tmp_path, 2)
    first = directories.get(tmp_path / "a")
    directories.get(tmp_path / "b")
    assert directories.get(tmp_path / "a") is first
    directories.get(tmp_path / "c")
    assert open_under(tmp_path) == {"a", "c"}
    directories.forget(tmp_path / "c")
    directories.forget(tmp_path / "never seen")
    assert open_under(tmp_path) == {"a"}
    directories.close()
    assert open_under(tmp_path) == {"a"}  # in use
    (tmp_path / "file").write_bytes(b"x")
    first.take(tmp_path / "file", "taken")
    assert (tmp_path / "a" / "taken").read_bytes() == b"x"
    del first
    assert open_under(tmp_path) == set()


def test_a_removed_directory_takes_no_name_though_its_path_is_there_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    directories = OpenDirectories(tmp_path, 2)
    removed = directories.get(tmp_path / "a")
    (tmp_path / "a").rmdir()
    (tmp_path / "a").mkdir()
    for name_it in (removed.link, removed.take):
        with pytest.raises(FileNotFoundError):
            name_it(tmp_path / "file", "name")
    directories.forget(tmp_path / "a")
    directories.get(tmp_path / "a").link(tmp_path / "file", "name")
    assert (tmp_path / "a" / "name").exists()


def test_what_is_no_directory_is_not_opened(tmp_path: Path) -> None:
    directories = OpenDirectories(tmp_path, 2)
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError):
        directories.get(tmp_path / "absent")
    with pytest.raises(NotADirectoryError):
        directories.get(tmp_path / "file")
    assert open_under(tmp_path) == set()
