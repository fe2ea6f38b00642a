"""What the verbs' parsers have in common."""

import argparse


def make_parser(verb: str, usage: str, description: str) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(
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


def add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scale-batch",
        choices=["linear", "sqrt"],
        help="multiply the global batch by the number of ranks, and the learning rate by it or by its square root",
    )
