"""The Python API: the main commands as functions.

import paceline as pl

recipe = pl.load_recipe("cifar10-fast", {"optim.lr": 0.2})
run = pl.train(recipe, procs=2)                  # trains in new processes, as `paceline train` does
run.best, run.metrics, run.load_model()
pl.compare("runs/one", run)                      # comparability, speed-up, accuracy; a table in notebooks
"""

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.analysis import book, charts, page
from paceline.analysis import compare as _comparing
from paceline.analysis.curves import charts_of
from paceline.analysis.read import read as _read
from paceline.analysis.run import LoggedRun, named_apart
from paceline.analysis.tables import markdown
from paceline.analysis.verdict import verdict
from paceline.config.imports import load_imports
from paceline.config.io import load_recipe as _load_recipe
from paceline.config.io import recipe_from_tree, to_tree, words_of
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.processes import in_this_process, run_in_processes
from paceline.system.files import make_folder, write_text

if TYPE_CHECKING:
    import pandas
    from torch import nn

Overrides = Mapping[str, Any]
"""Values by dotted field: {"optim.lr": 0.2, "model.options": {"width": 64}}."""


class Run(LoggedRun):
    """A run: its path, status, metrics, recipe and model. Also reads logs of other programs."""

    def __init__(self, path: "str | Path | Run"):
        vars(self).update(vars(path if isinstance(path, Run) else _read(Path(path))))

    @property
    def path(self) -> Path:
        """The run folder, or the log."""
        return self.origin

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All records, in order: kind (train, eval, checkpoint, callback, resume), step, epoch, loss, top1, ..."""
        return self.records

    @property
    def last(self) -> dict[str, Any]:
        """The last evaluation; `best` is the one with the highest top-1."""
        return self.final

    def dataframe(self, kind: str = "") -> "pandas.DataFrame":
        """Return the metrics as a pandas DataFrame: all of them, or those of one kind."""
        try:
            import pandas
        except ImportError:
            message = "Run.dataframe() needs the package pandas. Run: pip install pandas"
            raise UserError("missing-package", message, package="pandas") from None
        return pandas.json_normalize([record for record in self.records if kind in ("", record["kind"])])

    def load_model(self, which: str = "best") -> "nn.Module":
        """Return the model of the best or the last checkpoint, in evaluation mode on the CPU.

        `model.preprocess` is the evaluation transform (PIL image to tensor), `model.classes` are the class names.
        """
        from paceline.engine.inference import load_model

        return load_model(self.path, which)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.status}, {verdict(self)[0].text})"

    def _repr_html_(self) -> str:
        return _html(_comparing.compare([self]), f"<p>{escape(verdict(self)[0].text)}</p>")


class Comparison(_comparing.ComparedRuns):
    """Runs side by side; displayed as a table."""

    def __repr__(self) -> str:
        return markdown(self)

    def _repr_html_(self) -> str:
        return _html(self, f"<p>{page.fairness_html(self)}</p>")


def _html(comparison: _comparing.ComparedRuns, head: str) -> str:
    drawn = [svg for _, chart in charts_of(comparison.runs) if (svg := charts.svg(chart))]
    figures = "".join(f'<div style="width:420px">{svg}</div>' for svg in drawn)
    notes = "".join(f"<li>{escape(run.name)}: {escape(note)}</li>" for run in comparison.runs for note in run.notes)
    side_by_side = f'<div style="display:flex;flex-wrap:wrap;gap:8px">{figures}</div>'
    return f"{head}{page.table_html(comparison)}<ul>{notes}</ul>{side_by_side}"


def load_recipe(source: "str | Path", overrides: Overrides | None = None) -> Recipe:
    """Return a shipped recipe or one in a YAML file, with some of its fields overridden."""
    return _load_recipe(str(source), words_of(overrides))


def _loaded(recipe: "str | Path | Recipe", overrides: Overrides | None) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe_from_tree(to_tree(recipe), recipe.name, words_of(overrides))
    return load_recipe(recipe, overrides)


def train(
    recipe: "str | Path | Recipe",
    overrides: Overrides | None = None,
    *,
    procs: int = 1,
    name: str = "",
    runs: "str | Path" = "runs",
    results: str = "",
    in_process: bool = False,
) -> Run:
    """Train a recipe in `procs` new processes and return the run. An unfinished run of that name is resumed.

    Notebooks show progress and curves. `in_process` trains in this process, on one rank, so that a debugger works.
    Ctrl-C stops the run after a checkpoint.
    """
    options = ["--runs", str(runs), *(["--name", name] if name else []), *(["--results", results] if results else [])]
    if in_process:
        return _train_here(_loaded(recipe, overrides), procs, Path(runs), name, None, results, overrides)
    return Run(run_in_processes(["train"], recipe, [*options, *words_of(overrides)], procs)["run"])


def resume(
    run: "str | Path | Run", overrides: Overrides | None = None, *, procs: int = 1, in_process: bool = False
) -> Run:
    """Resume an interrupted run, in any number of processes."""
    path = _path(run)
    if in_process:
        recipe = load_recipe(path / "recipe.yaml", overrides)
        return _train_here(recipe, procs, path.parent, path.name, path, "", overrides)
    return Run(run_in_processes(["train"], None, ["--resume", str(path), *words_of(overrides)], procs)["run"])


def _train_here(
    recipe: Recipe,
    procs: int,
    runs: Path,
    name: str,
    run: Path | None,
    results: str,
    overrides: Overrides | None,
) -> Run:
    from paceline.engine.session import train_recipe

    _check_one_rank(procs)
    with in_this_process():
        load_imports(recipe)
        return Run(train_recipe(recipe, runs, name or recipe.name, run, results, list(overrides or {})))


def _check_one_rank(procs: int) -> None:
    if procs != 1:
        message = f"in_process=True trains on one rank, but procs={procs}. Leave one of them out."
        raise UserError("in-process-needs-one-rank", message, procs=procs)


def evaluate(
    run: "str | Path | Run",
    overrides: Overrides | None = None,
    *,
    which: str = "best",
    procs: int = 1,
    in_process: bool = False,
) -> dict[str, float]:
    """Evaluate the best or the last checkpoint of a run, or a checkpoint folder, and return its metrics.

    Fields of `data` and `evaluate` can be overridden, e.g. {"data.path": "other-images"}.
    """
    if which not in ("best", "last"):
        raise UserError("unknown-checkpoint", f'which={which!r} is neither "best" nor "last".', which=which)
    words = words_of(overrides)
    if in_process:
        from paceline.engine.saved import evaluate_path

        _check_one_rank(procs)
        with in_this_process():
            return evaluate_path(_path(run), which, words)[1]
    options = ["--last"] if which == "last" else []
    command = ["evaluate", str(_path(run))]
    metrics: dict[str, float] = run_in_processes(command, None, [*options, *words], procs)["metrics"]
    return metrics


def compare(*runs: "str | Path | Run", to: "str | float | None" = None, price: float | None = None) -> Comparison:
    """Compare runs to the first one. `to` is the target accuracy (0.93 or "93%"), `price` is per host and hour."""
    return Comparison(**vars(_compared(runs, to, price)))


def _compared(
    runs: "Sequence[str | Path | Run]", to: "str | float | None", price: float | None
) -> _comparing.ComparedRuns:
    if not runs:
        raise UserError("missing-run", "no run is given. Write compare('runs/one', 'runs/two').")
    if price is not None and not (isinstance(price, int | float) and price > 0):
        raise UserError(
            "invalid-price", f"price={price!r} is not a price per host and hour. Write e.g. 3.06.", price=price
        )
    target = None if to is None else _comparing.parse_accuracy(to)
    return _comparing.compare(named_apart([Run(run) for run in runs]), target, price)


def report(
    runs: "Sequence[str | Path | Run]",
    out: "str | Path" = "report.html",
    *,
    to: "str | float | None" = None,
    price: float | None = None,
    title: str = "",
) -> Path:
    """Write one self-contained HTML page about runs and return its path."""
    comparison, path = _compared(runs, to, price), Path(out)
    if path.is_dir():
        message = f"{path} is a folder. Give a file, e.g. {path / 'report.html'}."
        raise UserError("output-is-a-folder", message, path=path)
    names = [run.name for run in comparison.runs]
    make_folder(path.parent)
    write_text(path, page.report(comparison, title or " and ".join(names[:3]) + (" ..." if len(names) > 3 else "")))
    return path


def logbook(runs: "Sequence[str | Path | Run]", out: "str | Path" = "logbook") -> list[Path]:
    """Write a logbook: a Markdown page per run, an index and a comparison. Return the files written."""
    return book.write_logbook(named_apart([Run(run) for run in runs]), Path(out))


def prepare_folder(
    source: "str | Path",
    out: "str | Path",
    *,
    max_side: "int | Sequence[int]" = (),
    short_side: "int | Sequence[int]" = (),
    original: bool = False,
    quality: int = 90,
    val_fraction: float = 0.0,
    allow_empty_classes: bool = False,
    workers: int = 0,
) -> Path:
    """Convert a tree with one folder per class, or a CSV list of images, to shards. Return the folder written.

    Each size becomes a variant; without one, images keep their size.
    """
    from paceline.data.prepare.convert import Variant
    from paceline.data.prepare.pack import prepare
    from paceline.data.prepare.sources import tree

    sides = {"max_side": _listed(max_side), "short_side": _listed(short_side)}
    variants = [Variant(**{name: side}, quality=quality) for name, values in sides.items() for side in values]
    if original or not variants:
        variants.insert(0, Variant())
    found, path = tree(Path(source), "folder", val_fraction, 0), Path(out)
    prepare(found, path, list(dict.fromkeys(variants)), workers or os.cpu_count() or 1, allow_empty_classes)
    return path


def _listed(sides: "int | Sequence[int]") -> Sequence[int]:
    return [sides] if isinstance(sides, int) else sides


def _path(run: "str | Path | Run") -> Path:
    return run.path if isinstance(run, Run) else Path(run)
