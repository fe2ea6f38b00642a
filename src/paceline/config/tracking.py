"""Parts of a recipe that do not change training itself: origin, checkpoints, logs and the expected accuracy."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from paceline.config.duration import Interval
from paceline.config.fields import STRICT, Count, Fraction, NotNegative, PositiveFraction


@dataclass(frozen=True)
class About:
    """Where the recipe comes from and what it reaches."""

    __pydantic_config__ = STRICT

    source: str = ""
    """Paper or code that the recipe follows."""
    published: str = ""
    """Result that the source reports."""
    deviations: tuple[str, ...] = ()
    """Differences to the procedure of the source."""
    measured: str = ""
    """Result that this project measured, and on which hardware."""


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
