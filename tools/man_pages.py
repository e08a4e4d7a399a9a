"""Man pages of the command line, one for each command, made from its help.

    python -m tools.man_pages [DIRECTORY]

writes them into `man/`, or a directory, and removes those of commands that are gone. They are in the repository, as a
wheel is built where no command can run; a test compares them with what this module writes.

Entry: `pages`, `main`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from tidelog import __version__
from tidelog.cli.main import EXIT_CODES, cli

ROOT = Path(__file__).resolve().parents[1]
DIRECTORY = ROOT / "man"
SECTION = 1
NO_WRAP = "\b"
"""click's mark of a paragraph whose lines are kept."""


def _plain(text: str) -> str:
    """Escape a text for roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...").replace("→", "\\(->")
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in text.split("\n"))


def _text(text: str) -> str:
    """The same, with what is in backticks in bold."""
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", _plain(text))


def _paragraphs(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        if paragraph.startswith(NO_WRAP):
            yield f".nf\n{_plain(paragraph.removeprefix(NO_WRAP).strip(chr(10)))}\n.fi"
        else:
            yield _text(" ".join(paragraph.split()))


def _title(path: tuple[str, ...]) -> str:
    return "-".join(("tidelog", *path))


def _reference(path: tuple[str, ...]) -> str:
    return f".BR {_plain(_title(path))} ({SECTION})"


def _term(names: str, help_text: str) -> list[str]:
    return [".TP", f"\\fB{_plain(names)}\\fR", _text(" ".join(help_text.split())) or "\\&"]


def _options(command: click.Command, context: click.Context) -> list[str]:
    lines = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and (record[1] or isinstance(parameter, click.Option)):  # the synopsis has the arguments
            lines += _term(*record)
    return [".SH OPTIONS", *lines] if lines else []


def _environment(command: click.Command, context: click.Context) -> list[str]:
    lines = []
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option) and isinstance(parameter.envvar, str):
            lines += _term(parameter.envvar, f"The value of `{parameter.opts[0]}`, where that is not given.")
    return [".SH ENVIRONMENT", *lines] if lines else []


def _first_sentence(command: click.Command) -> str:
    return command.get_short_help_str(limit=200).rstrip(".")


def page(command: click.Command, context: click.Context, path: tuple[str, ...]) -> str:
    """Return the page of a command."""
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{_title(path).upper()}" "{SECTION}" "" "Tidelog {__version__}" "Tidelog manual"',
        ".SH NAME",
        f"{_plain(_title(path))} \\- {_text(_first_sentence(command))}",
        ".SH SYNOPSIS",
        f"\\fB{' '.join(('tidelog', *map(_plain, path)))}\\fR {_plain(usage)}",
        ".SH DESCRIPTION",
        *_paragraphs(command.help or _first_sentence(command)),
    ]
    children = []
    if isinstance(command, click.Group):
        children = [(name, command.get_command(context, name)) for name in command.list_commands(context)]
        lines.append(".SH COMMANDS")
        for name, child in children:
            assert child is not None
            lines += [".TP", _reference((*path, name)), _text(_first_sentence(child)) + "."]
    lines += [*_options(command, context), *_environment(command, context), ".SH EXIT STATUS"]
    if path:
        lines.append(f"0 when it is done; the others are in\n{_reference(())}.")
    else:
        for code, meaning in EXIT_CODES.items():
            lines += _term(str(code), meaning)
    return "\n".join([*lines, *_see_also(path), ""])


def _see_also(path: tuple[str, ...]) -> list[str]:
    if not path:
        return []
    above = [path[:length] for length in range(len(path))]
    return [".SH SEE ALSO", *(f"{_reference(each)}{',' if each != above[-1] else ''}" for each in above)]


def _commands(
    command: click.Command, context: click.Context, path: tuple[str, ...]
) -> Iterator[tuple[click.Command, click.Context, tuple[str, ...]]]:
    yield command, context, path
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            if not child.hidden:
                yield from _commands(child, click.Context(child, info_name=name, parent=context), (*path, name))


def pages() -> dict[str, str]:
    """Return the pages of all commands, by the name of their file."""
    found = _commands(cli, click.Context(cli, info_name="tidelog", **cli.context_settings), ())
    return {f"{_title(path)}.{SECTION}": page(command, context, path) for command, context, path in found}


def main(arguments: Iterable[str]) -> None:
    """Write them. Raises `SystemExit` for anything but one directory."""
    parser = argparse.ArgumentParser(prog="python -m tools.man_pages", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY, help="where to write them [man/]")
    directory = parser.parse_args(list(arguments)).directory
    directory.mkdir(parents=True, exist_ok=True)
    wanted = pages()
    for file in directory.glob(f"tidelog*.{SECTION}"):
        if file.name not in wanted:
            file.unlink()
    for name, text in wanted.items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
