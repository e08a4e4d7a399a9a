"""Keys of the bucket from files: used, checked, and warned of when others can read them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tidelog.runtime.errors import ConfigError
from tidelog.storage.bucket.secret_files import with_secret_files
from tidelog.storage.settings import S3Settings


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_keys_come_from_their_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    s3 = S3Settings(
        access_key_id_file=write(tmp_path / "id", "the id\n"), secret_access_key_file=write(tmp_path / "key", "hush\n")
    )
    found = with_secret_files(s3)
    assert (found.access_key_id, found.secret_access_key) == ("the id", "hush")
    assert (s3.access_key_id, s3.secret_access_key) == ("", ""), "the configuration itself holds no secret"
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_change_is_warned_of(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "key", "hush", mode)
    with caplog.at_level(logging.WARNING):
        with_secret_files(S3Settings(access_key_id="id", secret_access_key_file=file))
    [record] = caplog.records
    assert "is open to other users" in record.getMessage() and getattr(record, "file", "") == file
    assert "hush" not in caplog.text


@pytest.mark.parametrize(("text", "error"), [("", "0 lines"), ("one\ntwo\n", "2 lines")])
def test_a_file_without_one_value_is_refused(text: str, error: str, tmp_path: Path) -> None:
    file = write(tmp_path / "key", text)
    with pytest.raises(ConfigError, match=error):
        with_secret_files(S3Settings(secret_access_key_file=file))


def test_a_missing_file_and_a_value_given_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*s3\.secret_access_key_file"):
        with_secret_files(S3Settings(secret_access_key_file=str(tmp_path / "missing")))
    file = write(tmp_path / "key", "hush")
    with pytest.raises(ConfigError, match=r"both s3\.secret_access_key and s3\.secret_access_key_file"):
        with_secret_files(S3Settings(secret_access_key="hush", secret_access_key_file=file))
