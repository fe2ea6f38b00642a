"""The parsers of all commands, without running one."""

import argparse
from collections.abc import Iterator
from importlib import import_module

from paceline.cli.main import _COMMANDS
from paceline.cli.options import Parser


class _Captured(Exception):
    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def _capture(parser: argparse.ArgumentParser) -> None:
    raise _Captured(parser)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, as it is just before it parses."""
    module = import_module(f"paceline.cli.{_COMMANDS[command][1]}")
    Parser.before_parsing = _capture
    try:
        getattr(module, command.replace("-", "_"))(["--help"])
    except _Captured as captured:
        return captured.parser
    finally:
        Parser.before_parsing = None
    raise AssertionError(f"{command} does not parse its arguments with a Parser")


def public_commands() -> dict[str, str]:
    """Return the summaries of the commands for users."""
    return {name: summary for name, (summary, _) in _COMMANDS.items() if summary}


def subparsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the names and parsers of subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
