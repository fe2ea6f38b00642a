"""Option parsing that several commands share."""

import argparse
import difflib
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from paceline.errors import UserError
from paceline.system.files import is_file_name, printable_lines

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe


class Parser(argparse.ArgumentParser):
    """The parser of a command."""

    before_parsing: ClassVar[Callable[[argparse.ArgumentParser], None] | None] = None
    """Print completions for a shell and exit, in place of parsing; None: parse."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        hook, Parser.before_parsing = Parser.before_parsing, None  # only once: finding completions parses as well
        if hook:
            hook(self)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        return self._without_rest(options, rest)

    def parse_mixed_args(self, args: Any) -> Any:
        """Parse positional arguments that may be between options."""
        if Parser.before_parsing:
            return self.parse_args(args)
        return self._without_rest(*self.parse_known_intermixed_args(args))

    def _without_rest(self, options: Any, rest: list[str]) -> Any:
        if rest:
            close = closest(rest[0], options_of(self))
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f". Did you mean {close}?" if close else ""))
        return options

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices or ()
        if value not in choices and (close := closest(str(value), map(str, choices))):
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}. Did you mean {close}?")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        # the message quotes arguments, and a shell glob may expand to untrusted file names
        end = "" if message.endswith("?") else "."
        super().error(f"{printable_lines(message)}{end} See `{self.prog} --help`. [usage]")


def make_parser(command: str, usage: str, description: str) -> argparse.ArgumentParser:
    """A parser for one command, without --help."""
    return Parser(**parser_settings(command, usage, description))


def parser_settings(command: str, usage: str, description: str) -> dict[str, Any]:
    """Return the arguments of a command's parser, or of one of its subparsers."""
    return {
        "prog": f"paceline {command}",
        "usage": f"paceline {command} {usage}",
        "description": description,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
        "add_help": False,
    }


def complete_source(parser: argparse.ArgumentParser, metavar: str) -> None:
    """Let shells complete the recipe or run of a command that looks for it among the words itself."""
    if Parser.before_parsing:
        parser.add_argument("source", nargs="?", metavar=metavar)


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Return the names of the options that a parser knows."""
    return set(parser._option_string_actions)


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is meant by a misspelled or incomplete one; empty if there is none."""
    names = sorted(known)
    starts = [name for name in names if name.startswith(word)]
    return next(iter(starts or difflib.get_close_matches(word, names, n=1)), "")


def refuse_misspelled(parser: argparse.ArgumentParser, overrides: list[str]) -> None:
    """Raise UserError for an override that is closer to an option of the command than to a field of recipes."""
    from paceline.config.io import fields, split_overrides
    from paceline.config.synonyms import replacement_hint

    options, groups = options_of(parser), {f"--{row.path.partition('.')[0]}" for row in fields()} | {"--import"}
    for key, _ in split_overrides(overrides):
        name, field = f"--{key}", key.replace("-", "_")
        if "." in key or f"--{field}" in groups or replacement_hint(field, None, on_command_line=True):
            continue
        if (close := closest(name, options | groups)) in options:
            message = f"`{parser.prog}` has no option {name}. Did you mean {close}?"
            raise UserError("unknown-option", message, option=name)


def option_name(dest: str) -> str:
    """Return the option of a parsed value; names that are keywords of Python end with an underscore there."""
    return "--" + dest.rstrip("_").replace("_", "-")


def count(text: str) -> int:
    """Option type: a positive integer."""
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a positive integer")
    return int(text)


def count_or_auto(text: str) -> int | str:
    """Option type: a positive integer or "auto"."""
    if text == "auto":
        return text
    try:
        return count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error} or auto") from None


def positive(text: str) -> float:
    """Option type: a positive number."""
    if not 0 < (value := number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a positive number")
    return value


def fraction(text: str) -> float:
    """Option type: a number from 0 to 1."""
    if not 0 <= (value := number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number from 0 to 1")
    return value


def number(text: str) -> float:
    """Return the number in a text, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def check_results_url(text: str) -> None:
    """Check the form of --results; the run checks that it is writable."""
    from paceline.system.remote import refuse_password

    refuse_password("--results", text)
    if text and not re.match(r"(s3|gs|az|https?)://[^/]+", text):
        message = f"--results {text!r} is not an object store URL. Write s3://BUCKET/PREFIX."
        raise UserError("results-url-invalid", message, url=text)


def plain_name(name: str) -> str:
    """The name of a run, which must be valid as a folder name."""
    if not is_file_name(name):
        raise UserError(
            "invalid-name", f"--name {name!r} is not a valid folder name. Use a single name without slashes.", name=name
        )
    return name


def split_source(arguments: list[str]) -> tuple[str, list[str]]:
    """The positional argument and the rest; it comes first, so that a value of `--dotted.field` is not taken for it.

    Only --help may precede it.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = [*arguments[1:], arguments[0]]
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return "", arguments


def with_recipe(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, "Recipe"]:
    """The options of a command, and the recipe that the rest of the command line names and overrides."""
    from paceline.config.imports import allow_given
    from paceline.config.io import load_recipe

    complete_source(parser, "RECIPE")
    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    refuse_misspelled(parser, overrides)
    if not source:
        raise UserError("missing-recipe", "no recipe is given. `paceline recipes` lists the shipped ones.")
    allow_given(overrides)
    return options, load_recipe(source, overrides)


def help_with_fields(
    parser: argparse.ArgumentParser, source: str, overrides: list[str], only: Sequence[str] = ()
) -> int:
    """Print the help of a command, and the fields of a recipe that it takes; `only`: limit to these groups."""
    from paceline.cli.help import print_fields
    from paceline.config.io import load_recipe

    parser.print_help()
    print_fields(load_recipe(source, overrides), source, only)
    return 0


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", choices=("best", "last"), default="best", help="which checkpoint of a run (default: best)"
    )


def add_scaling(parser: argparse.ArgumentParser) -> None:
    """Add --scale-batch."""
    parser.add_argument(
        "--scale-batch",
        choices=["linear", "sqrt"],
        help="multiply the global batch by the number of ranks, and the learning rate by that or its square root",
    )


def warn_of_readers(what: str) -> None:
    """Warn if standard output is a file that other users can read."""
    with suppress(OSError, ValueError):  # it has no file descriptor
        mode = os.fstat(sys.stdout.fileno()).st_mode
        if stat.S_ISREG(mode) and mode & 0o077:
            print(
                f"paceline: warning: the file contains {what} and other users can read it. Run chmod 600 on it.",
                file=sys.stderr,
            )
