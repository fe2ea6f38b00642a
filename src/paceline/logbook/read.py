"""A run as its readers see it: from a run folder, or from somebody else's log. No torch, nothing written."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import from_json

from paceline.config.io import leaves
from paceline.errors import UserError
from paceline.track.records import RunFolder, split_seconds

PARTS = ("data", "compute", "sync", "optimizer", "evaluate", "checkpoint")
_PER_RANK_RECORDS = 2000


@dataclass
class Run:
    """Figures of one run; what nobody measured is missing or None, never zero."""

    name: str
    origin: Path
    kind: str = "paceline"
    status: str = "unknown"
    recipe: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What identifies the experiment, by name."""
    complete: bool = True
    """Whether its times are those of one whole training on the same ranks."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know: what is missing, odd or partial."""

    @cached_property
    def trained(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "train"]

    @cached_property
    def evaluated(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "eval"]

    @property
    def final(self) -> dict[str, Any]:
        return self.evaluated[-1] if self.evaluated else {}

    @property
    def best(self) -> dict[str, Any]:
        known = [record for record in self.evaluated if record.get("top1") is not None]
        return max(known, key=lambda record: record["top1"]) if known else {}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Where the time went, mean over ranks; parts that were not measured are missing."""
        found = split_seconds(self.trained)
        for kind, part in (("eval", "evaluate"), ("save", "checkpoint")):
            times = [record["seconds"] for record in self.records if record["kind"] == kind and "seconds" in record]
            if times:
                found[part] = sum(times)
        return found

    @property
    def train_seconds(self) -> float | None:
        own = [seconds for part, seconds in self.seconds.items() if part not in ("evaluate", "checkpoint")]
        return sum(own) if own else self.facts.get("seconds")

    @property
    def total_seconds(self) -> float | None:
        told: float | None = self.facts.get("seconds")  # of another program's log, which says it itself
        return told or (sum(self.seconds.values()) if self.seconds else None)

    @property
    def images(self) -> int:
        return sum(record.get("images", 0) for record in self.trained)

    @property
    def images_per_second(self) -> float | None:
        return self.images / self.train_seconds if self.images and self.train_seconds else None

    @property
    def ranks(self) -> int | None:
        return self.starts[-1].get("ranks") if self.starts else self.facts.get("ranks")

    @property
    def devices(self) -> int | None:
        """What computes: GPUs, or threads of processors."""
        hardware = self.starts[-1].get("hardware", {}) if self.starts else {}
        each = 1 if hardware.get("device") == "cuda" else hardware.get("threads_per_process", 1)
        return self.ranks * each if self.ranks else None

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(self.starts[-1].get("host_of_rank", []))) if self.starts else []

    @property
    def host_of_rank(self) -> list[str]:
        found: list[str] = self.starts[-1].get("host_of_rank", []) if self.starts else []
        return found

    @property
    def global_batch(self) -> int | None:
        batch = self.summary.get("global_batch") or self.recipe.get("train", {}).get("global_batch")
        return batch or self.facts.get("global_batch")

    @property
    def peak_memory(self) -> int | None:
        """Most bytes that a rank had."""
        per_rank = [max(record["memory_per_rank"]) for record in self.trained if record.get("memory_per_rank")]
        return max(per_rank) if per_rank else None

    @cached_property
    def seconds_per_rank(self) -> dict[str, list[float]]:
        """By part: the share of each rank, from the records that tell of ranks, as seconds of the whole run."""
        telling = [record for record in self.trained if record.get("seconds_per_rank")]
        found: dict[str, list[float]] = {}
        if not telling or len({len(record["seconds_per_rank"]["data"]) for record in telling}) > 1:
            return found  # one rank, or another number of them after a restart
        share = sum(record["steps"] for record in self.trained) / sum(record["steps"] for record in telling)
        for part in telling[0]["seconds_per_rank"]:
            if not all(part in record["seconds_per_rank"] for record in telling):
                continue
            columns = zip(*(record["seconds_per_rank"][part] for record in telling), strict=True)
            found[part] = [share * sum(column) for column in columns]
        return found

    def curve(self, metric: str, kind: str = "eval", across: str = "epoch") -> list[tuple[float, float]]:
        """Points (epoch, step, images or seconds; value) of a metric of `train` or `eval` records."""
        places = self.places(across)
        return [
            (place, record[metric])
            for record, place in zip(self.records, places, strict=True)
            if record["kind"] == kind and record.get(metric) is not None and place is not None
        ]

    def places(self, across: str) -> list[float | None]:
        """Where each record stands: at which epoch or step, after how many images or seconds."""
        if across == "images":
            return list(accumulate(record.get("images", 0) for record in self.records))
        if across == "seconds":
            return list(accumulate(_duration(record) for record in self.records))
        return [record.get(across) for record in self.records]

    def seconds_to(self, top1: float) -> float | None:
        """Seconds of training, evaluating and saving until an evaluation showed this accuracy."""
        reached = (place for place, value in self.curve("top1", across="seconds") if value >= top1)
        return next(reached, None) if self.seconds else None

    @cached_property
    def telemetry(self) -> dict[str, list[dict[str, Any]]]:
        """Samples of each host."""
        paths = sorted((self.origin / "telemetry").glob("*.jsonl")) if self.kind == "paceline" else []
        return {path.stem: list(_json_lines(path)) for path in paths}

    def device_use(self) -> float | None:
        """Mean use of the devices, a share: of the GPUs where there are some, else of the hosts' processors."""
        samples = [sample for lines in self.telemetry.values() for sample in lines if sample.get("kind") == "sample"]
        gpus = [
            gpu["use_percent"]
            for sample in samples
            for gpu in sample.get("gpus", [])
            if gpu.get("use_percent") is not None
        ]
        values = gpus or [sample["cpu_percent"] for sample in samples]
        return statistics.fmean(values) / 100 if values else None

    def energy(self) -> float | None:
        """Joules of the GPUs, from their power at every sample."""
        total, known = 0.0, False
        for lines in self.telemetry.values():
            samples = [line for line in lines if line.get("kind") == "sample"]
            for before, after in pairwise(samples):
                gap = after["time"] - before["time"]
                watts = [gpu["watts"] for gpu in after.get("gpus", []) if gpu.get("watts") is not None]
                if watts and 0 < gap < 60:  # longer: the run was not running
                    total, known = total + gap * sum(watts), True
        return total if known else None


