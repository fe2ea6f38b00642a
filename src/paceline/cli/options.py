"""What the verbs' parsers have in common."""

import argparse
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.errors import UserError
from paceline.system.files import printable_lines

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable_lines(message))  # it repeats arguments, and `*` gives names of strangers


def make_parser(verb: str, usage: str, description: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return _Parser(
        prog=f"paceline {verb}",
        usage=f"paceline {verb} {usage}",
        description=description,
        formatter_class=formatter,
        allow_abbrev=False,
        add_help=False,
    )


def count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a whole number from 1 on")
    return int(text)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number above 0")
    return value


def results_place(text: str) -> str:
    """Of --results; whether it can be written to is found out when the run begins."""
    from paceline.system.remote import refuse_password

    refuse_password("--results", text)
    if not text or re.match(r"(s3|gs|az|https?)://[^/]+", text):
        return text
    raise UserError(f"--results {text}: write s3://BUCKET/PREFIX")


def check_words(options: argparse.Namespace) -> None:
    """Of a launch, before anything is done: values become parts of scripts, some of which no quotes can hold."""
    from paceline.launch.values import operand, plain, variable

    named = {"pass_env": "pass", "engine": "for"}
    for name, value in vars(options).items():
        if isinstance(value, str | Path):
            plain(f"--{named.get(name, name).replace('_', '-')}", str(value))
    for name in filter(None, options.pass_env.split(",")):
        variable("--pass", name)
    for name in ("python", "container", "image"):
        operand(f"--{name}", getattr(options, name))


def plain_name(name: str) -> str:
    """Of a run, which becomes a folder's."""
    if Path(name).name != name or not name.isprintable() or name in ("", ".", ".."):
        raise UserError(f"--name {name!r} is not a plain folder name")
    return name


def split_source(arguments: list[str]) -> tuple[str, list[str]]:
    """The positional comes first, so that `--dotted.field VALUE` can never be mistaken for it."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    return "", arguments


def with_recipe(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, "Recipe"]:
    """A verb's own options, and the recipe that the rest of the command line names and overrides."""
    from paceline.config.io import load_recipe

    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    if not source:
        raise UserError("which recipe? `paceline recipes` lists them")
    return options, load_recipe(source, overrides)


def add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale-batch",
        choices=["linear", "sqrt"],
        help="multiply the global batch by the number of ranks, and the learning rate by it or by its square root",
    )
