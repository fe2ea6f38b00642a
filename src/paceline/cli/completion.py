"""The command `completion`, and what shells ask for at each TAB, with argcomplete.

argcomplete is imported only here, so that it does not slow down other commands.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from argcomplete import autocomplete
from argcomplete.completers import FilesCompleter
from argcomplete.lexers import split_line
from argcomplete.shell_integration import shellcode

from paceline.cli.options import Parser, make_parser, options_of

_COMPLETION = """Print a script for completion of commands, options, recipes and their fields, runs and jobs with TAB.

    eval "$(paceline completion bash)"        in ~/.bashrc
    eval "$(paceline completion zsh)"         in ~/.zshrc, after compinit
    paceline completion fish | source         in ~/.config/fish/config.fish"""


def completion(arguments: list[str]) -> int:
    """Print the completion script of a shell."""
    parser = make_parser("completion", "bash|zsh|fish", _COMPLETION)
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="your shell")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    print(shellcode(["paceline"], shell=parser.parse_args(arguments).shell))
    return 0


def words_to_complete(commands: argparse.ArgumentParser) -> list[str]:
    """Return the words before the cursor, with the parsers of commands set to print completions instead of parsing.

    While the command itself is typed, print its completions and exit.
    """
    words = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if len(words) < 2:
        _complete(commands)
    os.environ["_ARGCOMPLETE"] = "2"  # for argcomplete, the command is then the program
    Parser.before_parsing = _complete
    return words[1:]


def _complete(parser: argparse.ArgumentParser) -> None:
    """Print completions and exit."""
    for command in (parser, *_subparsers(parser)):
        if any((action.dest, action.metavar) == ("source", "RECIPE") for action in command._actions):
            _add_fields(command)
    autocomplete(parser, always_complete_options=False, default_completer=_Values())


def _subparsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _add_fields(parser: argparse.ArgumentParser) -> None:
    """Add the fields of recipes, which commands look for among the words themselves."""
    from paceline.config.io import fields

    for row in fields():
        if f"--{row.path}" not in options_of(parser):
            choices = row.kind.split("|") if "|" in row.kind else None
            parser.add_argument(f"--{row.path}", choices=choices, help=row.help.replace("%", "%%"))


class _Values(FilesCompleter):
    """Completes the values of arguments: what their metavar names, and files."""

    def __call__(self, prefix: str, **context: object) -> list[str]:
        metavar = str(getattr(context["action"], "metavar", ""))
        if metavar == "JOB":
            from paceline.launch.job import all_ids

            return all_ids()
        named = []
        if metavar == "RECIPE":
            from paceline.config.io import shipped

            named = list(shipped())
        elif metavar == "DATASET":
            from paceline.extensions import BUILT_IN

            named = list(BUILT_IN["reader"])
        elif metavar.startswith("RUN") or metavar == "MODEL":
            named = [str(path.parent) for path in Path("runs").glob("*/recipe.yaml")]
        return [*named, *(path for path in super().__call__(prefix) if path.rstrip("/") not in named)]
