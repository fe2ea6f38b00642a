"""A recipe: everything that defines an experiment, and nothing about where it runs.

Frozen dataclasses; the string under a field is its help text. Types and ranges are checked by pydantic when a recipe is
read (`config.io`), what concerns several fields by `problems`.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config.data import Data
from paceline.config.duration import Interval, StepDuration, StepInterval, parse
from paceline.config.fields import STRICT, Area, Count, CountOrZero, NotNegative, Positive, Share, Side
from paceline.config.phases import Phase, Ramp


@dataclass(frozen=True)
class About:
    """Where the recipe comes from and what it reaches."""

    __pydantic_config__ = STRICT

    source: str = ""
    """Paper or code that the recipe follows."""
    published: str = ""
    """The figure its source reports."""
    measured: str = ""
    """The figure this project measured itself, and on what."""


@dataclass(frozen=True)
class Model:
    """Which network, and where its weights start."""

    __pydantic_config__ = STRICT

    name: str = "resnet18"
    """Any timm model, or `airbench`, this project's small CIFAR net."""
    weights: str = "random"
    """`random`, `pretrained` (from the hub), or a .safetensors or .pth file; a head of another size is replaced."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further model arguments, e.g. {drop_path_rate: 0.1}."""
    head_init_std: NotNegative = 0.0
    """Draw the classifier's weights with this standard deviation, its bias zero; 0: as the model does."""
    sync_batchnorm: bool = False
    """Batch norm over the batches of all ranks instead of each rank's own."""


@dataclass(frozen=True)
class Point:
    """A corner of a piecewise schedule."""

    __pydantic_config__ = STRICT

    at: StepDuration
    """When, from the start of training."""
    factor: NotNegative
    """Learning rate there, as a multiple of optim.lr; linear in between."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate per step, as a multiple of optim.lr."""

    __pydantic_config__ = STRICT

    name: Literal["constant", "one-cycle", "cosine", "linear", "step", "piecewise"] = "cosine"
    """one-cycle: cosine up over `warmup`, cosine down; cosine, linear, step: linear warm-up, then that curve down."""
    warmup: StepDuration = "0ba"
    """Time from `start` up to the peak."""
    start_factor: NotNegative = 0.0
    """Factor at the first step of the warm-up."""
    end_factor: NotNegative = 0.0
    """Factor at the end of training."""
    step_size: StepInterval = "30ep"
    """step: time between two falls."""
    gamma: Share = 0.1
    """step: what remains of the learning rate after a fall."""
    points: tuple[Point, ...] = ()
    """Corners of the piecewise schedule."""


@dataclass(frozen=True)
class Optim:
    """The optimizer."""

    __pydantic_config__ = STRICT

    name: Literal["sgd", "adamw", "lamb"] = "sgd"
    """SGD with momentum, AdamW, or timm's LAMB."""
    lr: Positive = 0.1
    """Peak learning rate, for the mean loss over the global batch."""
    momentum: Share = 0.9
    """SGD's momentum."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's and LAMB's decay rates."""
    eps: Positive = 1e-8
    """AdamW's and LAMB's epsilon."""
    weight_decay: NotNegative = 0.0
    """Weight decay, on filters and matrices."""
    decay_norm_bias: bool = False
    """Let norms and biases decay too."""
    norm_bias_lr_factor: Positive = 1.0
    """Factor on the learning rate of normalization layers' biases (airbench: 64)."""
    clip_grad_norm: NotNegative = 0.0
    """Clip the gradient to this norm; 0: off."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over time."""


@dataclass(frozen=True)
class Train:
    """How long, in which batches."""

    __pydantic_config__ = STRICT

    duration: StepDuration = "10ep"
    """Length of the training."""
    global_batch: Count = 256
    """Images per optimizer step over all ranks together: per-rank batch x ranks x accumulation."""
    grad_accumulation: Count = 1
    """Micro-batches a rank computes one after the other for one optimizer step."""
    init_loss_scale: Annotated[Positive, Field(le=2.0**120)] = 65536.0
    """fp16: what the loss is multiplied by at first; overflows halve it, long quiet doubles it."""
    loss: Literal["cross-entropy", "bce"] = "cross-entropy"
    """bce: binary cross entropy, each class for itself."""
    label_smoothing: Share = 0.0
    """Share of the target spread over all classes."""
    mixup: NotNegative = 0.0
    """Blend pairs of images, the share drawn from Beta(x, x); 0: off. With cutmix, each step does one of the two."""
    cutmix: NotNegative = 0.0
    """Paste a part of one image of a pair into the other, its area drawn from Beta(x, x); 0: off."""


@dataclass(frozen=True)
class Ema:
    """Moving average of the weights; evaluation and `best` then use it."""

    __pydantic_config__ = STRICT

    decay: Share = 0.0
    """Weight of the old average at update u, at most (1 + u) / (10 + u), so that it warms up; 0: off."""
    every: Count = 1
    """Steps between updates."""


@dataclass(frozen=True)
class Evaluate:
    """Exact evaluation: every sample once, on any number of ranks."""

    __pydantic_config__ = STRICT

    every: Interval = "1ep"
    """How often; the end of training always counts."""
    per_rank_batch: Count = 500
    """Images per forward pass on one rank."""
    size: Side = 0
    """Image files: side in pixels; 0: data.size."""
    crop_pct: Area = 0.875
    """Image files: part of the shorter side that the center crop keeps."""
    rectangular: bool = False
    """Image files: batches of like aspect ratio, so that less of each image is cut off."""
    tta: Literal["none", "flip", "flip-translate"] = "none"
    """Average the logits of mirrored, or mirrored and shifted, views."""


