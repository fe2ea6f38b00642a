"""The verbs train, evaluate and recipes."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import add_scaling, count, make_parser, plain_name, results_place, split_source
from paceline.cli.ranks import start_ranks
from paceline.distributed.env import under_launcher
from paceline.errors import ConfigError, UserError
from paceline.system.files import say
from paceline.system.host import bind_openmp, limit_openmp_spinning
from paceline.system.remote import is_remote
from paceline.system.signals import interrupts_end

if TYPE_CHECKING:
    from paceline.config.recipe import Recipe

_TRAIN = """Train a recipe.

RECIPE is a shipped name (see `paceline recipes`) or a YAML file. Any of its fields can be overridden:
`--optim.lr 0.5 --train.duration 20ep`. A run of the same name and recipe that was interrupted is resumed."""

_EVALUATE = """Evaluate a run's best checkpoint, or one checkpoint, exactly, on any number of processes.

Fields of data, evaluate, precision and device can be overridden: `--evaluate.tta flip --data.path DIR`."""

_EXPORT = """Write a run's weights as one plain file, which timm.create_model(NAME, checkpoint_path=FILE) reads."""

_EVALUATION_FIELDS = ("data", "evaluate", "precision", "device", "channels_last")


def _add_launch_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument("--procs", type=count, default=None, metavar="N", help="processes on this machine (default 1)")
    group.add_argument(
        "--nodes",
        type=_nodes,
        default=(0, 1),
        metavar="N|MIN:MAX",
        help="machines, each started by hand (default 1); with MIN:MAX they may leave and join",
    )
    group.add_argument("--node-rank", type=int, default=0, metavar="K", help="number of this machine, from 0")
    group.add_argument(
        "--rendezvous",
        default="",
        metavar="HOST:PORT",
        help="where machine 0 can be reached by the others; with MIN:MAX, where `paceline rendezvous` listens",
    )
    group.add_argument("--job", default="", metavar="ID", help="with MIN:MAX: one of several jobs of this rendezvous")
    group.add_argument(
        "--join-timeout",
        type=count,
        default=300,
        metavar="SECONDS",
        help="how long to wait for the others (default 300)",
    )
    group.add_argument(
        "--threads", type=count, metavar="N", help="compute threads a process (default: cores / processes)"
    )
    parser.add_argument("-h", "--help", action="store_true", help="show this help")


def train(arguments: list[str]) -> int:
    from paceline.config.batch import layouts
    from paceline.config.io import load_recipe, split_overrides
    from paceline.config.scaling import scaled

    parser = make_parser("train", "RECIPE [--procs N] [--name NAME] [--dotted.field VALUE ...]", _TRAIN)
    parser.add_argument("--name", help="name of the run (default: the recipe's)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders live (default: runs)"
    )
    parser.add_argument(
        "--resume", metavar="RUN", help="go on with this run folder, or with results in s3://..., in place of RECIPE"
    )
    parser.add_argument(
        "--results", default="", metavar="s3://BUCKET/PREFIX", help="copy the run folder there while it goes on"
    )
    add_scaling(parser)
    _add_launch_options(parser)
    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    if options.resume:
        options.resume = _brought(options.resume, options.runs)
        if not options.resume.is_dir():
            raise UserError(f"--resume {options.resume}: no run folder; `paceline runs` lists them")
        if source:
            raise UserError(f"--resume goes on with the run's own recipe; leave {source!r} out")
        if options.name:
            raise UserError(f"--resume goes on in {options.resume}; leave --name {options.name} out")
        source = str(options.resume / "recipe.yaml")
    if options.help:
        return _help_with_fields(parser, source or "digits", overrides)
    if not source:
        raise UserError("which recipe? `paceline recipes` lists them; `paceline train digits` needs no data of its own")
    recipe = _recipe_of(options.resume, overrides) if options.resume else load_recipe(source, overrides)
    if options.scale_batch:
        if options.resume:
            raise UserError("--scale-batch: a resumed run keeps its batch; leave it out")
        recipe = scaled(recipe, _ranks(options), options.scale_batch)
    name = plain_name(options.name or recipe.name)
    results_place(options.results)
    if not under_launcher(os.environ):
        layouts(recipe, _ranks(options))
        if _needs_agent(options):
            if options.nodes[1] > 1 and is_remote(recipe.data.path or ""):
                from paceline.data import kinds
                from paceline.data.load.source import fetch

                fetch(kinds.resolve(recipe))  # before the rendezvous: download times differ between nodes
            return _start_ranks(["train", *arguments], options)
    _enter_rank(options)
    augment = recipe.data.augment
    with interrupts_end():
        # torch's operations in threads that decode, and processes that compile, would all be bound to one core
        if (
            not under_launcher(os.environ)
            and augment.policy == "none"
            and not augment.color_jitter
            and not recipe.compile
        ):
            bind_openmp()
        from paceline.engine.session import train_recipe

    asked = [key.replace("-", "_") for key, _ in split_overrides(overrides)]
    train_recipe(recipe, options.runs, name, options.resume, options.results, asked)
    return 0


def _recipe_of(run: Path, overrides: list[str]) -> "Recipe":
    """The recipe of a run to resume: its recipe.yaml, or the copy in its newest checkpoint if that is lost."""
    from paceline.config.io import load_recipe, recipe_from_tree, to_tree
    from paceline.track.records import RunFolder

    folder = RunFolder(run)
    if not folder.recipe_is_lost:
        try:
            load_recipe(str(folder.recipe))
        except ConfigError as error:
            raise UserError(f"{error}\nDelete it to continue with the copy in the newest checkpoint, if any") from None
        return load_recipe(str(folder.recipe), overrides)
    from paceline.engine.resume import saved_recipe

    if not (saved := saved_recipe(folder)):
        raise UserError(f"--resume {run}: no run folder (it has no recipe.yaml, nor a checkpoint with a copy of it)")
    say(f"paceline: {folder.recipe} is missing or empty; using the copy in {saved[1]}", error=True)
    return recipe_from_tree(to_tree(saved[0]), str(saved[1]), overrides)


