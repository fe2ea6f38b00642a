"""Read runs, compare them, and write reports about them."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.analysis import book, charts, groups_text, page
from paceline.analysis import compare as _comparing
from paceline.analysis.curves import charts_of
from paceline.analysis.details.read import Details, details_of
from paceline.analysis.groups import GroupDifference, SeedGroup
from paceline.analysis.overview import RunRow, overview
from paceline.analysis.read import read
from paceline.analysis.run import LoggedRun, named_apart
from paceline.analysis.tables import as_csv, as_json, as_text, markdown
from paceline.analysis.verdict import Bottleneck, verdict
from paceline.api.arguments import check_choice, check_page, check_path, invalid
from paceline.errors import UserError
from paceline.system.files import make_folder, write_text
from paceline.system.packages import needs_package

if TYPE_CHECKING:
    import pandas
    from torch import nn


class Run(LoggedRun):
    """A run: its path, status, metrics, recipe and model. Also reads logs of other programs."""

    def __init__(self, path: str | Path | LoggedRun):
        vars(self).update(vars(path if isinstance(path, LoggedRun) else read(check_path("run", path))))

    @property
    def path(self) -> Path:
        """The run folder, or the log."""
        return self.origin

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All records in order: kind (train, eval, checkpoint, callback, resume), step, epoch, loss, top1, ..."""
        return self.records

    @property
    def last(self) -> dict[str, Any]:
        """The last evaluation; `best` is the one with the highest top-1."""
        return self.final

    @property
    def bottlenecks(self) -> list[Bottleneck]:
        """Where the time went and what would make the run faster, most important first."""
        return verdict(self)

    @property
    def evaluations(self) -> list[Details]:
        """What the model gets wrong, by `evaluate(..., details=True)`: `record` has the figures, `path` the files."""
        return details_of(self.path)[0] if self.folder else []  # there may be new ones since the run was read

    def dataframe(self, kind: str = "") -> "pandas.DataFrame":
        """Return the metrics as a pandas DataFrame, all or those of one kind."""
        with needs_package("pandas", "Run.dataframe()"):
            import pandas
        return pandas.json_normalize([record for record in self.records if kind in ("", record["kind"])])

    def curve(self, metric: str, kind: str = "eval", x_axis: str = "epoch") -> list[tuple[float, float]]:
        """Return points (x, value) of a metric in `train` or `eval` records; x: epoch, step, images or seconds."""
        check_choice("kind", kind, ("train", "eval"))
        check_choice("x_axis", x_axis, ("epoch", "step", "images", "seconds"))
        known = {
            name
            for record in self.records
            if record["kind"] == kind
            for name, value in record.items()
            if isinstance(value, int | float)
        }
        if known and metric not in known:
            raise invalid("metric", metric, f"one of the {kind} records: {', '.join(sorted(known))}")
        return self.points(metric, kind, x_axis)

    def load_model(self, checkpoint: str = "best") -> "nn.Module":
        """Return the model of the best or the last checkpoint, in evaluation mode on the CPU.

        `model.preprocess` is the transform of evaluation (PIL image to tensor), `model.classes` the class names.
        """
        from paceline.engine.trained_model import load_model

        check_best_or_last(checkpoint)
        return load_model(self.path, checkpoint)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self.status}, {self.bottlenecks[0]})"

    def _repr_html_(self) -> str:
        return _html(_comparing.compare([self]), f"<p>{escape(self.bottlenecks[0].text)}</p>")


class Comparison(_comparing.ComparedRuns):
    """Runs side by side; displayed as a table."""

    @property
    def groups(self) -> tuple[SeedGroup, ...]:
        """Runs that differ only in the seed: `spreads` has mean, standard deviation and confidence interval."""
        return self.grouped.groups

    @property
    def differences(self) -> tuple[GroupDifference, ...]:
        """How groups differ from the first one: Welch's t-test, and the seeds that a difference of that size needs."""
        return self.grouped.differences

    def write(self, folder: str | Path) -> list[Path]:
        """Write the comparison as Markdown, JSON and CSV with its charts; return the files written."""
        make_folder(Path(folder))
        texts = {"comparison.md": markdown(self), "comparison.json": as_json(self), "comparison.csv": as_csv(self)}
        texts |= groups_text.files(self.grouped)
        texts |= {name: drawn for name, chart in charts_of(self.runs) if (drawn := charts.svg(chart))}
        for name, text in texts.items():
            write_text(Path(folder) / name, text)
        return [Path(folder) / name for name in texts]

    def __repr__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return _html(self, f"<p>{page.fairness_html(self)}</p>")


