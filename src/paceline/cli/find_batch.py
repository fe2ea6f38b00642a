"""The command find-batch."""

import argparse
import re
from pathlib import Path

from paceline.cli.hosts import add_host_options, hosts_from
from paceline.cli.options import count, make_parser, with_recipe
from paceline.cli.ranks import add_procs
from paceline.launch.batch_finder import Trial
from paceline.system.signals import exit_on_sigterm
from paceline.system.tables import print_row

_FIND = """Find the largest per-rank batch that fits in memory, and the fastest one.

    paceline find-batch RECIPE --procs 2 --memory-limit 8GB
    paceline find-batch RECIPE --hosts a,b             the largest batch that fits on all these hosts, over ssh

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
    from paceline.api.finding import find_batch as find

    exit_on_sigterm()  # which ends the processes of trials first, as Ctrl-C does
    print_row(_HEADS, _WIDTHS)
    found = find(
        recipe,
        procs=options.procs,
        hosts=[] if options.hosts is None else hosts_from(options.hosts),
        memory_limits=options.memory_limit,
        max_batch=options.max_batch,
        steps=options.steps,
        out=options.out or "",
        ssh_config=options.ssh_config or "",
        python=options.python,
        on_trial=lambda trial: print_row(_cells(trial), _WIDTHS),
    )
    largest, fastest, ranks = found.largest.per_rank_batch, found.fastest, len(found.largest.memory)
    speed = f"{fastest.per_rank_batch} per rank, {fastest.images_per_second:,.0f} images/s"
    print(f"largest batch: {largest} x {ranks} = {largest * ranks}; fastest: {speed}")
    if largest == options.max_batch:
        print(f"a larger batch may fit: sizes above --max-batch {options.max_batch} were not tried")
    print(f"{found.folder / 'find-batch.json'}, {found.folder / 'find-batch.svg'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = "RECIPE [--procs N] [--hosts A,B] [--memory-limit 4GB] [--dotted.field VALUE ...]"
    parser = make_parser("find-batch", usage, _FIND)
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
    add_host_options(parser)
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
