"""The commands that read runs: compare, logbook, report and doctor RUN."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser, positive
from paceline.errors import UserError
from paceline.system.files import say

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.api.runs import Comparison, Run
    from paceline.system.logs import Screen

_READS = """A RUN is a run folder or a log of another program: PyTorch's ImageNet example and programs derived from it,
DAWNBench's TSV, Lightning's metrics.csv or TensorBoard's event files."""

_COMPARE = f"""Compare runs to the first one: same experiment or not, speed-up, accuracy, memory, utilization, cost.

{_READS}"""

_LOGBOOK = f"""Write a logbook: a Markdown page per run, an index, a comparison, DAWNBench's TSV and JSON.

{_READS}
Run it again after the next run: the index then lists all runs, and your notes between the markers are kept."""

_REPORT = f"""Write one self-contained HTML page with curves, comparison and bottlenecks.

{_READS} A
sweep that is given alone is shown with its trials, the importance of fields and parallel coordinates."""


def _runs_parser(command: str, usage: str, description: str) -> argparse.ArgumentParser:
    parser = make_parser(command, usage, description)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folder or log")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    return parser


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--to", type=_accuracy, metavar="ACCURACY", help="top-1 for time-to-accuracy, e.g. 0.93 or 93%%"
    )
    parser.add_argument("--price", type=positive, metavar="DOLLARS", help="price per host and hour")


def _accuracy(text: str) -> float:
    from paceline.analysis.compare import parse_accuracy

    try:
        return parse_accuracy(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(error.report) from None


def _read(paths: Sequence[Path], relative: bool = False) -> "tuple[list[Run], int]":
    """Return the runs among the paths and the exit status.

    Paths that are not runs are skipped and listed, so that `runs/*` works. Unreadable runs are errors; they are fatal
    if no run remains, or if the first run is unreadable and the others are compared to it.
    """
    from paceline.analysis.run import NotARun, named_apart
    from paceline.api.runs import Run

    runs, skipped, errors = [], [], []
    for path in paths:
        try:
            runs.append(Run(path))
        except UserError as error:
            if len(paths) == 1:
                raise
            if isinstance(error, NotARun):
                skipped.append(f"{path} ({error.fields['reason']})")
            elif relative and not runs:
                raise
            else:
                errors.append(error.report)
    if skipped:
        say(f"paceline: skipped: {', '.join(skipped)}", error=True)
    if not runs:
        details = "; ".join(errors) or "Give run folders or other programs' logs."
        raise UserError("no-runs", f"none of these paths is a readable run. {details}")
    for message in errors:
        say(f"paceline: left out: {message}", error=True)
    return named_apart(runs), 1 if errors else 0


def compare(arguments: list[str]) -> int:
    parser = _runs_parser("compare", "RUN RUN [RUN ...] [--to 0.93] [--price 3.06] [--out DIR]", _COMPARE)
    _add_comparison(parser)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write comparison.md, .json, .csv and charts to this folder"
    )
    options = parser.parse_args(arguments)
    from paceline.api.runs import compare as compared

    if len(options.runs) < 2:
        raise UserError("too-few-runs", "compare needs two runs or more. For one run, use `paceline doctor RUN`.")
    runs, status = _read(options.runs, relative=True)
    if len(runs) < 2 and not status:
        message = f"compare needs two runs or more, but only {runs[0].origin} is a run. Add another run folder or log."
        raise UserError("too-few-runs", message, path=runs[0].origin)
    comparison = compared(*runs, to=options.to, price=options.price)
    _show(comparison)
    if options.out:
        say(", ".join(map(str, comparison.write(options.out))))
    return status


def _show(comparison: "Comparison") -> None:
    from paceline.analysis.details.paired_text import head, sentences
    from paceline.analysis.details.paired_text import table as changed_classes
    from paceline.analysis.tables import listing, page_table
    from paceline.system.tables import fits, output, show

    screen = output()
    if len(comparison.runs) > 1:
        screen.print(comparison.summary, style="bold", soft_wrap=True)
        for line in listing(comparison.fairness):
            screen.print(f"  {line}", soft_wrap=True)
    labels, *columns = zip(*page_table(comparison), strict=True)
    tables = [_table([labels, *columns])]
    if not fits(tables[0], screen):
        tables = [_table([labels, *some], folded=True) for some in _fitting(labels, columns, screen.width)]
    for table in tables:
        print()
        show(table, screen)
    print()
    for run in comparison.runs:
        for note in run.notes:
            if note == run.disturbance and len(comparison.runs) > 1:
                continue  # the summary has it
            screen.print(f"{run.name}: {note}", soft_wrap=True)
    _show_groups(comparison, screen)
    for number, pair in enumerate(comparison.paired):
        if number:
            print()
        for line in sentences(pair):
            screen.print(line, soft_wrap=True)
        if rows := changed_classes(pair):
            print()
            show(_table([*zip(head(pair), *rows, strict=True)]), screen)


