"""The command runs: list the run folders in a folder, one per line."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import make_parser
from paceline.errors import UserError
from paceline.system.files import say
from paceline.system.tables import print_list

if TYPE_CHECKING:
    from paceline.analysis.overview import RunRow

_RUNS = """List run folders, newest last: status, progress, best top-1 and its epoch, training time, model, data, start.

A narrow terminal shows fewer columns. The status is finished, running, starting, interrupted (stopped by the user),
failed or killed (the process ended without recording a status)."""

_DROPPED_FIRST = ("data", "started", "model", "time", "progress")


def runs(arguments: list[str]) -> int:
    parser = make_parser("runs", "[DIR] [--json]", _RUNS)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=None, metavar="DIR", help="folder with run folders (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print all fields as JSON")
    parser.add_argument("-h", "--help", action="help", help="show this help")
    options = parser.parse_args(arguments)
    folder = options.folder or Path("runs")
    from paceline.api.runs import list_runs

    found = list_runs(folder) if options.folder or folder.is_dir() else []
    if options.json:
        print(json.dumps([asdict(row) for row in found], indent=1))
    elif not found:
        say(
            f"no runs in {folder}. Start one with `paceline train digits`, or give another folder: `paceline runs DIR`."
        )
    else:
        heads = ("name", "status", "progress", "best top-1", "time", "model", "data", "started")
        print_list(heads, [_cells(row) for row in found], _DROPPED_FIRST)
    if not options.json and folder.is_dir():
        _list_sweeps(folder)
    return 0


def _list_sweeps(folder: Path) -> None:
    """Print a line for each sweep in a folder."""
    from paceline.analysis.sweeps.record import is_sweep, read_sweep
    from paceline.analysis.sweeps.text import summary_line

    for path in sorted(filter(is_sweep, folder.iterdir())):
        try:
            say(f"sweep {summary_line(read_sweep(path))}; its runs: paceline runs {path}")
        except UserError as error:
            say(f"sweep {path.name}: {error.report}")


def _cells(row: "RunRow") -> list[str]:
    from paceline.analysis.tables import duration

    place = "" if row.best_epoch is None else f" (epoch {row.best_epoch:.4g})"
    best = "-" if row.best_top1 is None else f"{row.best_top1:.2%}{place}"
    what = [row.model or "?", row.data or "?"]
    return [row.name, row.status, _progress(row), best, duration(row.seconds) or "-", *what, _when(row.started)]


def _when(started: str) -> str:
    try:
        return datetime.fromisoformat(started).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError):
        return started


def _progress(row: "RunRow") -> str:
    """Return the progress in the recipe's unit."""
    if row.stop_reason:
        return f"{row.step:,} steps, stopped early"
    if row.duration and row.duration.endswith("ep"):
        return f"{row.epoch:.1f}".removesuffix(".0") + f"/{row.duration.removesuffix('ep')} epochs"
    return f"{row.step:,}/{row.total_steps:,} steps" if row.total_steps else f"{row.step:,} steps"
