"""The data directory's identity and lock."""

from pathlib import Path

import pytest

from tidelog.process.data_dir import DataDirectory, WrongDataDirectory
from tidelog.runtime.errors import CorruptData


def test_identity_survives_and_is_checked(tmp_path: Path) -> None:
    first = DataDirectory.open(tmp_path / "d", 1, "code-a")
    first.belongs_to("cluster-1")
    first.close()
    again = DataDirectory.open(tmp_path / "d", 1, "code-b")
    assert (again.check_code, again.cluster_id) == ("code-a", "cluster-1")
    again.belongs_to("cluster-1")
    with pytest.raises(WrongDataDirectory, match="belongs to cluster cluster-1"):
        again.belongs_to("cluster-2")
    again.close()


def test_another_brokers_directory_is_refused(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path, 1, "c").close()
    with pytest.raises(WrongDataDirectory, match="belongs to broker 1"):
        DataDirectory.open(tmp_path, 2, "c")


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    first = DataDirectory.open(tmp_path, 1, "c")
    with pytest.raises(WrongDataDirectory, match="in use by process"):
        DataDirectory.open(tmp_path, 1, "c")
    first.close()
    DataDirectory.open(tmp_path, 1, "c").close()


def test_a_flipped_bit_in_the_identity_is_found(tmp_path: Path) -> None:
    DataDirectory.open(tmp_path, 1, "check-code").close()
    file = tmp_path / "identity.json"
    raw = bytearray(file.read_bytes())
    for position in range(len(raw)):
        damaged = bytearray(raw)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CorruptData, match=r"identity\.json at byte 0: the identity file is damaged"):
            DataDirectory.open(tmp_path, 1, "other")


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(WrongDataDirectory, match="cannot use data directory"):
        DataDirectory.open(tmp_path / "file" / "d", 1, "c")
