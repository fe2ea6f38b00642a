"""The command train."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import (
    add_scaling,
    check_results_url,
    complete_source,
    help_with_fields,
    make_parser,
    plain_name,
    refuse_misspelled,
    split_source,
)
from paceline.cli.ranks import (
    add_process_options,
    choose_procs,
    enter_rank,
    needs_agent,
    start_with_options,
    world_size,
)
from paceline.cli.seeds import add_seed_options, refuse_parallel, seeds_of, train_seeds
from paceline.distributed.env import under_launcher
from paceline.errors import ConfigError, UserError
from paceline.system.files import say
from paceline.system.host import bind_openmp
from paceline.system.remote import is_remote, last_name
from paceline.system.signals import interrupts_end

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe

_TRAIN = """Train a recipe.

RECIPE is a shipped recipe (see `paceline recipes`) or a YAML file. Any field can be overridden:
`--optim.lr 0.5 --train.duration 20ep`. An interrupted run with the same name and recipe is resumed.
`--seeds 5` trains five runs with different seeds, which `paceline compare` groups.
`--import my_package.module` loads your own models, datasets, losses, ... (see docs/guides/extend.md)."""


def train(arguments: list[str]) -> int:
    """Run `paceline train`; returns the exit status."""
    from paceline.config.batch import layouts, procs_per_node
    from paceline.config.duration import check_steps
    from paceline.config.imports import allow_given
    from paceline.config.io import load_recipe, split_overrides
    from paceline.config.scaling import scaled

    parser = _train_parser()
    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    refuse_misspelled(parser, overrides)
    if options.resume:
        options.resume = _local_run(options.resume, options.runs)
        _check_resume(options, source)
        source = str(options.resume / "recipe.yaml")
    if options.help:
        return help_with_fields(parser, source or "digits", overrides)
    if not source:
        raise UserError(
            "missing-recipe",
            "no recipe is given. `paceline recipes` lists the shipped ones; `paceline train digits` needs no dataset.",
        )
    allow_given(overrides)
    recipe = _recipe_of(options.resume, overrides) if options.resume else load_recipe(source, overrides)
    overridden = [key.replace("-", "_") for key, _ in split_overrides(overrides)]
    seeds = seeds_of(options, overridden)
    choose_procs(options, lambda: max(1, procs_per_node(recipe) // (options.parallel or 1)))
    if options.scale_batch:
        recipe = scaled(recipe, world_size(options), options.scale_batch)
    name = plain_name(options.name or recipe.name)
    check_results_url(options.results)
    if options.profile:
        check_steps("--profile", options.profile)
    if not under_launcher(os.environ):
        layouts(recipe, world_size(options))
        if len(seeds) > 1 and options.nodes == (0, 1):
            return train_seeds(recipe, seeds, options, name)
        refuse_parallel(options, seeds)
        if needs_agent(options):
            if options.nodes[1] > 1 and is_remote(recipe.data.path or ""):
                from paceline.data import kinds
                from paceline.data.load.source import fetch

                fetch(kinds.resolve(recipe))  # before the rendezvous, because download times differ between nodes
            return start_with_options(["train", *arguments], options)
    enter_rank(options)
    _train_here(recipe, options, name, seeds, overridden)
    return 0


def _train_here(
    recipe: "Recipe", options: argparse.Namespace, name: str, seeds: tuple[int, ...], overridden: list[str]
) -> None:
    """Train in this process, a rank."""
    from paceline.config.imports import load_imports

    augment = recipe.data.augment
    with interrupts_end():
        # otherwise the threads of torch that augment, and the processes that compile, would be bound to one core
        if (
            not under_launcher(os.environ)
            and augment.policy == "none"
            and not augment.color_jitter
            and not augment.custom
            and not recipe.compile
        ):
            bind_openmp()
        from paceline.engine import seeds as one_by_one
        from paceline.engine.session import train_recipe

    load_imports(recipe)
    if seeds:
        refuse_parallel(options, seeds)
        one_by_one.train_seeds(recipe, seeds, options.runs, name, options.results, options.profile)
    else:
        train_recipe(recipe, options.runs, name, options.resume, options.results, overridden, options.profile)


def _train_parser() -> argparse.ArgumentParser:
    parser = make_parser("train", "RECIPE [--procs N] [--name NAME] [--dotted.field VALUE ...]", _TRAIN)
    parser.add_argument("--name", help="name of the run (default: name of the recipe)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="parent folder of run folders (default: runs)"
    )
    parser.add_argument(
        "--resume", metavar="RUN", help="resume this run folder, or results in s3://..., instead of a RECIPE"
    )
    parser.add_argument(
        "--results", default="", metavar="s3://BUCKET/PREFIX", help="copy the run folder there during training"
    )
    parser.add_argument(
        "--profile", default="", metavar="10ba", help="profile this many steps (torch.profiler) into RUN/profile"
    )
    add_scaling(parser)
    add_seed_options(parser)
    add_process_options(parser)
    complete_source(parser, "RECIPE")
    return parser


def _check_resume(options: argparse.Namespace, source: str) -> None:
    run = options.resume
    if not run.is_dir():
        raise UserError(
            "run-not-found", f"--resume {run}: the run folder does not exist. `paceline runs` lists runs.", path=run
        )
    if source:
        message = f"--resume uses the recipe of the run. Leave {source!r} out."
        raise UserError("conflicting-options", message, option=source)
    if options.name:
        message = f"--resume continues in {run}. Leave --name {options.name} out."
        raise UserError("conflicting-options", message, option="--name")
    if options.scale_batch:
        message = "--resume keeps the batch size of the run. Leave --scale-batch out."
        raise UserError("conflicting-options", message, option="--scale-batch")


def _recipe_of(run: Path, overrides: list[str]) -> "Recipe":
    """The recipe of a run to resume: its recipe.yaml, or the copy in its newest checkpoint if that file is lost."""
    from paceline.config.io import load_recipe, recipe_from_tree, to_tree
    from paceline.track.records import RunFolder

    folder = RunFolder(run)
    if not folder.recipe_is_missing:
        try:
            load_recipe(str(folder.recipe))
        except ConfigError as error:
            hint = f"Delete {folder.recipe} to continue with the copy in the newest checkpoint, if there is one."
            raise UserError("run-recipe-invalid", f"{error}\n{hint}", path=folder.recipe) from None
        return load_recipe(str(folder.recipe), overrides)
    from paceline.engine.resume import saved_recipe

    if not (saved := saved_recipe(folder)):
        raise UserError(
            "run-recipe-missing",
            f"--resume {run}: the folder has no recipe.yaml, and no checkpoint with a copy of it. Give a run folder.",
            path=run,
        )
    say(f"paceline: {folder.recipe} is missing or empty; using the copy in {saved[1]}", error=True)
    return recipe_from_tree(to_tree(saved[0]), str(saved[1]), overrides)


def _local_run(place: str, runs: Path) -> Path:
    """The run folder on this machine; results in an object store are downloaded, unless a launcher did so before."""
    if not is_remote(place):
        return Path(place)
    if under_launcher(os.environ):
        return runs / last_name(place)
    from paceline.checkpoint.results import download

    return download(place, runs)