def _duration(record: dict[str, Any]) -> float:
    seconds = record.get("seconds", 0.0)
    return sum(seconds.values()) if isinstance(seconds, dict) else seconds


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().splitlines():
        try:
            record = from_json(line)
        except ValueError:
            continue  # half written
        if isinstance(record, dict):
            yield record


def read(path: Path) -> Run:
    """A run folder, or a log or folder of another program."""
    if RunFolder(path).exists:
        try:
            run = _from_folder(RunFolder(path))
            _ = (
                run.seconds,
                run.seconds_per_rank,
                run.telemetry,
                run.device_use(),
                run.energy(),
                run.best,
                run.devices,
            )
            _ = (run.images_per_second, run.peak_memory, run.global_batch, run.hosts)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"{path}: its records are damaged ({type(error).__name__}: {reason}); mend or leave it out"
            ) from None
        return run
    if not path.exists():
        raise UserError(f"{path}: there is no such run; give run folders, or logs of other programs")
    if inside := sorted(folder.parent.name for folder in path.glob("*/recipe.yaml")):
        raise UserError(f"{path} holds runs ({', '.join(inside[:5])}{' ...' if inside[5:] else ''}); give them by name")
    from paceline.logbook.importers import read_foreign

    return read_foreign(path)


def named_apart(runs: list[Run]) -> list[Run]:
    names = [run.name for run in runs]
    for number, run in enumerate(runs, start=1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"
    return runs


def _from_folder(folder: RunFolder) -> Run:
    run = Run(folder.path.resolve().name, folder.path, summary=folder.read_summary())
    try:
        run.recipe = yaml.safe_load(folder.recipe.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        run.notes.append(f"recipe.yaml cannot be read ({type(error).__name__})")
    if not isinstance(run.recipe, dict):
        run.recipe = {}
    run.starts = folder.read_starts()
    run.records = list(folder.records(per_rank=_PER_RANK_RECORDS))
    run.status = run.summary.get("status", "unknown")
    run.facts = _facts(run)
    if run.status == "running" and not folder.in_use:
        run.status = "killed"
        run.notes.append("partial: the run was killed, or its machine was lost; figures end at its last record")
    elif run.status in ("running", "interrupted", "failed"):
        words = {"running": "is still going on", "interrupted": "was stopped", "failed": "failed"}
        reason = f" ({run.summary['message']})" if run.summary.get("message") else ""
        run.notes.append(f"partial: the run {words[run.status]}{reason}")
    if not run.trained:
        run.notes.append("no training step was recorded")
    recorded = sum(record.get("steps", 0) for record in run.trained)
    if run.trained and recorded != run.trained[-1]["step"]:
        run.complete = False
        last = run.trained[-1]["step"]
        run.notes.append(
            f"partial: metrics.jsonl tells of {recorded} steps, and ends at step {last}: records are missing"
        )
    if len({start.get("ranks") for start in run.starts}) > 1:
        run.complete = False
        ranks = ", then ".join(str(start.get("ranks")) for start in run.starts)
        run.notes.append(f"resumed on another number of ranks: {ranks}")
    if not run.evaluated:
        run.notes.append("no evaluation was recorded")
    if not any((folder.telemetry).glob("*.jsonl")):
        run.notes.append("no telemetry: use of devices is unknown")
    return run


_NOT_THE_EXPERIMENT = (
    "name",
    "about",
    "log",
    "checkpoint",
    "curve",
    "data.path",
    "data.threads",
    "data.max_damaged",
    "device",
)


def _facts(run: Run) -> dict[str, Any]:
    """The recipe's fields, data and code, by name."""
    found = {
        key: value
        for key, value in leaves(run.recipe)
        if not any(key == name or key.startswith(f"{name}.") for name in _NOT_THE_EXPERIMENT)
    }
    last = run.starts[-1] if run.starts else {}
    found["precision"] = last.get("precision")
    found["data"] = last.get("data")
    packages = last.get("packages", {})
    found["code"] = packages.get("paceline")
    found["commit"] = (last.get("code") or {}).get("commit")
    found["torch"] = packages.get("torch")
    hardware = last.get("hardware", {})
    found["hardware"] = hardware.get("gpu") or hardware.get("cpu")
    if hardware.get("device") == "cpu":
        found["threads of a rank"] = hardware.get("threads_per_process")
    found["data.threads"] = run.recipe.get("data", {}).get("threads")
    return {key: value for key, value in found.items() if value is not None}
