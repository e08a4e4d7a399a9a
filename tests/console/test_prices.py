"""Price tables: the default, one's own, and what is said about a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.console.prices import DEFAULT, SECTIONS, Prices, load_prices, to_toml
from tidelog.runtime.errors import ConfigError, NotFound

GOOD = to_toml(DEFAULT)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_without_a_file_prices_are_assumed_and_say_so() -> None:
    assert load_prices(None) is DEFAULT
    assert DEFAULT.name.startswith("assumed: ")


def test_what_is_printed_can_be_read_as_toml_and_as_json(tmp_path: Path) -> None:
    assert load_prices(written(tmp_path / "prices.toml", GOOD)) == DEFAULT
    assert load_prices(written(tmp_path / "prices.json", json.dumps(msgspec.to_builtins(DEFAULT)))) == DEFAULT


price = st.floats(0, 1e6, allow_nan=False) | st.integers(0, 1000)


@given(st.builds(Prices, st.text(min_size=1).filter(str.strip), st.just("EUR"), *(
    st.fixed_dictionaries(dict.fromkeys(keys, price)) for keys in SECTIONS.values()
)))  # fmt: skip
def test_every_table_survives_its_own_text(tmp_path_factory: pytest.TempPathFactory, prices: Prices) -> None:
    path = written(tmp_path_factory.getbasetemp() / "prices.toml", to_toml(prices))
    assert load_prices(path) == prices


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (GOOD.replace("put = 0.005", 'put = "much"'), "requests_per_1000.put", "--print-prices"),
        (GOOD.replace("put = 0.005", "put = -1"), "requests_per_1000.put", "--print-prices"),
        (GOOD.replace("put = 0.005", "put = nan"), "requests_per_1000.put", "--print-prices"),
        (GOOD.replace("put = 0.005", "put = inf"), "requests_per_1000.put", "--print-prices"),
        (GOOD.replace("put = 0.005", "put = true"), "requests_per_1000.put", "--print-prices"),
        (GOOD.replace("put = 0.005", "putt = 0.005"), "unknown key requests_per_1000.putt", "requests_per_1000.put"),
        (GOOD.replace("stored = 0.023", ""), "lacks storage_per_gb_month.stored", "--print-prices"),
        (GOOD.replace('currency = "USD"', "currency = 5"), "currency", "--print-prices"),
        (GOOD.replace('currency = "USD"', ""), "lacks currency", "--print-prices"),
        ("requests_per_1000 = 5\n" + GOOD.replace("[requests_per_1000]", "[more]"), "unknown key more", "known are"),
        ("currency = ", "is not valid TOML", "--print-prices"),
        pytest.param("currency = " + "[" * 100_000, "is not valid TOML", "--print-prices", id="nested too deeply"),
        ("", "lacks name", "--print-prices"),
    ],
)
def test_a_bad_table_is_named_with_its_key_and_the_next_step(
    tmp_path: Path, text: str, message: str, hint: str
) -> None:
    path = written(tmp_path / "prices.toml", text)
    with pytest.raises(ConfigError) as failure:
        load_prices(path)
    assert message in failure.value.message
    assert str(path) in failure.value.message
    assert hint in (failure.value.hint or "")


def test_json_that_is_none_or_no_table_is_refused(tmp_path: Path) -> None:
    for text in ("{", "[1]", "5", '{"name": "x"}', "[" * 100_000):
        with pytest.raises(ConfigError):
            load_prices(written(tmp_path / "prices.json", text))


def test_a_file_that_is_not_there_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        load_prices(tmp_path / "none.toml")
    with pytest.raises(ConfigError):
        load_prices(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError):
        load_prices(tmp_path / "binary.toml")
