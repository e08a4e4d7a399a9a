"""docs/configuration.md says what the code does."""

from pathlib import Path

from tidelog.config_reference import markdown

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_configuration_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: tidelog config --reference > docs/configuration.md"
