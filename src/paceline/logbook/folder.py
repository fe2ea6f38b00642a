"""From a run folder to a Run: what is corrupt or missing is left out and said."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.config import yamls
from paceline.config.io import leaves
from paceline.logbook.read import Run
from paceline.system.files import printable, printable_tree
from paceline.track.checks import Recipe, is_sound
from paceline.track.records import RunFolder

_PER_RANK_RECORDS = 2000


def read_folder(path: Path) -> Run:
    folder = RunFolder(path)
    name = printable(path.resolve().name)
    starts, summary = printable_tree(folder.read_starts()), printable_tree(folder.read_summary())
    run = Run(name, path, starts=starts, summary=summary, folder=folder)
    run.notes += (f"not read: {reason}" for reason in folder.refused())
    run.recipe = _recipe(folder, run.notes)
    run.records = folder.records(_PER_RANK_RECORDS)
    run.status = run.summary.get("status", "unknown")
    if run.status == "running" and not folder.in_use:
        run.status = "killed"
    for file, found in (("environment.json", run.starts), ("summary.json", run.summary)):
        if not found:
            run.notes.append(f"{file} is missing or corrupt: what it tells is unknown")
    run.notes += _partial(run)
    for lacking in (*_missing_steps(run, folder), *_changed_on_the_way(run)):
        run.complete = False
        run.notes.append(lacking)
    if not run.evaluated:
        run.notes.append("no evaluation was recorded")
    if not any(run.telemetry.values()):
        run.notes.append("no telemetry: use of devices is unknown")
    if run.disturbance:
        run.notes.append(run.disturbance)
    run.facts = _facts(run)
    return run


def _recipe(folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    try:
        recipe = printable_tree(yamls.read(folder.recipe, folder.path, fast=True))
    except (OSError, yaml.YAMLError):
        recipe = None
    if recipe and is_sound(recipe, Recipe):
        if folder.recipe_is_as_written is False:
            notes.append("recipe.yaml was changed after the run was started: what it tells may be wrong")
        return dict(recipe)
    notes.append("recipe.yaml is corrupt: what was trained is unknown")
    return {}


_PARTIAL = {
    "killed": "was killed, or its machine was lost; figures end at its last record",
    "running": "is still going on",
    "interrupted": "was stopped",
    "failed": "failed",
}


def _partial(run: Run) -> Iterator[str]:
    if run.status in _PARTIAL:
        reason = f" ({run.summary['message']})" if run.summary.get("message") else ""
        yield f"partial: the run {_PARTIAL[run.status]}{reason}"


def _missing_steps(run: Run, folder: RunFolder) -> Iterator[str]:
    if corrupt := folder.num_corrupt:
        yield f"{corrupt} corrupt line{'s were' if corrupt > 1 else ' was'} left out of metrics.jsonl"
    if folder.cut_off and run.status == "finished":
        yield "partial: metrics.jsonl ends within a line"
    if not run.trained:
        yield "no training step was recorded"
        return
    recorded, last = sum(record["steps"] for record in run.trained), run.trained[-1]["step"]
    if recorded != last:
        yield f"partial: metrics.jsonl tells of {recorded} steps, and ends at step {last}: records are missing"
    whole = run.summary.get("total_steps", last)
    if run.status == "finished" and last != whole:
        yield f"partial: the run finished with step {whole}, but metrics.jsonl ends at step {last}"


_OF_A_START = {
    "ranks": "number of ranks", "recipe": "recipe", "precision": "precision", "data": "data",
    "packages.paceline": "version of the code", "packages.torch": "torch", "hardware.cpu": "processor",
    "hardware.gpu": "GPU", "hardware.threads_per_process": "threads",
}  # fmt: skip


def _changed_on_the_way(run: Run) -> Iterator[str]:
    """A run that was resumed as something else is not one experiment from end to end."""
    begun = max((number for number, start in enumerate(run.starts) if not start.get("first_step")), default=0)
    starts = [dict(leaves(start)) for start in run.starts[begun:]]
    for key, name in _OF_A_START.items():
        values = list(dict.fromkeys(str(start[key]) for start in starts if key in start))
        if len(values) > 1:
            yield f"resumed with another {name}: {', then '.join(values)}"


_NOT_THE_EXPERIMENT = re.compile(r"(name|about|log|checkpoint|curve|device|data\.(path|threads|max_corrupt))(\.|$)")


def _facts(run: Run) -> dict[str, Any]:
    """The recipe's fields, data and code, by name."""
    found = {key: value for key, value in leaves(run.recipe) if not _NOT_THE_EXPERIMENT.match(key)}
    last = run.starts[-1] if run.starts else {}
    packages, hardware = last.get("packages", {}), last.get("hardware", {})
    found |= {
        "precision": last.get("precision"),
        "data": last.get("data"),
        "code": packages.get("paceline"),
        "commit": last.get("code", {}).get("commit"),
        "torch": packages.get("torch"),
        "hardware": hardware.get("gpu") or hardware.get("cpu"),
        "threads of a rank": hardware.get("threads_per_process") if hardware.get("device") == "cpu" else None,
        "data.decode_threads": run.recipe.get("data", {}).get("threads"),
    }
    return {key: value for key, value in found.items() if value is not None}
