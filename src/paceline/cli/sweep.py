"""The command sweep."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import (
    complete_source,
    count,
    help_with_fields,
    make_parser,
    plain_name,
    refuse_misspelled,
    split_source,
)
from paceline.cli.ranks import add_procs
from paceline.errors import Stopped, UserError
from paceline.system.files import say

if TYPE_CHECKING:
    from paceline.search.spec import SweepSpec

_SWEEP = """Search for the hyperparameters of a recipe with the best validation metric, using Optuna.

    --set optim.lr=log:0.01..1              a range, uniform in the logarithm
    --set optim.weight_decay=0..1e-3        a range, of integers if the field is an integer
    --set train.global_batch=128..512:128   a range in steps
    --set optim.name=sgd,adamw              a choice of values

Each trial is an ordinary run in runs/NAME/trial-0000, ... Other fields are overridden as for `paceline train`.
The same command continues a sweep that was stopped or killed. If it is started while the sweep runs, on this host or
on another one with the same folder, it is one more worker."""


def sweep(arguments: list[str]) -> int:
    """Run `paceline sweep`; returns the exit status."""
    from paceline.config.imports import allow_given, trusted
    from paceline.config.io import load_recipe, split_overrides

    parser = _parser()
    source, rest = split_source(arguments)
    options, overrides = parser.parse_known_args(rest)
    refuse_misspelled(parser, overrides)
    if options.help:
        return help_with_fields(parser, source or "digits", overrides)
    if options.show:
        return _show(_folder(options.show, options.runs))
    if not source:
        raise UserError(
            "missing-recipe",
            "no recipe is given. `paceline recipes` lists the shipped ones; digits needs no dataset.",
        )
    allow_given(overrides)
    recipe = load_recipe(source, overrides)
    from paceline.analysis.sweeps.record import read_sweep
    from paceline.api.sweeping import default_name, run_sweep
    from paceline.search.spec import make_spec

    name = plain_name(options.name or default_name(recipe))
    spec = make_spec(
        recipe,
        options.set,
        options.runs / name,
        given=[key.replace("-", "_") for key, _ in split_overrides(overrides)],
        words=tuple(word for module in trusted() for word in ("--import", module)),
        **{key: getattr(options, key) for key in _PASSED},
    )
    worker = run_sweep(spec, _TrialLines(spec))
    status = _show(spec.folder)
    if worker.signal:
        say("paceline: stopped; run the same command again to continue", error=True)
        raise Stopped(worker.signal)
    if worker.is_out_of_time and (left := spec.trials - len(read_sweep(spec.folder).trials)) > 0:
        say(
            f"--budget {options.budget} is over: {left} of {spec.trials} trials have not started. The command of the "
            "sweep starts them."
        )
    return status


_PASSED = ("trials", "metric", "sampler", "pruner", "seed", "parallel", "procs", "budget", "storage")
"""Options with the same name as a field of the spec."""


def _parser() -> argparse.ArgumentParser:
    from paceline.search.spec import DEFAULT_TRIALS, METRICS, PRUNERS, SAMPLERS

    usage = "RECIPE --set FIELD=VALUES [--trials N] [--parallel N] [--dotted.field VALUE ...] | --show NAME"
    parser = make_parser("sweep", usage, _SWEEP)
    add = parser.add_argument
    add("--set", action="append", default=[], metavar="FIELD=VALUES", help="a field and the values to try; repeatable")
    add("--trials", type=count, metavar="N", help=f"trials in total (default {DEFAULT_TRIALS}; grid: all points)")
    add("--metric", choices=METRICS, default="", help="validation metric (default: checkpoint.best of the recipe)")
    add("--sampler", choices=SAMPLERS, default="tpe", help="how values are chosen (default tpe)")
    add("--pruner", choices=PRUNERS, default="none", help="stop bad trials early (default none)")
    add("--sampler-seed", dest="seed", type=int, metavar="S", help="seed of the sampler")
    add("--parallel", type=count, default=1, metavar="N", help="trials side by side on this machine (default 1)")
    add("--budget", default="", metavar="TIME", help="start no trial after this time: 90s, 30min, 2h, 1d")
    add("--name", help="name of the sweep (default: RECIPE-sweep)")
    add("--runs", type=Path, default=Path("runs"), metavar="DIR", help="parent folder of the sweep (default: runs)")
    add("--storage", default="journal", metavar="S", help="journal (default), sqlite, or the URL of a database")
    add_procs(parser)
    add("--show", default="", metavar="NAME", help="show the sweep with this name or folder, and exit")
    add("-h", "--help", action="store_true", help="show this help")
    complete_source(parser, "RECIPE")
    return parser


def _folder(name: str, runs: Path) -> Path:
    """Return the folder of a sweep that is given by its path or its name."""
    from paceline.analysis.sweeps.record import is_sweep

    path = Path(name)
    return path if is_sweep(path) or not is_sweep(runs / name) else runs / name


class _TrialLines:
    """Prints a line when a trial starts, and one when it ends."""

    def __init__(self, spec: "SweepSpec") -> None:
        self._spec = spec

    def __call__(self, number: int, words: dict[str, str], end: object) -> None:
        from paceline.analysis.sweeps.record import read_sweep
        from paceline.analysis.sweeps.text import result_text, values_text

        if end is None:
            begun = self._spec.trial_folder(number).exists()
            say(f"trial {number} {'resumes' if begun else 'starts'}: {values_text(words)}")
            return
        record = read_sweep(self._spec.folder)
        trial = next(trial for trial in record.trials if trial.number == number)
        best = record.best
        so_far = f"; best so far: trial {best.number}, {record.shown(best.value)}" if best else ""
        say(f"trial {number}: {result_text(record, trial)}{so_far}")


def _show(folder: Path) -> int:
    """Print the table of a sweep; the exit status is 1 if trials have ended, but none has a result."""
    from paceline.analysis.sweeps.record import is_training, read_sweep
    from paceline.analysis.sweeps.text import summary_line, trial_table
    from paceline.search.results import BEST_RECIPE
    from paceline.system.tables import new_table, show

    record = read_sweep(folder)
    heads, *rows = trial_table(record)
    print()
    show(new_table(heads, rows))
    say(f"\n{summary_line(record)}")
    if record.importance:
        parts = ", ".join(f"{field} {part:.0%}" for field, part in record.importance.items())
        say(f"importance: {parts}")
    waiting = [trial for trial in record.trials if trial.state == "running" and not is_training(folder, trial)]
    if waiting:
        numbers = ", ".join(str(trial.number) for trial in waiting)
        say(f"unfinished trials without a worker: {numbers}. Run the command of the sweep again to resume them.")
    if record.best:
        say(f"train the best recipe: paceline train {folder / BEST_RECIPE}")
    ended = [trial for trial in record.trials if trial.state != "running"]
    return 0 if record.best or not ended else 1
