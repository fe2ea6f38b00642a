"""The command find-lr."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.status import Status

from paceline.cli.hosts import add_host_options, hosts_from
from paceline.cli.options import count, make_parser, positive, split_source, with_recipe
from paceline.cli.ranks import add_procs
from paceline.system.files import say
from paceline.system.logs import console
from paceline.system.signals import exit_on_sigterm

if TYPE_CHECKING:
    from paceline.launch.lr_finder import LrSearch

_FIND = """Suggest a learning rate with a range test: train while the learning rate grows, and watch the loss.

    paceline find-lr RECIPE
    paceline find-lr RECIPE --min-lr 1e-4 --max-lr 1 --steps 200

Trains the recipe with its data, batch, augmentation, loss, precision and strategy; with phases, those of the first
one. The learning rate grows from --min-lr to --max-lr by the same factor per step (--linear: by the same difference).
The test ends early when the loss diverges. The suggestion is the learning rate at which the smoothed loss falls
fastest. Parameter groups keep their factors. Nothing is evaluated or checkpointed. Fields can be overridden as for
`paceline train`."""


def find_lr(arguments: list[str]) -> int:
    """Run `paceline find-lr`; returns the exit status."""
    parser = _parser()
    options, recipe = with_recipe(parser, arguments)
    from paceline.api.finding import find_lr as find

    exit_on_sigterm()  # which ends the processes of the test first, as Ctrl-C does
    with Status("starting ...", console=console) as status:
        found = find(
            recipe,
            procs=options.procs,
            hosts=[] if options.hosts is None else hosts_from(options.hosts),
            min_lr=options.min_lr,
            max_lr=options.max_lr,
            steps=options.steps,
            linear=options.linear,
            out=options.out or "",
            ssh_config=options.ssh_config or "",
            python=options.python,
            on_step=lambda step, lr, loss: status.update(
                f"step {step} of {options.steps}: learning rate {lr:.3g}, loss {loss:.4f}"
            ),
        )
    _print(found)
    source, rest = split_source(arguments)
    say(_how_to_train(found, source, parser.parse_known_args(rest)[1]))
    say(f"{found.folder / 'find-lr.json'}, {found.folder / 'find-lr.svg'}")
    return 0


def _parser() -> argparse.ArgumentParser:
    usage = "RECIPE [--min-lr X] [--max-lr X] [--steps N] [--procs N] [--dotted.field VALUE ...]"
    parser = make_parser("find-lr", usage, _FIND)
    add = parser.add_argument
    add("--min-lr", type=positive, default=1e-6, metavar="X", help="first learning rate (default 1e-6)")
    add("--max-lr", type=positive, default=10.0, metavar="X", help="last learning rate (default 10)")
    add("--steps", type=count, default=100, metavar="N", help="number of steps (default 100)")
    add("--linear", action="store_true", help="grow by the same difference per step, not by the same factor")
    add("--out", type=Path, metavar="DIR", help="folder for results (default: runs/find-lr-RECIPE)")
    add_procs(parser)
    add_host_options(parser)
    add("-h", "--help", action="help", help="show this help")
    return parser


def _print(found: "LrSearch") -> None:
    assert found.suggested
    points, last = found.points, found.points[-1]
    low = min(point.smoothed for point in points)
    end = f"diverged at {last.lr:.3g}" if found.diverged else f"did not diverge up to {last.lr:.3g}"
    say(f"loss: {points[0].smoothed:.4f} at the start, lowest {low:.4f} at {found.minimum:.3g}, {end}")
    tenth = f"a tenth of that with the lowest loss: {found.minimum / 10:.2g}"
    say(f"suggested learning rate: {found.suggested:.2g} (steepest descent); {tenth}")
    if not found.diverged and found.minimum > 0.9 * last.lr:
        say("the loss still falls at the end of the range; a larger --max-lr may give a larger suggestion")
    if found.noise > 0.2 * (points[0].smoothed - low):
        say(f"the loss is noisy (+-{found.noise:.2g} per step), and so is the suggestion; use more --steps")


def _how_to_train(found: "LrSearch", source: str, overrides: list[str]) -> str:
    """Return the command that trains with the suggestion, or why there is none."""
    from paceline.config.io import split_overrides

    if found.optim_lr is None:
        return (
            "the recipe sets learning rates per phase: scale all phases.N.lr so that the highest one is the suggestion"
        )
    kept = [word for key, value in split_overrides(overrides) for word in (f"--{key}", *value) if key != "optim.lr"]
    return f"paceline train {shlex.join([source, *kept, '--optim.lr', f'{found.optim_lr:.2g}'])}"
