"""The internal commands that find-batch and find-lr start: one trial, on this node or as one of several."""

import argparse
import json
import os
import sys
from collections.abc import Callable

from paceline.cli.options import count, make_parser, positive
from paceline.cli.ranks import add_group_options, start_group_ranks
from paceline.config.imports import load_imports, trust
from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.distributed.env import under_launcher
from paceline.errors import UserError
from paceline.system.signals import interrupts_end


def try_batch(arguments: list[str]) -> int:
    """Train a few steps with one batch size; returns the exit status."""
    parser = _parser("try-batch", "--batch N --steps N", "One trial of find-batch.")
    parser.add_argument("--batch", type=count, required=True)
    parser.add_argument("--limits", type=_numbers, default=[])
    options = parser.parse_args(arguments)

    def trial(recipe: Recipe) -> None:
        from paceline.engine.trial import try_batch as run

        run(recipe, options.batch, options.steps, options.limits)

    return _run("try-batch", arguments, options, trial)


def try_lr(arguments: list[str]) -> int:
    """Train while the learning rate grows; returns the exit status."""
    parser = _parser("try-lr", "--min-lr X --max-lr X --steps N", "The training of find-lr.")
    parser.add_argument("--min-lr", type=positive, required=True)
    parser.add_argument("--max-lr", type=positive, required=True)
    parser.add_argument("--linear", action="store_true")
    options = parser.parse_args(arguments)

    def trial(recipe: Recipe) -> None:
        from paceline.engine.lr_test import try_lr as run
        from paceline.optim.lr_range import LrRange

        run(recipe, LrRange(options.min_lr, options.max_lr, options.steps, options.linear))

    return _run("try-lr", arguments, options, trial)


def _parser(command: str, usage: str, description: str) -> argparse.ArgumentParser:
    parser = make_parser(command, f"RECIPE.yaml {usage}", description)
    parser.add_argument("recipe")
    parser.add_argument("--steps", type=count, required=True)
    parser.add_argument("--import", action="append", default=[], dest="trusted")
    add_group_options(parser)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _run(command: str, arguments: list[str], options: argparse.Namespace, trial: Callable[[Recipe], None]) -> int:
    """Start the ranks of this node, or run as one of them. The node prints an error that the user can fix as JSON."""
    try:
        status = start_group_ranks([command, *arguments], options)
        if status is not None:
            return status
        with interrupts_end():
            recipe = load_recipe(options.recipe)
            trust(options.trusted)
            load_imports(recipe)
            trial(recipe)
    except UserError as error:
        if under_launcher(os.environ):
            raise  # the agent reports it
        print(json.dumps({"error": error.to_json()}), flush=True)
        return 1
    except (MemoryError, RuntimeError) as error:
        print(" ".join(str(error).split())[:500] or type(error).__name__, file=sys.stderr, flush=True)
        os._exit(1)  # immediately, because there may be no memory left for a regular exit
    return 0
