"""From a run folder to a Run: every record is checked once, what is damaged is left out and said."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Required

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from paceline.config.io import leaves
from paceline.logbook.read import Run
from paceline.track.records import RunFolder, json_lines

_PER_RANK_RECORDS = 2000

Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class _Place(TypedDict, total=False):
    step: Required[Count]
    epoch: Finite
    phase: Count


class _Train(_Place, total=False):
    steps: Required[Annotated[int, Field(ge=1)]]
    images: Count
    seconds: dict[str, Finite]
    seconds_per_rank: dict[str, list[Finite]]
    memory_per_rank: list[Count]
    images_per_second: Finite
    top1: Finite
    lr: Finite
    loss: Finite | None


class _Eval(_Place, total=False):
    top1: Finite | None
    top5: Finite | None
    loss: Finite | None
    samples: Count
    seconds: Seconds


class _Save(_Place, total=False):
    seconds: Seconds


class _Start(TypedDict, total=False):
    ranks: Annotated[int, Field(ge=1)]
    host_of_rank: list[str]
    hardware: dict[str, Any]
    packages: dict[str, str]
    code: dict[str, Any]
    largest_batch: dict[str, Any] | None
    command: list[str]


class _Summary(TypedDict, total=False):
    status: str
    message: str
    global_batch: Count
    parameters: Count
    total_steps: Count


class _Recipe(TypedDict, total=False):
    name: str
    about: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    train: dict[str, Any]
    evaluate: dict[str, Any]
    checkpoint: dict[str, Any]
    exchange: dict[str, Any]


class _Gpu(TypedDict, total=False):
    use_percent: Finite | None
    memory_bytes: Count | None
    watts: Finite | None
    celsius: Finite | None


class _Sample(TypedDict, total=False):
    time: Required[Finite]
    cpu_percent: Required[Finite]
    memory_bytes: Required[Count]
    gpus: list[_Gpu]


_RECORDS = {"train": _Train, "eval": _Eval, "save": _Save, "resume": _Place}
_CHECKS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (*_RECORDS.values(), _Start, _Summary, _Recipe, _Sample)
}


def _sound(value: object, kind: type) -> bool:
    try:
        _CHECKS[kind].validate_python(value)
    except (ValidationError, RecursionError):
        return False
    return True


def sound_records(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] in _RECORDS and _sound(record, _RECORDS[record["kind"]])]


def sound_starts(folder: RunFolder) -> list[dict[str, Any]]:
    return [start for start in folder.read_starts() if _sound(start, _Start)]


def sound_summary(folder: RunFolder) -> dict[str, Any]:
    summary = folder.read_summary()
    return summary if _sound(summary, _Summary) else {}


def sound_samples(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return [line for line in json_lines(lines) if line.get("kind") == "sample" and _sound(line, _Sample)]


def read_folder(path: Path) -> Run:
    folder = RunFolder(path)
    run = Run(path.resolve().name, path, starts=sound_starts(folder), summary=sound_summary(folder))
    run.recipe = _recipe(folder, run.notes)
    read = list(folder.records(_PER_RANK_RECORDS))
    run.records = sound_records(read)
    if damaged := len(read) - len(run.records):
        run.notes.append(f"{damaged} damaged records of metrics.jsonl were left out")
    for name, found in (("environment.json", run.starts), ("summary.json", run.summary)):
        if not found:
            run.notes.append(f"{name} is missing or damaged: what it tells is unknown")
    samples = {file.stem: sound_samples(file.read_bytes().splitlines()) for file in folder.telemetry.glob("*.jsonl")}
    run.telemetry = dict(sorted(samples.items()))
    run.status = run.summary.get("status", "unknown")
    run.facts = _facts(run)
    if run.status == "running" and not folder.in_use:
        run.status = "killed"
    run.notes += _how_whole(run)
    return run


def _recipe(folder: RunFolder, notes: list[str]) -> dict[str, Any]:
    try:
        recipe = yaml.safe_load(folder.recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        recipe = None
    if isinstance(recipe, dict) and recipe and _sound(recipe, _Recipe):
        return recipe
    notes.append("recipe.yaml is damaged: what was trained is unknown")
    return {}


_PARTIAL = {
    "killed": "was killed, or its machine was lost; figures end at its last record",
    "running": "is still going on",
    "interrupted": "was stopped",
    "failed": "failed",
}


def _how_whole(run: Run) -> list[str]:
    """What of the run is missing; sets `complete`."""
    notes = []
    if run.status in _PARTIAL:
        reason = f" ({run.summary['message']})" if run.summary.get("message") else ""
        notes.append(f"partial: the run {_PARTIAL[run.status]}{reason}")
    recorded = sum(record["steps"] for record in run.trained)
    if not run.trained:
        notes.append("no training step was recorded")
    elif recorded != (last := run.trained[-1]["step"]):
        run.complete = False
        notes.append(f"partial: metrics.jsonl tells of {recorded} steps, and ends at step {last}: records are missing")
    if len(ranks := list(dict.fromkeys(start.get("ranks") for start in run.starts))) > 1:
        run.complete = False
        notes.append(f"resumed on another number of ranks: {', then '.join(map(str, ranks))}")
    if not run.evaluated:
        notes.append("no evaluation was recorded")
    if not any(run.telemetry.values()):
        notes.append("no telemetry: use of devices is unknown")
    return notes


_NOT_THE_EXPERIMENT = re.compile(r"(name|about|log|checkpoint|curve|device|data\.(path|threads|max_damaged))(\.|$)")


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
        "data.threads": run.recipe.get("data", {}).get("threads"),
    }
    return {key: value for key, value in found.items() if value is not None}
