"""The Python API, also for notebooks, where results are displayed as tables and charts.

import paceline

run = paceline.train("digits", procs=2)           # trains in separate processes, as `paceline train` does
paceline.compare("runs/one", run)                 # comparability, speed-up, accuracy
paceline.Run("runs/one").curve("top1")            # points of a curve
"""

import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from paceline.config.io import dump_recipe
from paceline.config.io import load_recipe as _load
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.logbook import charts, page
from paceline.logbook import compare as _comparing
from paceline.logbook.curves import charts_of
from paceline.logbook.read import read as _read
from paceline.logbook.run import LoggedRun, named_apart
from paceline.logbook.tables import markdown
from paceline.logbook.verdict import verdict
from paceline.system.lifetime import child_env

# variables of a launcher, and colors that notebooks enable: progress bars would flood a cell
_NOT_INHERITED = ("RANK", "WORLD_SIZE", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class Run(LoggedRun):
    """A run folder, or the log of another program."""

    def __init__(self, path: "str | Path | Run"):
        vars(self).update(vars(path if isinstance(path, Run) else _read(Path(path))))

    def __repr__(self) -> str:
        return f"Run({str(self.origin)!r}: {self.status}, {verdict(self)[0].text})"

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


def load_recipe(source: "str | Path", **overrides: Any) -> Recipe:
    """The recipe of a shipped name or a YAML file. In keyword overrides `__` stands for a dot: optim__lr=0.1."""
    return _load(str(source), _words(overrides))


def train(
    recipe: "str | Path | Recipe", procs: int = 1, runs: "str | Path" = "runs", name: str = "", **overrides: Any
) -> Run:
    """Train in separate processes, as `paceline train` does, and print their output; returns the run."""
    if isinstance(recipe, Recipe):
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            path = Path(folder) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            return train(path, procs, runs, name or recipe.name, **overrides)
    name = name or load_recipe(recipe, **overrides).name
    words = ["train", str(recipe), "--procs", str(procs), "--runs", str(runs), "--name", name, *_words(overrides)]
    # a notebook kernel may itself have been started by a launcher, whose variables must not apply here
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], stderr=subprocess.PIPE, text=True, env=child_env(environment)
    ) as process:
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            print(line, end="", flush=True)
    if process.returncode:
        raise _error(lines, process.returncode)
    # the folder is numbered if a finished run of that name exists; the last line names it
    folders = [match[1] for match in (re.search(r"finished: .*images/s; (.+)$", line) for line in lines) if match]
    if not folders:
        raise UserError("run-folder-unknown", "training finished, but its output does not name the run folder.")
    return Run(folders[-1])


def _error(lines: list[str], status: int) -> UserError:
    """The error that a training printed last, with its code."""
    if not lines:
        return UserError("training-failed", f"training ended with exit status {status}.", status=status)
    last = lines[-1].removeprefix("paceline: ").removeprefix("error: ").strip()
    if match := re.fullmatch(r"(.*) \[([a-z0-9-]+)\]", last):
        return UserError(match[2], match[1], status=status)
    return UserError("training-failed", last, status=status)


def compare(*runs: "str | Path | Run", to: "str | float | None" = None, price: float | None = None) -> Comparison:
    """Runs side by side, relative to the first; `to`: target accuracy (0.93 or "93%"), `price`: per host and hour."""
    if not runs:
        raise UserError("missing-run", "no run is given. Write compare('runs/one', 'runs/two').")
    if price is not None and not (isinstance(price, int | float) and price > 0):
        raise UserError(
            "invalid-price", f"price={price!r} is not a price per host and hour. Write e.g. 3.06.", price=price
        )
    target = None if to is None else _comparing.parse_accuracy(to)
    found = _comparing.compare(named_apart([Run(run) for run in runs]), target, price)
    return Comparison(**vars(found))


def _words(overrides: dict[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        return "null" if value is None else str(value)

    return [word for key, value in overrides.items() for word in (f"--{key.replace('__', '.')}", text(value))]