@dataclass(frozen=True)
class Checkpoint:
    """What is kept of the run."""

    __pydantic_config__ = STRICT

    every: Interval = "1ep"
    """How often to save; the end of training always counts."""
    keep: Count = 2
    """Newest checkpoints to keep; the best one stays as well."""
    best: Literal["top1", "loss"] = "top1"
    """What makes a checkpoint the best."""


@dataclass(frozen=True)
class Log:
    """What is written down while training."""

    __pydantic_config__ = STRICT

    every: Interval = "10ba"
    """How often; the only steps on which the loop waits for the device."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: bool = False
    """Also log to Weights & Biases (pip install 'paceline[wandb]'); WANDB_MODE=offline needs no network."""
    mlflow: bool = False
    """Also log to MLflow (pip install 'paceline[mlflow]'), to the server that MLFLOW_TRACKING_URI names."""
    project: str = "paceline"
    """Project in Weights & Biases, experiment in MLflow."""


@dataclass(frozen=True)
class GradSync:
    """How ranks exchange gradients."""

    __pydantic_config__ = STRICT

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What gradients are sent as; half-width halves the traffic, fp32 keeps every bit."""
    powersgd_rank: CountOrZero = 0
    """DDP: send gradients as products of matrices of this rank, what is lost added to the next step; 0: off."""
    powersgd_start_step: CountOrZero = 100
    """Steps with whole gradients before PowerSGD begins."""
    bucket_mb: Annotated[Positive, Field(le=1e6)] = 25.0
    """Size of the pieces in which gradients are sent while the backward pass goes on."""
    transport: Literal["auto", "shm", "network"] = "auto"
    """auto: CPU ranks of one machine exchange through its memory, all others over the network."""


@dataclass(frozen=True)
class Fsdp:
    """How a model is sharded (strategy: fsdp)."""

    __pydantic_config__ = STRICT

    reshard_after_forward: bool = True
    """Give gathered weights up between forward and backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep shards in host memory, and bring them to the GPU when they are needed."""


@dataclass(frozen=True)
class Scaled:
    """What --scale-batch changed; the fields it changed hold the new values."""

    __pydantic_config__ = STRICT

    by: Count = 1
    """Factor on the global batch."""
    rule: Literal["none", "linear", "sqrt"] = "none"
    """What became of the learning rate: multiplied by the same factor, or by its square root."""
    from_batch: CountOrZero = 0
    """train.global_batch before."""
    from_lr: NotNegative = 0.0
    """optim.lr before."""


@dataclass(frozen=True)
class Curve:
    """What the recipe's source reached on the way, to see early when a run does not."""

    __pydantic_config__ = STRICT

    metric: Literal["top1", "top5"] = "top1"
    """Which accuracy."""
    points: tuple[tuple[NotNegative, Area], ...] = ()
    """[epoch, accuracy from 0 to 1]; linear in between."""
    tolerance: Share = 0.02
    """How far below counts as clearly below."""
    stop: bool = False
    """End a run that is clearly below."""

    def expected(self, epoch: float) -> float | None:
        """What should have been reached; None before the first point."""
        for (begin, low), (end, high) in pairwise(self.points):
            if begin <= epoch <= end:
                return low + (high - low) * (epoch - begin) / (end - begin)
        return self.points[-1][1] if self.points and epoch >= self.points[-1][0] else None


@dataclass(frozen=True)
class Recipe:
    """One experiment."""

    __pydantic_config__ = STRICT

    name: str
    """Name of the recipe, and of its run unless --name says otherwise."""
    about: About = field(default_factory=About)
    """Source and results."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Decides initial weights, order and augmentation."""
    data: Data = field(default_factory=Data)
    """Images."""
    model: Model = field(default_factory=Model)
    """Network."""
    train: Train = field(default_factory=Train)
    """Length and batch."""
    phases: tuple[Phase, ...] = ()
    """Stretches with settings of their own, one after the other: [{epochs: [0, 7], size: 128, lr: [1.0, 2.0]}, ...]."""
    ramp: Ramp = field(default_factory=Ramp)
    """Image sizes that grow with time, in place of phases."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer."""
    ema: Ema = field(default_factory=Ema)
    """Averaged weights."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """Evaluation."""
    curve: Curve = field(default_factory=Curve)
    """Accuracy that should be reached on the way."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saves."""
    log: Log = field(default_factory=Log)
    """Logging."""
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """single: one rank; ddp: a whole model on every rank; fsdp: shards of one; auto: ddp where there are several."""
    grad_sync: GradSync = field(default_factory=GradSync)
    """Gradient exchange between ranks."""
    fsdp: Fsdp = field(default_factory=Fsdp)
    """Sharding."""
    scaled: Scaled = field(default_factory=Scaled)
    """Scaling of the batch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the device computes it natively, fp16 with loss scaling on other GPUs, else fp32."""
    channels_last: bool = True
    """Keep images and convolutions in NHWC order, which is faster nearly everywhere."""
    compile: bool = False
    """Compile the model with torch.compile."""

    def all_phases(self) -> tuple[Phase, ...]:
        """The phases as written, as the ramp makes them, or one that lasts for ever."""
        length = parse(self.train.duration)
        if self.ramp.sizes[1] and length.unit == "ep":
            return self.ramp.phases(length.value)
        return self.phases or (Phase((0.0, math.inf)),)


PLACE_FIELDS = ("path", "threads", "max_corrupt")
"""Fields of `data` that say where and how it is read; which images are seen, and when, does not depend on them."""


def near_multiples(value: int, of: int) -> list[int]:
    """The multiples of `of` on both sides of `value`, for an error's cure."""
    below = value // of * of
    return [multiple for multiple in (below, below + of) if multiple > 0]
