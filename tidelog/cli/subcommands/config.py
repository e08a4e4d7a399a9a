"""`tidelog config`: every setting, its value, and its source."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tidelog.cli.options import config_options, format_option, load_config


@click.command()
@config_options
@format_option
@click.option("--changed", is_flag=True, help="Only values that differ from the default.")
@click.option("--reference", is_flag=True, help="Print the reference of all settings as Markdown.")
def config(config_file: Path | None, assignments: tuple[str, ...], style: str, changed: bool, reference: bool) -> None:
    """Show every setting, its value and where it came from."""
    if reference:
        from tidelog.config_reference import markdown

        click.echo(markdown(), nl=False)
        return
    settings = [
        one for one in load_config(config_file, assignments).settings() if not changed or one.source != "default"
    ]
    if style == "json":
        click.echo(json.dumps([one._asdict() for one in settings], indent=2))
        return
    if not settings:
        click.echo("every setting has its default", err=True)
    width = max((len(one.key) for one in settings), default=0)
    shown = [json.dumps(one.value, ensure_ascii=False) for one in settings]
    value_width = max((len(text) for text in shown), default=0)
    for one, text in zip(settings, shown, strict=True):
        click.echo(f"{one.key:<{width}}  {text:<{value_width}}  {one.source}")
