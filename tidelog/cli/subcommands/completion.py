"""`tidelog completion`: the script that makes a shell complete commands, options, and names of topics and groups."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tidelog.cli import output

COMPLETE_VARIABLE = "_TIDELOG_COMPLETE"
"""The variable by which the shell's script asks `tidelog` for completions; click derives it from the program's name."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    \b
    bash   eval "$(tidelog completion bash)"          in ~/.bashrc
    zsh    eval "$(tidelog completion zsh)"           in ~/.zshrc
    fish   tidelog completion fish | source           in config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    root = click.get_current_context().find_root()
    output.emit(kind(root.command, {}, "tidelog", COMPLETE_VARIABLE).source())
