"""A run as a report needs it, whatever it was read from. Needs no torch and writes nothing."""

import statistics
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import UserError
from paceline.system.files import printable
from paceline.track.other_work import is_disturbed
from paceline.track.records import RunFolder, read_lines, samples_of, split_seconds

if TYPE_CHECKING:
    from paceline.analysis.details.read import Details

_MAX_SAMPLES = 20_000
_MIN_SAMPLES, _DISTURBED = 3, 0.2
"""A run is disturbed if it has this many samples and this fraction of them show other work on the host."""
PARTS = ("data", "compute", "sync", "optimizer", "evaluate", "checkpoint")
CODE_OF = "code of"
"""Begins the names of facts with the hash of an imported package."""


def shows_top5(num_classes: Any) -> bool:
    """Return whether results show top-5, which is always 100% with five classes or fewer. None: unknown, shown."""
    return not isinstance(num_classes, int) or num_classes > 5


@dataclass
class LoggedRun:
    """Figures of one run; what was not measured is missing or None, never zero."""

    name: str
    origin: Path
    kind: str = "paceline"
    status: str = "unknown"
    """running, finished, interrupted, failed, ..."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe as nested dictionaries."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What identifies the experiment, by name."""
    folder: RunFolder | None = None
    """The run folder; None for an imported log."""
    complete: bool = True
    """Whether the times cover the whole training, on the same ranks throughout."""
    notes: list[str] = field(default_factory=list)
    """What is missing, corrupt or partial."""

    @cached_property
    def telemetry(self) -> dict[str, list[dict[str, Any]]]:
        """Telemetry samples by host, evenly thinned for long runs."""
        files = self.folder.telemetry_files if self.folder else []
        return {printable(path.stem): _samples(path) for path in files}

    @cached_property
    def details(self) -> "tuple[list[Details], list[str]]":
        """The details of its evaluations, and why some were left out."""
        if not self.folder or not self.folder.evaluations.is_dir():
            return [], []
        from paceline.analysis.details.read import details_of

        return details_of(self.origin)

    @cached_property
    def trained(self) -> list[dict[str, Any]]:
        """The records of kind `train`."""
        return [record for record in self.records if record["kind"] == "train"]

    @cached_property
    def evaluated(self) -> list[dict[str, Any]]:
        """The records of kind `eval`."""
        return [record for record in self.records if record["kind"] == "eval"]

    @property
    def tested(self) -> dict[str, Any]:
        """The last record of kind `test`: the best checkpoint on the test split; empty if there is none."""
        return next((record for record in reversed(self.records) if record["kind"] == "test"), {})

    @property
    def final(self) -> dict[str, Any]:
        return self.evaluated[-1] if self.evaluated else {}

    @property
    def top5(self) -> float | None:
        """The top-5 of the last evaluation; None if it is unknown, or always 100%."""
        data = self.summary.get("data")
        return self.final.get("top5") if shows_top5(data.get("classes") if isinstance(data, dict) else None) else None

    @property
    def best(self) -> dict[str, Any]:
        """The evaluation with the highest top-1; empty if there is none."""
        known = [record for record in self.evaluated if record.get("top1") is not None]
        return max(known, key=lambda record: record["top1"]) if known else {}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by part of the run, as a mean over ranks; parts that were not measured are missing."""
        found = split_seconds(self.trained)
        for kind, part in (("eval", "evaluate"), ("checkpoint", "checkpoint")):
            times = [record["seconds"] for record in self.records if record["kind"] == kind and "seconds" in record]
            if times:
                found[part] = sum(times)
        return found

    @property
    def train_seconds(self) -> float | None:
        """Seconds of training, without evaluation and checkpoints."""
        parts = [seconds for part, seconds in self.seconds.items() if part not in ("evaluate", "checkpoint")]
        return sum(parts) if parts else self.facts.get("seconds")

    @property
    def total_seconds(self) -> float | None:
        """Seconds of training, evaluation and checkpoints."""
        logged: float = self.facts.get("seconds", 0.0)  # the total in an imported log
        return max(logged, sum(self.seconds.values())) or None

    @property
    def images(self) -> int:
        """Number of images that were trained on."""
        return sum(record.get("images", 0) for record in self.trained)

    @property
    def images_per_second(self) -> float | None:
        """Throughput of all ranks together in training."""
        return self.images / self.train_seconds if self.images and self.train_seconds else None

    @property
    def ranks(self) -> int | None:
        """Number of ranks at the last start."""
        return self.starts[-1].get("ranks") if self.starts else self.facts.get("ranks")

    @property
    def devices(self) -> int | None:
        """Number of GPUs or, on the CPU, of threads."""
        hardware = self.starts[-1].get("hardware", {}) if self.starts else {}
        each = 1 if hardware.get("device") == "cuda" else hardware.get("threads_per_process", 1)
        return self.ranks * each if self.ranks else None

    @property
    def price(self) -> float | None:
        """Dollars per host and hour, if known at the start."""
        return self.starts[-1].get("price") if self.starts else None

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(self.starts[-1].get("host_of_rank", []))) if self.starts else []

    @property
    def host_of_rank(self) -> list[str]:
        hosts: list[str] = self.starts[-1].get("host_of_rank", []) if self.starts else []
        return hosts

    @property
    def global_batch(self) -> int | None:
        batch = self.summary.get("global_batch") or self.recipe.get("train", {}).get("global_batch")
        return batch or self.facts.get("global_batch")

    @property
    def peak_memory(self) -> int | None:
        """Peak memory per rank in bytes, the highest of all ranks."""
        per_rank = [max(record["memory_per_rank"]) for record in self.trained if record.get("memory_per_rank")]
        return max(per_rank) if per_rank else None

    @cached_property
    def seconds_per_rank(self) -> dict[str, list[float]]:
        """Seconds by part, one value per rank; scaled to the whole run, since not every record has them."""
        records = [record for record in self.trained if record.get("seconds_per_rank")]
        found: dict[str, list[float]] = {}
        if not records or len({len(record["seconds_per_rank"]["data"]) for record in records}) > 1:
            return found  # one rank, or the number of ranks changed
        factor = sum(record["steps"] for record in self.trained) / sum(record["steps"] for record in records)
        for part in records[0]["seconds_per_rank"]:
            if not all(part in record["seconds_per_rank"] for record in records):
                continue
            columns = zip(*(record["seconds_per_rank"][part] for record in records), strict=True)
            found[part] = [factor * sum(column) for column in columns]
        return found

    def points(self, metric: str, kind: str = "eval", x_axis: str = "epoch") -> list[tuple[float, float]]:
        """Return points (x, value) of a metric in `train` or `eval` records; x: epoch, step, images or seconds."""
        return [
            (x, record[metric])
            for record, x in zip(self.records, self.positions(x_axis), strict=True)
            if record["kind"] == kind and record.get(metric) is not None and x is not None
        ]

    def positions(self, x_axis: str) -> list[float | None]:
        """Return the x value of each record; x_axis: epoch, step, images or seconds."""
        if x_axis == "images":
            return list(accumulate(record.get("images", 0) for record in self.records))
        if x_axis == "seconds":
            return list(accumulate(_duration(record) for record in self.records))
        return [record.get(x_axis) for record in self.records]

    def seconds_to(self, top1: float) -> float | None:
        """Return the seconds until an evaluation reached this accuracy, with evaluation and checkpoints."""
        reached = (seconds for seconds, value in self.points("top1", x_axis="seconds") if value >= top1)
        return next(reached, None) if self.seconds else None

    def device_utilization(self) -> float | None:
        """Return the mean utilization, 0 to 1, of the GPUs or, without GPUs, of the hosts' CPUs."""
        samples = [sample for lines in self.telemetry.values() for sample in lines]
        gpus = [
            gpu["use_percent"]
            for sample in samples
            for gpu in sample.get("gpus", [])
            if gpu.get("use_percent") is not None
        ]
        values = gpus or [sample["cpu_percent"] for sample in samples]
        return statistics.fmean(values) / 100 if values else None

    @property
    def other_load(self) -> float | None:
        """Mean CPU utilization of the hosts by other processes, 0 to 1."""
        used = [sample.get("other_cpu_percent") for samples in self.telemetry.values() for sample in samples]
        known = [percent for percent in used if percent is not None]
        return statistics.fmean(known) / 100 if known else None

    @cached_property
    def disturbance(self) -> str:
        """How other processes slowed the run down; empty if they did not, or if there is no telemetry."""
        for host, samples in self.telemetry.items():
            disturbed = [sample for sample in samples if is_disturbed(sample)]
            if len(samples) < _MIN_SAMPLES or len(disturbed) < _DISTURBED * len(samples):
                continue
            when = f"during {len(disturbed) / len(samples):.0%} of the run"
            if any(sample.get("other_gpu_processes") for sample in disturbed):
                return f"disturbed: other processes used the GPUs of {host} {when}"
            mean = statistics.fmean(sample.get("other_cpu_percent", 0.0) for sample in disturbed)
            return f"disturbed: other processes used {mean:.0f}% of the CPU of {host} {when}"
        return ""

    def energy(self) -> float | None:
        """Return the energy of the GPUs in joules, from their power in every sample."""
        total, known = 0.0, False
        for samples in self.telemetry.values():
            for before, after in pairwise(samples):
                gap = after["time"] - before["time"]
                watts = [gpu.get("watts") for gpu in after.get("gpus", [])]
                if None in watts:
                    return None  # the power of some GPU is unknown
                if watts and 0 < gap < 120:  # a longer gap: the run was stopped
                    total, known = total + gap * sum(watts), True
        return total if known else None


def _samples(path: Path) -> list[dict[str, Any]]:
    lines = list(read_lines(path, path.parent.parent))
    return samples_of(lines[:: max(1, len(lines) // _MAX_SAMPLES)])


def _duration(record: dict[str, Any]) -> float:
    seconds = record.get("seconds", 0.0)
    return sum(seconds.values()) if isinstance(seconds, dict) else seconds


class NotARun(UserError):
    """A path that is not a run, as opposed to a corrupt run; the field `reason` says what it is."""


_RunT = TypeVar("_RunT", bound=LoggedRun)


def named_apart(runs: list[_RunT]) -> list[_RunT]:
    """Number the runs that share a name, and return all."""
    names = [run.name for run in runs]
    used = {name for name in names if names.count(name) == 1}
    for run in runs:
        if names.count(run.name) > 1:
            numbered = (f"{run.name} ({number})" for number in count(1))
            run.name = next(name for name in numbered if name not in used)
            used.add(run.name)
    return runs
