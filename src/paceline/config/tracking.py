"""Parts of a recipe that do not change training itself: origin, checkpoints, logs and the expected accuracy."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.duration import Interval
from paceline.config.fields import STRICT, Count, Fraction, FractionOrOne, NotNegative, Positive, PositiveFraction
from paceline.errors import Problem

_CODE = r"^[\w.-]+/[\w.-]+/[\w./-]+@[0-9a-f]{40}$"


@dataclass(frozen=True)
class Measured:
    """Results of runs of the recipe, written by `paceline recipes --record RUN ...`."""

    __pydantic_config__ = STRICT

    seeds: tuple[int, ...] = ()
    """Seeds of the runs; empty: not measured."""
    top1: tuple[FractionOrOne, ...] = ()
    """Top-1 at the end of each run, from 0 to 1."""
    top5: tuple[FractionOrOne, ...] = ()
    """Top-5 at the end of each run; empty with five classes or fewer."""
    seconds: tuple[Positive, ...] = ()
    """Training time of each run, without evaluation and checkpoints."""
    hardware: str = ""
    """Hardware of the runs."""
    precision: str = ""
    """Precision of the runs."""
    torch: str = ""
    """Version of torch."""
    paceline: str = ""
    """Version of paceline."""
    commits: tuple[str, ...] = ()
    """Git commits of the working directories of the runs; `+` follows if files were changed."""
    date: str = ""
    """Day on which the last run started."""
    disturbed: bool = False
    """Whether other processes slowed down a run, so that the times are too long."""

    @property
    def accuracy(self) -> str:
        """Top-1, or top-1 / top-5, in percent: the mean and, of several runs, the standard deviation."""
        return " / ".join(map(_mean_and_deviation, filter(None, (self.top1, self.top5)))) + "%" if self.seeds else ""

    def __str__(self) -> str:
        """One sentence; empty if nothing was measured."""
        if not self.seeds:
            return ""
        seeds = ", ".join(map(str, self.seeds))
        runs = f"seed {seeds}" if len(self.seeds) == 1 else f"mean and standard deviation of seeds {seeds}"
        slower = " (slowed down by other processes)" * self.disturbed
        where = f"{self.hardware}, {self.precision}, torch {self.torch}"
        return f"{self.accuracy} ({runs}) in {_clock(statistics.fmean(self.seconds))}{slower} on {where}, {self.date}"

    def problems(self) -> Iterator[Problem]:
        """Yield values that contradict each other."""
        count = len(self.seeds)
        for name in ("top1", "top5", "seconds"):
            values = len(getattr(self, name))
            if values != count and not (name == "top5" and not values):
                yield Problem(
                    "measured-inconsistent",
                    f"about.measured.{name} has {values} values, but about.measured.seeds has {count}. Record the runs "
                    "again with `paceline recipes --record RUN ...`, or remove about.measured.",
                )
                return


def _mean_and_deviation(values: Sequence[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


def _clock(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


@dataclass(frozen=True)
class About:
    """Where the recipe comes from and what it reaches."""

    __pydantic_config__ = STRICT

    source: str = ""
    """Paper, code or logbook that the recipe follows."""
    code: tuple[Annotated[str, Field(pattern=_CODE)], ...] = ()
    """Files of the source, as OWNER/REPOSITORY/PATH@COMMIT on GitHub."""
    published: str = ""
    """Result that the source reports; not inherited from a base recipe."""
    deviations: tuple[str, ...] = ()
    """Differences from the procedure of the source."""
    measured: Measured = field(default_factory=Measured)
    """Result of runs of the recipe; not inherited from a base recipe."""


def github_link(file: str) -> str:
    """Return the address of a file in about.code."""
    path, _, commit = file.rpartition("@")
    owner, repository, inside = path.split("/", 2)
    return f"https://github.com/{owner}/{repository}/blob/{commit}/{inside}"


@dataclass(frozen=True)
class Checkpoint:
    """When to write checkpoints, and which ones to keep."""

    __pydantic_config__ = STRICT

    every: Interval = "1ep"
    """How often to write a checkpoint; the end of training always writes one."""
    keep: Count = 2
    """Newest checkpoints to keep; the best one is kept as well."""
    best: Literal["top1", "loss"] = "top1"
    """Metric that decides which checkpoint is the best."""


@dataclass(frozen=True)
class Log:
    """What is logged during training."""

    __pydantic_config__ = STRICT

    every: Interval = "10ba"
    """How often to log; only these steps synchronize with the device."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install 'paceline[wandb]'); WANDB_MODE=offline needs no network."""
    mlflow: bool = False
    """Also log to MLflow (pip install 'paceline[mlflow]'), to the server that MLFLOW_TRACKING_URI names."""
    project: str = "paceline"
    """Project in Weights & Biases, experiment in MLflow."""


@dataclass(frozen=True)
class ExpectedCurve:
    """Validation accuracy of the recipe's source over time, to notice early when a run falls behind."""

    __pydantic_config__ = STRICT

    metric: Literal["top1", "top5"] = "top1"
    """Which accuracy."""
    points: tuple[tuple[NotNegative, PositiveFraction], ...] = ()
    """[epoch, accuracy from 0 to 1]; linear in between."""
    tolerance: Fraction = 0.02
    """How far below the curve a run may be, as a difference in accuracy."""
    stop: bool = False
    """Stop a run that is further below the curve than the tolerance."""

    def expected(self, epoch: float) -> float | None:
        """The expected accuracy at an epoch; None before the first point."""
        for (begin, low), (end, high) in pairwise(self.points):
            if begin <= epoch <= end:
                return low + (high - low) * (epoch - begin) / (end - begin)
        return self.points[-1][1] if self.points and epoch >= self.points[-1][0] else None
