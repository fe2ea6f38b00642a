"""The part of a recipe about the optimizer, its schedule, and the moving average of the weights."""

from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.config.duration import StepDuration, StepInterval
from paceline.config.fields import (
    STRICT,
    Count,
    CountOrZero,
    Fraction,
    NotNegative,
    Patterns,
    Positive,
    PositiveFraction,
)


@dataclass(frozen=True)
class SchedulePoint:
    """A point of a piecewise schedule."""

    __pydantic_config__ = STRICT

    at: StepDuration
    """Time from the start of training."""
    factor: NotNegative
    """Learning rate at this point, as a multiple of optim.lr; linear in between."""


SCHEDULES = ("constant", "one-cycle", "cosine", "linear", "polynomial", "step", "plateau", "piecewise")
"""The built-in schedules."""
SPECIAL_FIELDS = {"power": "polynomial", "warmup_prefix": "cosine"} | dict.fromkeys(
    ("metric", "patience", "threshold", "threshold_mode", "cooldown"), "plateau"
)
"""Fields that only one schedule uses, with its name."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate per step, as a multiple of optim.lr."""

    __pydantic_config__ = STRICT

    name: str = "cosine"
    """constant, cosine, linear, polynomial, step or plateau (all after a linear warmup), one-cycle (torch's, with
    cosine annealing), piecewise, or the name of a registered schedule."""
    interval: Literal["step", "epoch"] = "step"
    """When the learning rate changes: at every step, or only at the beginning of every epoch, as in torchvision's
    scripts."""
    warmup: StepDuration = "0ba"
    """Length of the warmup, from start_factor to 1."""
    warmup_prefix: bool = True
    """cosine: the decay begins after the warmup. false: it begins at the first step, and the warmup replaces its first
    steps, as in timm by default."""
    start_factor: NotNegative = 0.0
    """Factor at the first step of the warmup."""
    end_factor: NotNegative = 0.0
    """Factor at the end of training; plateau: lowest factor."""
    step_size: StepInterval = "30ep"
    """step: time between two decays."""
    gamma: Fraction = 0.1
    """step, plateau: factor on the learning rate at each decay."""
    power: Positive = 1.0
    """polynomial: exponent of the remaining fraction of steps."""
    metric: Literal["", "top1", "top5", "loss"] = ""
    """plateau: validation metric that must improve; empty: checkpoint.best."""
    patience: CountOrZero = 10
    """plateau: the learning rate decays after more than this many evaluations without an improvement."""
    threshold: NotNegative = 1e-4
    """plateau: what counts as an improvement, relative to the best value so far or, with threshold_mode abs, as a
    difference."""
    threshold_mode: Literal["rel", "abs"] = "rel"
    """plateau: rel or abs."""
    cooldown: CountOrZero = 0
    """plateau: evaluations after a decay that do not count."""
    points: tuple[SchedulePoint, ...] = ()
    """piecewise: points of the schedule."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of a registered schedule."""


@dataclass(frozen=True)
class MomentumPoint:
    """A point of a momentum schedule."""

    __pydantic_config__ = STRICT

    at: StepDuration
    """Time from the start of training."""
    momentum: Fraction
    """Momentum at this point; linear in between."""


@dataclass(frozen=True)
class MomentumSchedule:
    """The momentum per step, or the first beta of optimizers that have betas."""

    __pydantic_config__ = STRICT

    name: Literal["constant", "one-cycle", "piecewise"] = "constant"
    """constant: optim.momentum; one-cycle: from `high` to `low` while the learning rate of the schedule one-cycle
    rises, and back while it falls, as in torch's OneCycleLR; piecewise: linear between `points`."""
    low: Fraction = 0.85
    """one-cycle: momentum at the peak of the learning rate."""
    high: Fraction = 0.95
    """one-cycle: momentum at the first and at the last step."""
    points: tuple[MomentumPoint, ...] = ()
    """piecewise: points of the schedule."""


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with settings of their own."""

    __pydantic_config__ = STRICT

    match: Patterns
    """Patterns of parameter names, e.g. stem.*; `*` also matches dots."""
    lr_factor: Positive = 1.0
    """Factor on the learning rate."""
    weight_decay_factor: NotNegative = 1.0
    """Factor on the weight decay."""
    train_until: StepDuration = "0ba"
    """Time from the start of training after which the parameters are frozen; 0: never."""


@dataclass(frozen=True)
class Optim:
    """The optimizer."""

    __pydantic_config__ = STRICT

    name: str = "sgd"
    """sgd, adamw, lamb, any other timm optimizer (muon, lion, adan ...), `muon-sgd` (airbench: Muon for filters, SGD
    for all other parameters), or a registered one."""
    lr: Positive = 0.1
    """Peak learning rate, for the mean loss over the global batch."""
    momentum: Fraction = 0.9
    """Momentum, for optimizers that have one."""
    nesterov: bool = True
    """sgd: use Nesterov momentum; false also turns it off in timm's optimizers that have it by name (nlars, nmuon)."""
    betas: tuple[Fraction, ...] = ()
    """Betas, for optimizers that have them; empty: the optimizer's default (adamw, lamb: 0.9, 0.999)."""
    eps: NotNegative = 0.0
    """Epsilon, for optimizers that have one; 0: the optimizer's default (adamw, lamb: 1e-8)."""
    weight_decay: NotNegative = 0.0
    """Weight decay of convolution filters and matrices."""
    no_weight_decay_on: Literal["norm-and-bias", "norm", "nothing"] = "norm-and-bias"
    """Parameters without weight decay: those of normalization layers and biases, those of normalization layers only, or
    none. Parameters that the model itself excludes, such as position embeddings, never have it."""
    layer_decay: PositiveFraction = 1.0
    """Factor on the learning rate from each layer of a timm model to the one before it; fine-tuning: 0.65 to 0.9."""
    head_lr_mult: Positive = 1.0
    """Factor on the learning rate of the classifier."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameters with settings of their own: [{match: stem.*, lr_factor: 0.1}, {match: "*.bias", train_until: 3ep}].
    If several groups match, their factors are multiplied."""
    clip_grad_norm: NotNegative = 0.0
    """Clip the gradient to this norm; 0: off."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the optimizer, e.g. {caution: true}."""
    schedule: Schedule = field(default_factory=Schedule)
    """Learning rate schedule."""
    momentum_schedule: MomentumSchedule = field(default_factory=MomentumSchedule)
    """Momentum schedule."""


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the weights, used for evaluation and the best checkpoint."""

    __pydantic_config__ = STRICT

    decay: Fraction = 0.0
    """EMA decay; 0: off."""
    every: Count = 1
    """Steps between updates."""
    decay_schedule: Literal["warmup", "constant", "cubic"] = "warmup"
    """Decay over time. warmup: at most (1 + u) / (10 + u) at update u; constant: always ema.decay; cubic: from 0 to
    ema.decay, with the third power of the fraction of steps that are done."""
    start: StepDuration = "0ba"
    """Until the first update after this time, the average is a copy of the weights; earlier updates do not count."""
    lookahead: bool = False
    """Copy the average back to the weights at every update (Lookahead, arXiv 1907.08610)."""