def _html(comparison: _comparing.ComparedRuns, head: str) -> str:
    drawn = [svg for _, chart in charts_of(comparison.runs) if (svg := charts.svg(chart))]
    figures = "".join(f'<div style="width:420px">{svg}</div>' for svg in drawn)
    notes = "".join(f"<li>{escape(run.name)}: {escape(note)}</li>" for run in comparison.runs for note in run.notes)
    side_by_side = f'<div style="display:flex;flex-wrap:wrap;gap:8px">{figures}</div>'
    groups = groups_text.html_section(comparison.grouped)
    return f"{head}{page.table_html(comparison)}{groups}<ul>{notes}</ul>{side_by_side}"


def compare(
    *runs: str | Path | LoggedRun | Sequence[str | Path | LoggedRun],
    to: str | float | None = None,
    price: float | None = None,
) -> Comparison:
    """Compare runs, or a list of runs, to the first one.

    `to` is a target accuracy (0.93 or "93%"), `price` that of a host per hour.
    """
    return Comparison(**vars(_compared(runs, to, price)))


def _compared(runs: Any, to: str | float | None, price: float | None) -> _comparing.ComparedRuns:
    if not (found := _read(runs)):
        raise UserError("missing-run", "no run is given. Write compare('runs/one', 'runs/two').")
    if price is not None and not (isinstance(price, int | float) and price > 0):
        raise UserError(
            "invalid-price", f"price={price!r} is not a price per host and hour. Write e.g. 3.06.", price=price
        )
    target = None if to is None else _comparing.parse_accuracy(to)
    return _comparing.compare(named_apart(found), target, price)


def _read(runs: Any) -> list[LoggedRun]:
    """Return the runs of a sequence, which may contain other sequences, or a single one."""
    if isinstance(runs, list | tuple):
        return [run for inner in runs for run in _read(inner)]
    return [Run(runs)]


def report(
    runs: Sequence[str | Path | LoggedRun],
    out: str | Path = "report.html",
    *,
    to: str | float | None = None,
    price: float | None = None,
    title: str = "",
) -> Path:
    """Write one self-contained HTML page about runs and return its path."""
    comparison, path = _compared(runs, to, price), check_page("out", out)
    names = [run.name for run in comparison.runs]
    title = title or (" and " if len(names) == 2 else ", ").join(names[:3]) + (", ..." if len(names) > 3 else "")
    make_folder(path.parent)
    write_text(path, page.report(comparison, title))
    return path


def logbook(runs: Sequence[str | Path | LoggedRun], out: str | Path = "logbook") -> list[Path]:
    """Write a logbook: a Markdown page per run, an index, a comparison. Returns the files written."""
    return book.write_logbook(named_apart(_read(runs)), check_path("out", out))


def list_runs(folder: str | Path = "runs") -> list[RunRow]:
    """Return status, progress and best accuracy of the runs in a folder, oldest first."""
    if not (path := check_path("folder", folder)).is_dir():
        message = f"{path} is not a folder. Give the folder with your runs (--runs of `paceline train`)."
        raise UserError("folder-not-found", message, path=path)
    return overview(path)


def path_of(run: str | Path | LoggedRun) -> Path:
    """Return the path of a run, or the path itself."""
    return run.origin if isinstance(run, LoggedRun) else check_path("run", run)


def check_best_or_last(checkpoint: str) -> None:
    """Refuse a choice of checkpoint that is neither the best nor the last."""
    if checkpoint not in ("best", "last"):
        message = f'checkpoint={checkpoint!r} is neither "best" nor "last".'
        raise UserError("unknown-checkpoint", message, checkpoint=checkpoint)
