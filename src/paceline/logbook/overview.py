"""Many runs at a glance. Finished ones are read from their summaries alone, so that hundreds take a moment."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from paceline.config import yamls
from paceline.logbook.live import standing
from paceline.system.files import printable
from paceline.system.untrusted import is_plain
from paceline.track.records import RunFolder, split_seconds

_LARGEST = 1e15


@dataclass(frozen=True)
class Row:
    """What a list of runs tells of one."""

    name: str
    path: str
    status: str
    """finished, running, starting, interrupted (stopped by its user), failed, or killed."""
    model: str | None
    data: str | None
    duration: str | None
    """As the recipe has it: 20ep."""
    step: int
    total_steps: int | None
    epoch: float
    best_top1: float | None
    best_epoch: float | None
    seconds: float | None
    """Of training."""
    started: str
    """When it was first started, in ISO 8601."""


def overview(folder: Path) -> list[Row]:
    """The runs in a folder, or the one that it is, oldest first; other folders are passed over."""
    candidates = [folder] if _is_run(folder) else filter(_is_run, folder.iterdir())
    return sorted(map(_row, candidates), key=lambda row: (row.started, row.name))


def _is_run(path: Path) -> bool:
    """A recipe alone is not a run yet."""
    run = RunFolder(path)
    return run.exists and any(file.exists() for file in (run.environment, run.summary, run.metrics))


def _row(path: Path) -> Row:
    run = RunFolder(path)
    summary, recipe = run.read_summary(), _recipe(run)
    train = recipe.get("train", {})
    figures = summary if "train_seconds" in summary else _added_up(run, recipe) | summary
    best = figures.get("best")
    best = best if isinstance(best, dict) else {}
    return Row(
        name=printable(path.resolve().name),
        path=str(path),
        status=standing(run, summary),
        model=_text(recipe.get("model", {}).get("name")),
        data=_text(recipe.get("data", {}).get("name")),
        duration=_text(train.get("duration")),
        step=int(_number(figures.get("step")) or 0),
        total_steps=figures.get("total_steps"),
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
    sound = isinstance(tree, dict) and is_plain(tree) and run.recipe_is_as_written is not False
    return {key: value for key, value in tree.items() if isinstance(value, dict)} if sound else {}


def _added_up(run: RunFolder, recipe: dict[str, Any]) -> dict[str, Any]:
    """Of a run that has not ended, or was killed: its summary does not have these yet."""
    records = run.records(per_rank=1)
    trained = [record for record in records if record["kind"] == "train"]
    sound = [record for record in records if record["kind"] == "eval" and None not in (record["top1"], record["loss"])]
    by_loss = recipe.get("checkpoint", {}).get("best") == "loss"
    best = max(sound, key=lambda own: -own["loss"] if by_loss else own["top1"], default=None)
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
        began = datetime.fromisoformat(starts[0]["started"]).astimezone(UTC)
    except (IndexError, KeyError, ValueError, OverflowError):
        try:
            began = datetime.fromtimestamp(run.recipe.stat().st_mtime, UTC)
        except (OSError, ValueError, OverflowError):
            return ""
    return began.isoformat(timespec="seconds")


def _text(value: Any) -> str | None:
    return None if value is None else printable(str(value))


def _number(value: Any) -> float | None:
    """Of a file that somebody else may have written."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= _LARGEST else None