def _show_groups(comparison: "Comparison", screen: "Screen") -> None:
    """Print the statistics of groups of seeds."""
    from paceline.analysis.groups_text import group_tables, sentences
    from paceline.system.tables import new_table, show

    for head, rows in group_tables(comparison.grouped):
        show(new_table(head, rows), screen)
        print()
    for line in sentences(comparison.grouped):
        screen.print(line, soft_wrap=True)


def _table(columns: Sequence[Sequence[str]], folded: bool = False) -> "Table":
    from paceline.system.tables import new_table

    heads, *rows = zip(*columns, strict=True)
    table = new_table(heads, rows)
    for column in table.columns[1:]:
        column.justify = "right"
    if folded:
        table.columns[0].max_width = _label_width(columns[0])
        for column, (head, *cells) in zip(table.columns[1:], columns[1:], strict=True):
            column.max_width = _width(head, cells)
    return table


_LONG_NAME, _LONG_LABEL = 22, 26
"""Longer headers and labels are folded."""


def _label_width(labels: Sequence[str]) -> int:
    return min(max(map(len, labels)), _LONG_LABEL)


def _width(head: str, cells: Sequence[str]) -> int:
    """Return the width of a column: headers fold between words, cells do not fold."""
    words = [min(len(word), _LONG_NAME) for word in head.split()]
    return max(*words, *map(len, cells))


def _fitting(labels: Sequence[str], columns: Sequence[Sequence[str]], width: int) -> Iterator[list[Sequence[str]]]:
    """Yield groups of columns that fit the terminal; each group becomes a table."""
    room = width - _label_width(labels)
    left, some = room, list[Sequence[str]]()
    for column in columns:
        needed = _width(column[0], column[1:]) + 2
        if some and needed > left:
            yield some
            left, some = room, []
        some.append(column)
        left -= needed
    yield some


def doctor_of_runs(paths: Sequence[Path]) -> int:
    """Print the bottlenecks of runs, for `paceline doctor RUN`; return the exit status."""
    runs, status = _read(paths)
    for run in runs:
        if len(runs) > 1:
            say(f"{run.name}:")
        for line in [*run.notes, *run.bottlenecks]:
            say(f"- {line}")
    return status


def logbook(arguments: list[str]) -> int:
    parser = _runs_parser("logbook", "RUN [RUN ...] [--out logbook]", _LOGBOOK)
    parser.add_argument("--out", type=Path, default=Path("logbook"), metavar="DIR", help="default: logbook")
    options = parser.parse_args(arguments)
    from paceline.api.runs import logbook as write

    runs, status = _read(options.runs)
    for path in write(runs, options.out):
        say(str(path))
    return status


def report(arguments: list[str]) -> int:
    parser = _runs_parser("report", "RUN [RUN ...] [--out report.html]", _REPORT)
    _add_comparison(parser)
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    parser.add_argument("--title", default="", help="default: the names of the runs")
    options = parser.parse_args(arguments)
    from paceline.analysis.sweeps.record import is_sweep

    if len(options.runs) == 1 and is_sweep(options.runs[0]):
        return _report_sweep(options)
    from paceline.api.runs import report as write

    runs, status = _read(options.runs)
    write(runs, options.out, to=options.to, price=options.price, title=options.title)
    say(f"{options.out} ({options.out.stat().st_size / 1e6:.2f} MB)")
    return status


def _report_sweep(options: argparse.Namespace) -> int:
    """Write the page of a sweep."""
    from paceline.api.sweeping import Sweep

    for name in ("to", "price", "title"):
        if getattr(options, name):
            message = f"--{name} applies to reports about runs, but {options.runs[0]} is a sweep. Omit it."
            raise UserError("option-not-applicable", message, option=f"--{name}")
    path = Sweep(options.runs[0]).report(options.out)
    say(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0
