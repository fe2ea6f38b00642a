"""Read a run folder into a LoggedRun; corrupt or missing parts are left out and noted."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from paceline.analysis.run import CODE_OF, LoggedRun
from paceline.config import yamls
from paceline.config.import_files import changed_files
from paceline.config.io import leaves
from paceline.system.files import printable, printable_tree
from paceline.track.checks import RecipeFile, is_valid
from paceline.track.records import RunFolder

_PER_RANK_RECORDS = 2000
_SHORT_HASH = 12  # digits


def read_folder(path: Path) -> LoggedRun:
    """Return the run in a folder that has a recipe.yaml."""
    folder = RunFolder(path)
    name = printable(path.resolve().name)
    starts, summary = printable_tree(folder.read_starts()), printable_tree(folder.read_summary())
    run = LoggedRun(name, path, starts=starts, summary=summary, folder=folder)
    run.notes += (f"not read: {reason}" for reason in folder.unreadable())
    run.notes += run.details[1]
    run.recipe = _recipe(folder, run.notes)
    run.records = folder.records(_PER_RANK_RECORDS)
    run.status = run.summary.get("status", "unknown")
    if run.status == "running" and not folder.in_use:
        run.status = "killed"
    for file, content in (("environment.json", run.starts), ("summary.json", run.summary)):
        if not content:
            run.notes.append(f"{file} is missing or corrupt: its values are unknown")
    run.notes += _early_end(run)
    for problem in (*_missing_steps(run, folder), *_changed_between_starts(run)):
        run.complete = False
        run.notes.append(problem)
    if not run.evaluated:
        run.notes.append("no evaluation was recorded")
    if not any(run.telemetry.values()):
        run.notes.append("no telemetry: device utilization is unknown")
    if run.disturbance:
        run.notes.append(run.disturbance)
    run.facts = _facts(run)
    return run


def _recipe(folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    try:
        recipe = printable_tree(yamls.read(folder.recipe, folder.path, fast=True))
    except (OSError, yaml.YAMLError):
        recipe = None
    if recipe and is_valid(recipe, RecipeFile):
        if folder.recipe_is_unchanged is False:
            notes.append("recipe.yaml was changed after the run started: its values may be wrong")
        return dict(recipe)
    notes.append("recipe.yaml is corrupt: model, data and hyperparameters are unknown")
    return {}


_PARTIAL = {
    "killed": "was killed, or its host failed; figures end at its last record",
    "running": "is still running",
    "interrupted": "was stopped",
    "failed": "failed",
}


def _early_end(run: LoggedRun) -> Iterator[str]:
    if run.status in _PARTIAL:
        reason = f" ({run.summary['message']})" if run.summary.get("message") else ""
        yield f"partial: the run {_PARTIAL[run.status]}{reason}"
    elif "stop_reason" in run.summary:
        by, epoch = run.summary.get("stopped_by", "a callback"), run.summary.get("epoch")
        at = f" at epoch {epoch:.4g}" if isinstance(epoch, int | float) else ""
        yield f"stopped early{at} by {by}: {run.summary['stop_reason']}"


def _missing_steps(run: LoggedRun, folder: RunFolder) -> Iterator[str]:
    if corrupt := folder.num_corrupt:
        yield f"{corrupt} corrupt line{'s were' if corrupt > 1 else ' was'} left out of metrics.jsonl"
    if folder.cut_off and run.status == "finished":
        yield "partial: metrics.jsonl ends in the middle of a line"
    if not run.trained:
        yield "no training step was recorded"
        return
    recorded, last = sum(record["steps"] for record in run.trained), run.trained[-1]["step"]
    if recorded != last:
        yield f"partial: metrics.jsonl records {recorded} steps but ends at step {last}: records are missing"
    total = run.summary.get("total_steps", last)
    if run.status == "finished" and last != total:
        yield f"partial: the run finished at step {total}, but metrics.jsonl ends at step {last}"


_CONSTANT_IN_A_RUN = {
    "ranks": "number of ranks", "recipe": "recipe", "precision": "precision", "data": "data",
    "packages.paceline": "paceline version", "packages.torch": "torch version", "hardware.cpu": "CPU",
    "hardware.gpu": "GPU", "hardware.threads_per_process": "number of threads",
}  # fmt: skip


def _changed_between_starts(run: LoggedRun) -> Iterator[str]:
    """Yield what changed when the run was resumed: its times are then not those of one experiment."""
    first = max((number for number, start in enumerate(run.starts) if not start.get("first_step")), default=0)
    recorded = [start["import_files"] for start in run.starts[first:] if "import_files" in start]
    for before, after in pairwise(recorded):
        if changed := changed_files(before, after):
            yield f"resumed with changed code of imported modules: {changed}"
    starts = [dict(leaves(start)) for start in run.starts[first:]]
    for key, name in _CONSTANT_IN_A_RUN.items():
        values = list(dict.fromkeys(str(start[key]) for start in starts if key in start))
        if len(values) > 1:
            yield f"resumed with a different {name}: {', then '.join(values)}"


_NOT_THE_EXPERIMENT = re.compile(r"(name|about|log|checkpoint|curve|device|data\.(path|max_corrupt))(\.|$)")


def experiment_fields(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that identify the experiment, by dotted name."""
    return {key: value for key, value in leaves(recipe) if not _NOT_THE_EXPERIMENT.match(key)}


def _facts(run: LoggedRun) -> dict[str, Any]:
    """Return what identifies the experiment: the recipe's fields, data, code and hardware, by name."""
    facts = experiment_fields(run.recipe)
    last = run.starts[-1] if run.starts else {}
    packages, hardware = last.get("packages", {}), last.get("hardware", {})
    facts |= {
        "precision": last.get("precision"),
        "data": last.get("data"),
        "code": packages.get("paceline"),
        "commit": last.get("code", {}).get("commit"),
        "torch": packages.get("torch"),
        "hardware": hardware.get("gpu") or hardware.get("cpu"),
        "threads per rank": hardware.get("threads_per_process") if hardware.get("device") == "cpu" else None,
    }
    for module, source in last.get("imports", {}).items():  # the hash is that of the whole package
        facts[f"{CODE_OF} {module.partition('.')[0]}"] = source.get("sha256", "")[:_SHORT_HASH] or None
    return {key: value for key, value in facts.items() if value is not None}
