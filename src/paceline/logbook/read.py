"""A run as its readers see it: from a run folder, or from somebody else's log. No torch, nothing written."""

import statistics
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.untrusted import read_regular
from paceline.track.other_work import is_disturbed
from paceline.track.records import RunFolder, lines_of, samples_of, split_seconds

_MOST_SAMPLES = 20_000
_MOST_PAGE = 1 << 26
_MOST_NOTES = 100
_FEWEST_SAMPLES, _DISTURBED = 3, 0.2
"""Samples of a host that tell something, and the share of them with other work that makes a run a disturbed one."""
PARTS = ("data", "compute", "sync", "optimizer", "evaluate", "checkpoint")


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
    folder: RunFolder | None = None
    """Where its telemetry is, if it is a run of paceline."""
    complete: bool = True
    """Whether its times are those of one whole training on the same ranks."""
    notes: list[str] = field(default_factory=list)
    """What a reader has to know: what is missing, odd or partial."""

    @cached_property
    def telemetry(self) -> dict[str, list[dict[str, Any]]]:
        """Samples of each host; of long runs evenly thinned ones."""
        files = self.folder.telemetry_files if self.folder else []
        return {printable(path.stem): _samples(path) for path in files}

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
        for kind, part in (("eval", "evaluate"), ("checkpoint", "checkpoint")):
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
        told: float = self.facts.get("seconds", 0.0)  # of another program's log, which says it itself
        return max(told, sum(self.seconds.values())) or None

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
    def price(self) -> float | None:
        """Of one of its hosts for an hour, if it was known when it started."""
        return self.starts[-1].get("price") if self.starts else None

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

    def device_use(self) -> float | None:
        """Mean use of the devices, a share: of the GPUs where there are some, else of the hosts' processors."""
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
        """Mean share of the hosts' processors that other processes used."""
        used = [sample.get("other_cpu_percent") for samples in self.telemetry.values() for sample in samples]
        known = [percent for percent in used if percent is not None]
        return statistics.fmean(known) / 100 if known else None

    @cached_property
    def disturbance(self) -> str:
        """How other work on its hosts took time from the run; empty if it did not, or nobody looked."""
        for host, samples in self.telemetry.items():
            disturbed = [sample for sample in samples if is_disturbed(sample)]
            if len(samples) < _FEWEST_SAMPLES or len(disturbed) < _DISTURBED * len(samples):
                continue
            when = f"during {len(disturbed) / len(samples):.0%} of the run"
            if any(sample.get("other_gpu_processes") for sample in disturbed):
                return f"disturbed: other processes computed on the GPUs of {host} {when}"
            mean = statistics.fmean(sample.get("other_cpu_percent", 0.0) for sample in disturbed)
            return f"disturbed: other processes used {mean:.0f} % of the CPU of {host} {when}"
        return ""

    def energy(self) -> float | None:
        """Joules of the GPUs, from their power at every sample."""
        total, known = 0.0, False
        for samples in self.telemetry.values():
            for before, after in pairwise(samples):
                gap = after["time"] - before["time"]
                watts = [gpu.get("watts") for gpu in after.get("gpus", [])]
                if None in watts:
                    return None  # some of it is not known
                if watts and 0 < gap < 120:  # longer: the run was not running
                    total, known = total + gap * sum(watts), True
        return total if known else None


def _samples(path: Path) -> list[dict[str, Any]]:
    lines = list(lines_of(path, path.parent.parent))
    return samples_of(lines[:: max(1, len(lines) // _MOST_SAMPLES)])


def _duration(record: dict[str, Any]) -> float:
    seconds = record.get("seconds", 0.0)
    return sum(seconds.values()) if isinstance(seconds, dict) else seconds


class NotARun(UserError):
    """A path that has nothing of a run in it, rather than one that is corrupt."""

    def __init__(self, path: Path, reason: str, hint: str = ""):
        super().__init__(f"{path} is {reason}{hint}")
        self.reason = reason


def read(path: Path) -> Run:
    """A run folder, or a log or folder of another program."""
    run = _read(path)
    more = len(run.notes) - _MOST_NOTES
    run.notes = [printable(note) for note in run.notes[:_MOST_NOTES]] + [f"and {more:,} more notes"] * (more > 0)
    return run


def _read(path: Path) -> Run:
    folder = RunFolder(path)
    if reason := _written_beside_runs(folder):
        raise NotARun(path, reason)
    if folder.exists:
        from paceline.logbook.folder import read_folder

        return read_folder(path)
    if not path.exists():
        raise UserError(f"{path}: there is no such run; give run folders, or logs of other programs")
    if not path.is_dir() and not path.is_file():
        raise NotARun(path, "neither a regular file nor a folder")
    if inside := sorted(recipe.parent.name for recipe in path.glob("*/recipe.yaml")):
        raise UserError(f"{path} holds runs ({', '.join(inside[:5])}{' ...' if inside[5:] else ''}); give them by name")
    from paceline.logbook.importers import read_foreign

    try:
        return read_foreign(path)
    except NotARun:
        if folder.metrics.is_file() or folder.environment.is_file():
            raise UserError(
                f"{path} is an incomplete run folder: recipe.yaml is missing; copy the run folder again"
            ) from None
        raise


LOGBOOK_MARK = "<!-- written by paceline logbook -->"


def _written_beside_runs(folder: RunFolder) -> str:
    """What other commands of paceline leave beside runs, by name; empty if it is something else."""
    path = folder.path
    searched = path.name.startswith("find-batch-") or (path / "find-batch.json").is_file()
    if searched and path.is_dir() and not folder.environment.exists():
        return "a find-batch search, not a run"
    if any(_holds(path / page, LOGBOOK_MARK) for page in ("index.md", "README.md")):
        return "a logbook, not a run"
    if path.suffix == ".html" and path.is_file():
        return "a web page, not a run"
    return ""


def _holds(path: Path, text: str) -> bool:
    try:
        return text.encode() in read_regular(path, _MOST_PAGE)
    except OSError:
        return False


def named_apart(runs: list[Run]) -> list[Run]:
    names = [run.name for run in runs]
    taken = {name for name in names if names.count(name) == 1}
    for run in runs:
        if names.count(run.name) > 1:
            numbered = (f"{run.name} ({number})" for number in count(1))
            run.name = next(name for name in numbered if name not in taken)
            taken.add(run.name)
    return runs
