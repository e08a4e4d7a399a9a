"""The configuration: sources, their order, and errors that help."""

import os
from pathlib import Path

import pytest

from tidelog.config import exposed_secrets, load, parse_set, to_toml
from tidelog.runtime.errors import ConfigError


def test_defaults_load_and_say_so() -> None:
    loaded = load()
    assert loaded.config.kafka.port == 9092
    assert {setting.source for setting in loaded.settings()} == {"default"}


def test_flags_beat_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[kafka]\nport = 1\nnum_partitions = 7\n[wal]\nflush = 'async'\n")
    environment = {"TIDELOG_KAFKA__PORT": "2", "TIDELOG_KAFKA__RACK": "r1", "OTHER": "x"}
    loaded = load(file, environment, [("kafka.port", 3)])
    by_key = {setting.key: setting for setting in loaded.settings()}
    assert (by_key["kafka.port"].value, by_key["kafka.port"].source) == (3, "flag")
    assert (by_key["kafka.rack"].value, by_key["kafka.rack"].source) == ("r1", "environment TIDELOG_KAFKA__RACK")
    assert (by_key["kafka.num_partitions"].value, by_key["kafka.num_partitions"].source) == (7, f"file {file}")
    assert by_key["wal.flush"].value == "async"


def test_an_unknown_key_names_its_source_and_the_nearest_key(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("[wal]\nflsh = 'async'\n")
    with pytest.raises(ConfigError, match=r"wal\.flsh.*t\.toml.*did you mean 'wal\.flush'"):
        load(file)


def test_an_unknown_section_suggests_where_the_key_lives() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'wal\.flush'"):
        load(flags=[("disk.flush", "sync")])


@pytest.mark.parametrize("value", ["70000", "-1", "many", "\udcff"])
def test_a_value_out_of_range_or_of_a_wrong_type_is_refused_with_key_and_source(value: str) -> None:
    with pytest.raises(ConfigError, match=r"kafka\.port.*TIDELOG_KAFKA__PORT"):
        load(environment={"TIDELOG_KAFKA__PORT": value})


def test_a_value_that_is_no_text_is_refused_with_key_and_source() -> None:
    """The system gives names with other bytes as text that cannot be written, to a file or into an answer."""
    with pytest.raises(ConfigError, match=r"node\.data_dir.*TIDELOG_NODE__DATA_DIR.*not UTF-8"):
        load(environment={"TIDELOG_NODE__DATA_DIR": os.fsdecode(b"data-\xff")})


def test_lists_come_from_commas() -> None:
    loaded = load(environment={"TIDELOG_NODE__ROLES": "broker, controller"})
    assert loaded.config.node.roles == ["broker", "controller"]


def test_a_key_outside_a_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text("data_dir = 'x'\n")
    with pytest.raises(ConfigError, match=r"did you mean 'node\.data_dir'"):
        load(file)


def test_a_missing_or_broken_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "b.toml"
    for text in ("[", "[wal]\nkind = " + "[" * 100_000):
        broken.write_text(text)
        with pytest.raises(ConfigError, match="cannot read"):
            load(broken)


def test_a_file_without_end_is_not_read_to_it() -> None:
    with pytest.raises(ConfigError, match="configuration file /dev/zero is longer than 1048576 bytes"):
        load(Path("/dev/zero"))


def test_secrets_are_not_shown() -> None:
    loaded = load(flags=[("s3.secret_access_key", "hush")])
    shown = {setting.key: setting.value for setting in loaded.settings()}
    assert shown["s3.secret_access_key"] == "********"


@pytest.mark.parametrize("value", ["8675309001", "[8675309001]", "{ of = '8675309001' }", "2026-11-29"])
def test_a_secret_of_a_wrong_type_is_refused_without_being_shown(tmp_path: Path, value: str) -> None:
    """What a process refuses goes to its log, and to the archive that `tidelog debug bundle` writes."""
    file = tmp_path / "t.toml"
    file.write_text(f"[s3]\nsecret_access_key = {value}\n")
    with pytest.raises(ConfigError, match=r"s3\.secret_access_key.*t\.toml.*Expected `str`") as caught:
        load(file)
    assert "8675309" not in str(caught.value) and "2026" not in str(caught.value)


def test_set_flags_are_parsed_or_explained() -> None:
    assert parse_set("wal.flush=async") == ("wal.flush", "async")
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_set("wal.flush")


def test_a_configuration_written_as_toml_reads_back_the_same(tmp_path: Path) -> None:
    config = load(flags=[("s3.prefix", 'a "quoted" ü\n\x7f'), ("wal.flush", "async"), ("node.roles", "broker")]).config
    file = tmp_path / "t.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load(file).config == config


def test_a_secret_that_others_can_read_is_told_with_the_way_to_keep_it(tmp_path: Path) -> None:
    file = tmp_path / "tidelog.toml"
    file.write_text('[s3]\nsecret_access_key = "hush"\n')
    file.chmod(0o644)
    [told] = exposed_secrets(load(file))
    assert str(file) in told and "s3.secret_access_key_file" in told and "hush" not in told
    file.chmod(0o600)
    assert exposed_secrets(load(file)) == []
    [told] = exposed_secrets(load(None, {}, [("s3.secret_access_key", "hush")]))
    assert "command line" in told and "hush" not in told
    assert exposed_secrets(load(None, {"TIDELOG_S3__SECRET_ACCESS_KEY": "hush"})) == []