def _brought(place: str, runs: Path) -> Path:
    """Results in an object store are brought here first, by whoever starts the ranks."""
    if not is_remote(place):
        return Path(place)
    if under_launcher(os.environ):
        return runs / place.rstrip("/").rpartition("/")[2]
    from paceline.checkpoint.results import bring

    return bring(place, runs)


def _ranks(options: argparse.Namespace) -> int:
    """Of the whole run, however they are started."""
    from paceline.distributed.env import place

    return place(os.environ).size if under_launcher(os.environ) else (options.procs or 1) * options.nodes[1]


def export(arguments: list[str]) -> int:
    parser = make_parser("export", "RUN|CHECKPOINT --to FILE.safetensors [--raw] [--last]", _EXPORT)
    parser.add_argument("source", type=Path, metavar="RUN|CHECKPOINT", help="a run folder or a checkpoint folder")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="the file to write: .safetensors")
    parser.add_argument("--raw", action="store_true", help="the weights as trained, where there are averaged ones")
    parser.add_argument("--last", action="store_true", help="the newest checkpoint of the run instead of its best one")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    if options.to.suffix != ".safetensors":
        raise UserError(f"--to {options.to}: weights are written as .safetensors; choose such a name")
    from paceline.checkpoint.store import export_weights
    from paceline.engine.saved import find_checkpoint

    checkpoint = find_checkpoint(options.source, "last" if options.last else "best")
    say(export_weights(checkpoint, options.to, options.raw))
    return 0


def evaluate(arguments: list[str]) -> int:
    from paceline.config.io import split_overrides

    parser = make_parser("evaluate", "RUN|CHECKPOINT [--last] [--procs N] [--dotted.field VALUE ...]", _EVALUATE)
    parser.add_argument("--last", action="store_true", help="the newest checkpoint of the run instead of its best one")
    _add_launch_options(parser)
    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    if options.help:
        return _help_with_fields(parser, "digits", overrides, _EVALUATION_FIELDS)
    if not source:
        raise UserError("evaluate what? Give a run folder or a checkpoint folder")
    for key, _ in split_overrides(overrides):
        if key.partition(".")[0].replace("-", "_") not in _EVALUATION_FIELDS:
            raise UserError(
                f"--{key} has no bearing on an evaluation; possible are fields of {', '.join(_EVALUATION_FIELDS)}"
            )
    if not under_launcher(os.environ) and _needs_agent(options):
        return _start_ranks(["evaluate", *arguments], options)
    _enter_rank(options)
    with interrupts_end():
        from paceline.engine.saved import evaluate_path

    label, metrics = evaluate_path(Path(source), "last" if options.last else "best", overrides)
    if metrics:
        counts = f"{metrics['correct']} of {metrics['samples']}"
        say(f"{label}: top-1 {metrics['top1']:.2%} ({counts}), top-5 {metrics['top5']:.2%}, loss {metrics['loss']:.4f}")
    return 0


def _needs_agent(options: argparse.Namespace) -> bool:
    min_nodes, nodes = options.nodes
    if (nodes > 1 or min_nodes) and not options.rendezvous:
        raise UserError(f"--nodes {nodes} needs --rendezvous HOST:PORT, the same on every machine")
    if not 0 <= options.node_rank < nodes:
        raise UserError(f"--node-rank {options.node_rank} is not between 0 and {nodes - 1}")
    return (options.procs or 1) > 1 or nodes > 1 or min_nodes > 0


def _nodes(text: str) -> tuple[int, int]:
    """How many machines are enough (0: all, numbered), and how many there may be."""
    min_nodes, colon, most = text.partition(":")
    if not colon:
        return 0, count(text)
    if count(min_nodes) > count(most):
        raise argparse.ArgumentTypeError(f"{text!r}: the first number is larger than the second")
    return int(min_nodes), int(most)


def _enter_rank(options: argparse.Namespace) -> None:
    from paceline.distributed.env import place

    started = place(os.environ).local_size
    if under_launcher(os.environ) and options.procs not in (None, started):
        raise UserError(
            f"--procs {options.procs}, but torchrun or srun started {started} here; leave --procs out under them"
        )
    if options.threads:
        os.environ["PACELINE_THREADS"] = str(options.threads)
    limit_openmp_spinning()


def _start_ranks(command: list[str], options: argparse.Namespace) -> int:
    from paceline.distributed.plan import JoinSpec

    min_nodes, nodes = options.nodes
    place = (options.rendezvous, options.node_rank, min_nodes, options.join_timeout, options.job)
    join, procs = JoinSpec(nodes, *place), options.procs or 1
    print(f"{join}starting {procs} process{'es' if procs > 1 else ''} ...", file=sys.stderr)
    return start_ranks(command, procs, join)


def _help_with_fields(
    parser: argparse.ArgumentParser, source: str, overrides: list[str], only: Sequence[str] = ()
) -> int:
    from paceline.cli.help import print_fields
    from paceline.config.io import load_recipe

    parser.print_help()
    print_fields(load_recipe(source, overrides), source, only)
    return 0


def recipes(arguments: list[str]) -> int:
    parser = make_parser(
        "recipes", "[-h]", "List the shipped recipes: source, published figure, what was measured here."
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    parser.parse_args(arguments)
    from paceline.cli.help import print_recipes

    print_recipes()
    return 0
