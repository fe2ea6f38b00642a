"""The command find-batch, and the trials that it starts."""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

from paceline.cli.options import count, make_parser, with_recipe
from paceline.cli.ranks import add_procs, start_ranks
from paceline.distributed.env import under_launcher
from paceline.launch.batch_finder import Trial
from paceline.system.signals import interrupts_end
from paceline.system.tables import print_row

_FIND = """Find the largest per-rank batch that fits in memory, and the fastest one.

Runs real training steps (forward, backward, optimizer) on synthetic images with the recipe's largest image size,
precision and strategy. Each batch size runs in new processes. On GPUs the limit is the device memory, on CPUs
--memory-limit. Fields can be overridden as for `paceline train`:
`--strategy fsdp --precision bf16`."""

_HEADS = ("per-rank batch", "peak memory", "images/s")
_WIDTHS = (14, 11)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def find_batch(arguments: list[str]) -> int:
    """Run `paceline find-batch`; returns the exit status."""
    options, recipe = with_recipe(_parser(), arguments)
    from paceline.api.planning import find_batch as find
    from paceline.config.batch import procs_per_node

    procs = procs_per_node(recipe, options.procs)
    signal.signal(signal.SIGTERM, lambda signum, _frame: sys.exit(128 + signum))  # an exit ends the trial first
    print_row(_HEADS, _WIDTHS)
    found = find(
        recipe,
        procs=procs,
        memory_limits=options.memory_limit,
        max_batch=options.max_batch,
        steps=options.steps,
        out=options.out or "",
        on_trial=lambda trial: print_row(_cells(trial), _WIDTHS),
    )
    largest, fastest = found.largest.per_rank_batch, found.fastest
    speed = f"{fastest.per_rank_batch} per rank, {fastest.images_per_second:,.0f} images/s"
    print(f"largest batch: {largest} x {procs} = {largest * procs}; fastest: {speed}")
    if largest == options.max_batch:
        print(f"a larger batch may fit: sizes above --max-batch {options.max_batch} were not tried")
    print(f"{found.folder / 'find-batch.json'}, {found.folder / 'find-batch.svg'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("find-batch", "RECIPE [--procs N] [--memory-limit 4GB] [--dotted.field VALUE ...]", _FIND)
    add_procs(parser)
    parser.add_argument(
        "--memory-limit",
        type=_sizes,
        default=[],
        metavar="SIZE[,SIZE]",
        help="limit of every rank, or of each rank: 4GB,2GB (default: the free memory)",
    )
    parser.add_argument(
        "--max-batch", type=count, default=65536, metavar="N", help="largest batch to try (default 65536)"
    )
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="number of timed steps (default 3)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results (default: runs/find-batch-RECIPE)")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _cells(trial: Trial) -> tuple[str, str, str]:
    if not trial.fits:
        return str(trial.per_rank_batch), "-", trial.reason
    return str(trial.per_rank_batch), f"{max(trial.memory) / 1e9:,.2f} GB", f"{trial.images_per_second:,.1f}"


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", part.strip(), re.IGNORECASE)
        if not match or not float(match[1]):
            raise argparse.ArgumentTypeError(f"{part!r} is not a size; write e.g. 4GB or 512MB")
        sizes.append(int(float(match[1]) * _UNITS[match[2].upper()]))
    return sizes


def try_batch(arguments: list[str]) -> int:
    """Run one trial of find-batch: start its ranks, or run as one of them; returns the exit status."""
    parser = make_parser("try-batch", "RECIPE.yaml --batch N --steps N --result FILE", "One trial of find-batch.")
    parser.add_argument("recipe")
    parser.add_argument("--batch", type=count, required=True)
    parser.add_argument("--steps", type=count, required=True)
    parser.add_argument("--procs", type=count, default=1)
    parser.add_argument("--limits", type=int, nargs="*", default=[])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--import", action="append", default=[], dest="trusted")
    options = parser.parse_args(arguments)
    if options.procs > 1 and not under_launcher(os.environ):
        return start_ranks(["try-batch", *arguments], options.procs)
    from paceline.config.imports import load_imports, trust
    from paceline.config.io import load_recipe

    with interrupts_end():
        from paceline.engine.trial import try_batch as trial

    try:
        recipe = load_recipe(options.recipe)
        trust(options.trusted)
        load_imports(recipe)
        trial(recipe, options.batch, options.steps, options.limits, options.result)
    except (MemoryError, RuntimeError) as error:
        print(" ".join(str(error).split())[:500] or type(error).__name__, file=sys.stderr, flush=True)
        os._exit(1)  # immediately, because there may be no memory left for a regular exit
    return 0
