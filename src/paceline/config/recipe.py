"""A recipe: everything that defines an experiment, and nothing about where it runs.

Frozen dataclasses; the string under a field is its help text. Types and ranges are checked by pydantic when a recipe is
read (`config.io`), what concerns several fields by `problems`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config.data import Data
from paceline.config.duration import Interval, StepDuration, parse
from paceline.config.fields import STRICT, Area, Count, NotNegative, Positive, Share, Side


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
    """Further arguments of the model, e.g. {drop_path_rate: 0.1}."""


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

    name: Literal["constant", "one-cycle", "cosine", "linear", "piecewise"] = "cosine"
    """one-cycle: cosine up over `warmup`, cosine down; cosine, linear: linear warm-up, then that curve down."""
    warmup: StepDuration = "0ba"
    """Time from `start` up to the peak."""
    start: NotNegative = 0.0
    """Factor at the first step of the warm-up."""
    end: NotNegative = 0.0
    """Factor at the end of training."""
    points: tuple[Point, ...] = ()
    """Corners of the piecewise schedule."""


@dataclass(frozen=True)
class Optim:
    """The optimizer."""

    __pydantic_config__ = STRICT

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    lr: Positive = 0.1
    """Peak learning rate, for the mean loss over the global batch."""
    momentum: Share = 0.9
    """SGD's momentum."""
    nesterov: bool = True
    """Nesterov's form of momentum."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates."""
    eps: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NotNegative = 0.0
    """Weight decay; never applied to norms and biases."""
    norm_bias_lr: Positive = 1.0
    """Factor on the learning rate of normalisation layers' biases (airbench: 64)."""
    clip_norm: NotNegative = 0.0
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
    accumulation: Count = 1
    """Micro-batches a rank computes one after the other for one optimizer step."""
    label_smoothing: Share = 0.0
    """Share of the target spread over all classes."""


@dataclass(frozen=True)
class Ema:
    """Moving average of the weights; evaluation and `best` then use it."""

    __pydantic_config__ = STRICT

    decay: Share = 0.0
    """Weight of the old average at each update; 0: off."""
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
    """Photographs: side in pixels; 0: data.size."""
    crop_share: Area = 0.875
    """Photographs: share of the shorter side that the middle crop sees."""
    rectangular: bool = False
    """Photographs: batches of like aspect ratio, so that less of each image is cut off."""
    views: Literal["none", "flip", "flip-translate"] = "none"
    """Average the logits of mirrored, or mirrored and shifted, views."""


@dataclass(frozen=True)
class Checkpoint:
    """What is kept of the run."""

    __pydantic_config__ = STRICT

    every: Interval = "1ep"
    """How often to save; the end of training always counts."""
    keep: Count = 2
    """Newest saves to keep; the best one stays as well."""
    best: Literal["top1", "loss"] = "top1"
    """What makes a save the best."""


@dataclass(frozen=True)
class Log:
    """What is written down while training."""

    __pydantic_config__ = STRICT

    every: Interval = "10ba"
    """How often; the only steps on which the loop waits for the device."""
    tensorboard: bool = True
    """Write TensorBoard event files."""


@dataclass(frozen=True)
class Exchange:
    """How ranks exchange gradients."""

    __pydantic_config__ = STRICT

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What gradients are sent as; half-width halves the traffic, fp32 keeps every bit."""
    bucket_mb: Positive = 25.0
    """Size of the pieces in which gradients are sent while the backward pass goes on."""


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
    optim: Optim = field(default_factory=Optim)
    """Optimizer."""
    ema: Ema = field(default_factory=Ema)
    """Averaged weights."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """Evaluation."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saves."""
    log: Log = field(default_factory=Log)
    """Logging."""
    exchange: Exchange = field(default_factory=Exchange)
    """Gradient exchange between ranks."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """auto: bf16 where the device computes it natively, fp16 with loss scaling on other GPUs, else fp32."""
    channels_last: bool = True
    """Keep images and convolutions in NHWC order, which is faster nearly everywhere."""
    compile: bool = False
    """Compile the model with torch.compile."""


PLACE_FIELDS = ("path", "threads", "max_damaged")
"""Fields of `data` that say where and how it is read; which images are seen, and when, does not depend on them."""


def problems(recipe: Recipe) -> Iterator[str]:
    """What is wrong with a recipe beyond the type and range of single fields."""
    train, schedule = recipe.train, recipe.optim.schedule
    if train.global_batch % train.accumulation:
        yield (
            f"train.accumulation={train.accumulation} does not divide train.global_batch={train.global_batch}; "
            f"try {' or '.join(map(str, near_multiples(train.global_batch, train.accumulation)))} for the batch"
        )
    if len(recipe.data.mean) != len(recipe.data.std):
        yield f"data.mean has {len(recipe.data.mean)} values, data.std {len(recipe.data.std)}; give both or neither"
    if schedule.name == "piecewise" and not schedule.points:
        yield "optim.schedule.points is empty; a piecewise schedule needs e.g. [{at: 0ep, factor: 1.0}]"
    if schedule.name != "piecewise" and schedule.points:
        yield f"optim.schedule.points is only read by a piecewise schedule, not by {schedule.name!r}; remove one"
    for name in ("crop_scale", "crop_ratio"):
        low, high = getattr(recipe.data.augment, name)
        if low > high:
            yield f"data.augment.{name}={low}, {high}: the first is larger than the second; swap them"
    if recipe.data.name in ("imagenet", "shards", "folder"):
        for name in ("translate", "cutout"):
            if getattr(recipe.data.augment, name):
                yield f"data.augment.{name} is for images in memory, and {recipe.data.name} is not; set it to 0"
    yield from _out_of_order("optim.schedule.points", [point.at for point in schedule.points])
    yield from _out_of_order("data.sizes", [change.at for change in recipe.data.sizes])


def _out_of_order(path: str, times: list[str]) -> Iterator[str]:
    amounts = [parse(time) for time in times]
    if len({amount.unit for amount in amounts}) > 1:
        yield f"{path} mixes ep and ba ({', '.join(times)}); use one unit"
    elif amounts != sorted(amounts):
        yield f"{path} are not in order of time: {', '.join(times)}"


def near_multiples(value: int, of: int) -> list[int]:
    """The multiples of `of` on both sides of `value`, for an error's cure."""
    below = value // of * of
    return [multiple for multiple in (below, below + of) if multiple > 0]
