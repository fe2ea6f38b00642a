"""Sweeps: search for the best hyperparameters of a recipe."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.analysis.page_parts import text_table
from paceline.analysis.sweeps.page import sweep_page
from paceline.analysis.sweeps.record import SweepRecord, SweepTrial, read_sweep
from paceline.analysis.sweeps.text import trial_table
from paceline.api.arguments import (
    Procs,
    check_choice,
    check_count,
    check_name,
    check_page,
    check_path,
    check_procs,
    invalid,
)
from paceline.api.processes import python_path, words_of_imports
from paceline.api.training import loaded
from paceline.config.overrides import Overrides
from paceline.config.recipe import Recipe
from paceline.config.space import space_words
from paceline.errors import UserError
from paceline.search.results import BEST_RECIPE
from paceline.search.spec import METRICS, PRUNERS, SAMPLERS, SweepSpec, make_spec
from paceline.search.worker import OnTrial, Worker
from paceline.system.files import make_folder, write_text

REPORT = "report.html"


class Sweep:
    """A sweep: its folder, trials, best trial and importance of parameters; displayed as a table."""

    def __init__(self, path: str | Path):
        self.path = check_path("path", path)
        """Its folder, which has the run folders of the trials."""
        self.record: SweepRecord = read_sweep(self.path)

    @property
    def trials(self) -> list[SweepTrial]:
        """All trials: number, state, values by field, value of the metric, name of the run folder."""
        return self.record.trials

    @property
    def best(self) -> SweepTrial | None:
        """The best trial; None if no trial is complete."""
        return self.record.best

    @property
    def best_recipe(self) -> Path:
        """The recipe of the best trial, ready to train."""
        return self.path / BEST_RECIPE

    @property
    def importance(self) -> dict[str, float] | None:
        """Fraction of the variance of the metric that each field explains; None with too few complete trials."""
        return self.record.importance

    def report(self, out: str | Path = "") -> Path:
        """Write the page of the sweep, by default report.html in its folder; return its path."""
        path = check_page("out", out) if out else self.path / REPORT
        make_folder(path.parent)
        write_text(path, sweep_page(self.record))
        return path

    def __repr__(self) -> str:
        found = f"best {self.record.shown(self.best.value)}" if self.best else "no result yet"
        return f"Sweep({str(self.path)!r}: {len(self.trials)} trials, {found})"

    def _repr_html_(self) -> str:
        heads, *rows = trial_table(self.record)
        return text_table(heads, rows)


def sweep(
    recipe: str | Path | Recipe,
    space: Mapping[str, Any],
    overrides: Overrides | None = None,
    *,
    trials: int | None = None,
    metric: str = "",
    sampler: str = "tpe",
    pruner: str = "none",
    seed: int | None = None,
    parallel: int = 1,
    procs: Procs = "auto",
    budget: str = "",
    name: str = "",
    runs: str | Path = "runs",
    storage: str = "journal",
    on_trial: OnTrial | None = None,
) -> Sweep:
    """Search for the values of recipe fields with the best validation metric, and return the sweep.

    `space`: {"optim.lr": "log:0.01..1", "train.global_batch": [256, 512]}. `metric`: top1, top5 or loss; by default
    that of the recipe's best checkpoint. `sampler`: tpe, random, grid, qmc or gp. `pruner`: none, median or
    hyperband. `parallel`: trials side by side. `budget`: time after which no trial starts, e.g. "2h".

    `on_trial` is called with the number and values of a trial, and with None when it starts or a TrialEnd when it ends;
    with `parallel`, in several threads.

    An unfinished sweep of that name is continued. Ctrl-C stops after checkpoints of the running trials.
    """
    for argument, value, choices in (("sampler", sampler, SAMPLERS), ("pruner", pruner, PRUNERS)):
        check_choice(argument, value, choices)
    check_choice("metric", metric, ("", *METRICS))
    _check_types(space, seed, budget, storage)
    base = loaded(recipe, overrides)
    spec = make_spec(
        base,
        space_words(space),
        check_path("runs", runs) / (check_name(name) or default_name(base)),
        given=(overrides or {}).keys(),
        trials=None if trials is None else check_count("trials", trials),
        metric=metric,
        procs=check_procs("procs", procs),
        parallel=check_count("parallel", parallel),
        budget=budget,
        sampler=sampler,
        pruner=pruner,
        seed=seed,
        storage=storage,
        words=tuple(words_of_imports(base)),
        environment=python_path(os.environ),
    )
    if run_sweep(spec, on_trial).signal:
        raise KeyboardInterrupt
    return Sweep(spec.folder)


def _check_types(space: object, seed: object, budget: object, storage: object) -> None:
    """Refuse arguments of other types."""
    expected: tuple[tuple[str, object, Any, str], ...] = (
        ("space", space, Mapping, 'a dictionary, e.g. {"optim.lr": "log:0.01..1"}'),
        ("seed", seed, int | None, "an integer, or None"),
        ("budget", budget, str, 'a text, e.g. "2h"'),
        ("storage", storage, str, '"journal", "sqlite" or the URL of a database'),
    )
    for argument, value, kind, text in expected:
        if not isinstance(value, kind):
            raise invalid(argument, value, text)


def default_name(recipe: Recipe) -> str:
    """Return the default name of a sweep."""
    return f"{recipe.name}-sweep"


def run_sweep(spec: SweepSpec, on_trial: OnTrial | None = None) -> Worker:
    """Work on a sweep until no trial is left, write its page, and return the worker."""
    worker = Worker(spec, on_trial or (lambda *_: None))
    try:
        worker.run()
    except BaseException:
        with suppress(UserError, OSError):  # the first error is more important
            _conclude(worker)
        raise
    _conclude(worker)
    return worker


def _conclude(worker: Worker) -> None:
    worker.study.summarize()
    Sweep(worker.spec.folder).report()
