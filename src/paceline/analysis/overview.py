"""List many runs quickly: finished ones are read from their summaries alone."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from paceline.analysis.live import current_status
from paceline.analysis.settings import data_name
from paceline.config import yamls
from paceline.system.files import printable
from paceline.system.untrusted import is_plain
from paceline.track.records import RunFolder, split_seconds

_MAX_VALUE = 1e15


@dataclass(frozen=True)
class RunRow:
    """A run in the list."""

    name: str
    path: str
    status: str
    """finished, running, starting, interrupted (stopped by the user), failed or killed."""
    model: str | None
    data: str | None
    duration: str | None
    """As in the recipe, e.g. 20ep."""
    step: int
    total_steps: int | None
    stop_reason: str | None
    """Why a callback ended the run early."""
    epoch: float
    best_top1: float | None
    best_epoch: float | None
    seconds: float | None
    """Training time."""
    started: str
    """Time of the first start, in ISO 8601."""


def overview(folder: Path) -> list[RunRow]:
    """Return the runs in a folder, or the run that the folder itself is, oldest first."""
    candidates = [folder] if _is_run(folder) else filter(_is_run, folder.iterdir())
    return sorted(map(_row, candidates), key=lambda row: (row.started, row.name))


def _is_run(path: Path) -> bool:
    """Return whether the folder holds more of a run than its recipe."""
    run = RunFolder(path)
    return run.exists and any(file.exists() for file in (run.environment, run.summary, run.metrics))


def _row(path: Path) -> RunRow:
    run = RunFolder(path)
    summary, recipe = run.read_summary(), _recipe(run)
    train = recipe.get("train", {})
    figures = summary if "train_seconds" in summary else _from_records(run, recipe) | summary
    best = figures.get("best")
    best = best if isinstance(best, dict) else {}
    return RunRow(
        name=printable(path.resolve().name),
        path=str(path),
        status=current_status(run, summary),
        model=_text(recipe.get("model", {}).get("name")),
        data=_text(data_name(summary, recipe.get("data", {}))),
        duration=_text(train.get("duration")),
        step=int(_number(figures.get("step")) or 0),
        total_steps=figures.get("total_steps"),
        stop_reason=_text(summary.get("stop_reason")),
        epoch=_number(figures.get("epoch")) or 0.0,
        best_top1=_number(best.get("top1")),
        best_epoch=_number(best.get("epoch")),
        seconds=_number(figures.get("train_seconds")),
        started=_started(run),
    )


def _recipe(run: RunFolder) -> dict[str, Any]:
    try:
        tree = yamls.read(run.recipe, run.path, fast=True)
    except (OSError, yaml.YAMLError):
        return {}
    valid = isinstance(tree, dict) and is_plain(tree) and run.recipe_is_unchanged is not False
    return {key: value for key, value in tree.items() if isinstance(value, dict)} if valid else {}


def _from_records(run: RunFolder, recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that the summary of an unfinished run lacks."""
    records = run.records(per_rank=1)
    trained = [record for record in records if record["kind"] == "train"]
    valid = [record for record in records if record["kind"] == "eval" and None not in (record["top1"], record["loss"])]
    by_loss = recipe.get("checkpoint", {}).get("best") == "loss"
    best = max(valid, key=lambda record: -record["loss"] if by_loss else record["top1"], default=None)
    last = trained[-1] if trained else {}
    return {
        "step": last.get("step"),
        "epoch": last.get("epoch"),
        "best": best,
        "train_seconds": sum(split_seconds(trained).values()) if trained else None,
    }


def _started(run: RunFolder) -> str:
    starts = run.read_starts()
    try:
        started = datetime.fromisoformat(starts[0]["started"]).astimezone(UTC)
    except (IndexError, KeyError, ValueError, OverflowError):
        try:
            started = datetime.fromtimestamp(run.recipe.stat().st_mtime, UTC)
        except (OSError, ValueError, OverflowError):
            return ""
    return started.isoformat(timespec="seconds")


def _text(value: Any) -> str | None:
    return None if value is None else printable(str(value))


def _number(value: Any) -> float | None:
    """Return a plausible number from an untrusted file, else None."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= _MAX_VALUE else None
