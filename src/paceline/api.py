"""Paceline from Python and notebooks: a few functions whose results show themselves as tables and charts.

import paceline

run = paceline.train("digits", procs=2)           # a run folder, made by the ordinary command in processes of its own
paceline.compare("runs/one", run)                 # fair or not, speed-up, accuracy
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
from paceline.logbook import read as _reading
from paceline.logbook.curves import charts_of
from paceline.logbook.tables import markdown
from paceline.logbook.verdict import verdict
from paceline.system.lifetime import tied

# ranks of a launcher, and colors that notebooks ask for: progress bars would flood a cell
_NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


class Run(_reading.Run):
    """A run folder, or another program's log."""

    def __init__(self, path: "str | Path | Run"):
        vars(self).update(vars(path if isinstance(path, Run) else _reading.read(Path(path))))

    def __repr__(self) -> str:
        return f"Run({str(self.origin)!r}: {self.status}, {verdict(self)[0].text})"

    def _repr_html_(self) -> str:
        return _html(_comparing.compare([self]), f"<p>{escape(verdict(self)[0].text)}</p>")


class Comparison(_comparing.Comparison):
    def __repr__(self) -> str:
        return markdown(self)

    def _repr_html_(self) -> str:
        return _html(self, f"<p>{page.fairness_html(self)}</p>")


def _html(comparison: _comparing.Comparison, head: str) -> str:
    drawn = [svg for _, chart in charts_of(comparison.runs) if (svg := charts.svg(chart))]
    figures = "".join(f'<div style="width:420px">{svg}</div>' for svg in drawn)
    notes = "".join(f"<li>{escape(run.name)}: {escape(note)}</li>" for run in comparison.runs for note in run.notes)
    side_by_side = f'<div style="display:flex;flex-wrap:wrap;gap:8px">{figures}</div>'
    return f"{head}{page.table_html(comparison)}<ul>{notes}</ul>{side_by_side}"


def load_recipe(source: "str | Path", **overrides: Any) -> Recipe:
    """A shipped recipe or a YAML file; fields with dots are written with two underscores: optim__lr=0.1."""
    return _load(str(source), _words(overrides))


def train(
    recipe: "str | Path | Recipe", procs: int = 1, runs: "str | Path" = "runs", name: str = "", **overrides: Any
) -> Run:
    """Train in processes of their own, as `paceline train` does, and show its lines; the run."""
    if isinstance(recipe, Recipe):
        with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
            path = Path(folder) / "recipe.yaml"
            path.write_text(dump_recipe(recipe), encoding="utf-8")
            return train(path, procs, runs, name or recipe.name, **overrides)
    name = name or load_recipe(recipe, **overrides).name
    words = ["train", str(recipe), "--procs", str(procs), "--runs", str(runs), "--name", name, *_words(overrides)]
    # what a notebook's own kernel was started with must not make ranks of it
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
    with subprocess.Popen(
        [sys.executable, "-m", "paceline", *words], stderr=subprocess.PIPE, text=True, env=tied(environment)
    ) as process:
        assert process.stderr
        lines = []
        for line in process.stderr:
            lines.append(line.rstrip())
            print(line, end="", flush=True)
    if process.returncode:
        raise UserError(lines[-1].removeprefix("paceline: ") if lines else f"it ended with status {process.returncode}")
    # a finished run of that name was left alone, and this one got a number: it says which
    told = [match[1] for match in (re.search(r"finished: .*images/s; (.+)$", line) for line in lines) if match]
    if not told:
        raise UserError("it ended well, but did not say where its run folder is; see the lines above")
    return Run(told[-1])


def compare(*runs: "str | Path | Run", to: "str | float | None" = None, price: float | None = None) -> Comparison:
    """Side by side, in relation to the first; `to`: an accuracy (0.93 or "93%"), `price`: of a host for an hour."""
    if not runs:
        raise UserError("compare needs runs: compare('runs/one', 'runs/two')")
    if price is not None and not (isinstance(price, int | float) and price > 0):
        raise UserError(f"price={price!r} is no price of a host for an hour; write e.g. 3.06")
    target = None if to is None else _comparing.share(to)
    found = _comparing.compare(_reading.named_apart([Run(run) for run in runs]), target, price)
    return Comparison(**vars(found))


def _words(overrides: dict[str, Any]) -> list[str]:
    def text(value: Any) -> str:
        return "null" if value is None else str(value)

    return [word for key, value in overrides.items() for word in (f"--{key.replace('__', '.')}", text(value))]
