"""A recipe: everything that defines an experiment, and nothing about where it runs.

The string below a field is its help text. Pydantic checks types and ranges when a recipe is read (`config.io`);
`config.problems` checks what involves several fields.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config.data import Data
from paceline.config.duration import Interval, StepDuration, parse
from paceline.config.fields import (
    STRICT,
    ClassWeights,
    Count,
    CountOrZero,
    Fraction,
    FractionOrOne,
    NotNegative,
    Positive,
    Side,
)
from paceline.config.model import Model
from paceline.config.optim import Ema, Optim
from paceline.config.phases import Phase, Ramp
from paceline.config.tracking import About, Checkpoint, ExpectedCurve, Log


@dataclass(frozen=True)
class Train:
    """Duration, batch size and loss."""

    __pydantic_config__ = STRICT

    duration: StepDuration = "10ep"
    """Length of the run, in epochs (10ep) or steps (500ba)."""
    global_batch: Count = 256
    """Images per optimizer step over all ranks together: per-rank batch x ranks x accumulation."""
    grad_accumulation: Count = 1
    """Gradient accumulation: micro-batches per rank and optimizer step."""
    init_loss_scale: Annotated[Positive, Field(le=2.0**120)] = 65536.0
    """fp16: initial loss scale; it is halved on overflow and doubled after many steps without one."""
    loss: str = "cross-entropy"
    """`cross-entropy`, `bce` (binary cross-entropy per class), or the name of a registered loss."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of a registered loss."""
    class_weights: ClassWeights = "none"
    """Weight of an image in the loss, by its class: none, `balanced` (inversely proportional to the number of training
    images), or {class: weight}, 1 for other classes. Their mean over the training images is scaled to 1."""
    label_smoothing: Fraction = 0.0
    """Fraction of the target that is spread over all classes."""
    bce_target_threshold: Fraction = 0.0
    """bce: after label smoothing and mixing, targets above this value become 1 and all others 0; 0: targets are used as
    they are."""
    mixup: NotNegative = 0.0
    """mixup alpha: blend pairs of images; 0: off. If cutmix is also set, each step uses one of the two."""
    cutmix: NotNegative = 0.0
    """cutmix alpha: paste a rectangle of one image into another; 0: off."""


AS_TRAINED = "training"
"""evaluate.variant: the variant that the phase trains on."""


@dataclass(frozen=True)
class Evaluate:
    """Exact evaluation: every sample exactly once, on any number of ranks."""

    __pydantic_config__ = STRICT

    every: Interval = "1ep"
    """How often to evaluate; the end of training is always evaluated."""
    per_rank_batch: Count = 500
    """Images per forward pass and rank."""
    size: Side = 0
    """Image files: side in pixels; 0: that at which pretrained weights are tested, if data.size is not set, else
    data.size."""
    crop_pct: FractionOrOne = 0.0
    """Image files: fraction of the shorter side that the center crop keeps; 0: that of pretrained weights, else
    0.875."""
    variant: str = ""
    """Variant of the prepared images, e.g. max-400-q90, or `training`: the one that the phase trains on. Empty:
    `original` if the data has it, else `training`."""
    rectangular: bool = False
    """Image files: batches of similar aspect ratio, so that less of each image is cropped."""
    tta: Literal["none", "flip", "flip-translate"] = "none"
    """Test-time augmentation: average the logits of flipped, or flipped and shifted, images."""

    def variant_for(self, trained: str) -> str:
        """The variant to evaluate on after training on this one; empty: the default."""
        return trained if self.variant == AS_TRAINED else self.variant

    @property
    def center_crop(self) -> float:
        """The fraction that the center crop keeps."""
        return self.crop_pct or 0.875


@dataclass(frozen=True)
class EarlyStop:
    """End training when it no longer improves. The schedule always extends over the whole train.duration."""

    __pydantic_config__ = STRICT

    metric: Literal["", "top1", "top5", "loss"] = ""
    """Validation metric that must improve; empty: checkpoint.best."""
    patience: CountOrZero = 0
    """Stop after this many evaluations in a row without an improvement; 0: never."""
    min_delta: NotNegative = 0.0
    """Smallest improvement that counts; a fraction from 0 to 1 for top1 and top5 (0.001: 0.1 percentage points)."""


@dataclass(frozen=True)
class GradSync:
    """Gradient synchronization (all-reduce) between ranks."""

    __pydantic_config__ = STRICT

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of the all-reduce; bf16 and fp16 halve the traffic, fp32 is exact."""
    powersgd_rank: CountOrZero = 0
    """DDP: compress gradients with PowerSGD of this rank, with error feedback; 0: off."""
    powersgd_start_step: CountOrZero = 100
    """Steps with uncompressed gradients before PowerSGD starts."""
    bucket_mb: Annotated[Positive, Field(le=1e6)] = 25.0
    """Size of the buckets in which gradients are reduced during the backward pass."""
    transport: Literal["auto", "shm", "network"] = "auto"
    """auto: shared memory (shm) for CPU ranks on one host, the network for all others."""


@dataclass(frozen=True)
class Fsdp:
    """Sharding of the model (strategy: fsdp)."""

    __pydantic_config__ = STRICT

    mesh: Literal["auto", "flat", "hybrid"] = "auto"
    """flat: shard over all ranks; hybrid (HSDP): shard within a node and replicate across nodes, which keeps most
    traffic inside the nodes; auto: hybrid on several nodes with equally many ranks, else flat."""
    reshard_after_forward: bool = True
    """Free gathered weights between forward and backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep shards in host memory, and copy them to the GPU when they are needed."""


@dataclass(frozen=True)
class Scaled:
    """What --scale-batch changed; the changed fields hold the new values."""

    __pydantic_config__ = STRICT

    by: Count = 1
    """Factor on the global batch."""
    rule: Literal["none", "linear", "sqrt"] = "none"
    """Scaling of the learning rate: by the same factor, or by its square root."""
    from_batch: CountOrZero = 0
    """train.global_batch before scaling."""
    from_lr: NotNegative = 0.0
    """optim.lr before scaling."""


@dataclass(frozen=True)
class Recipe:
    """One experiment."""

    __pydantic_config__ = STRICT

    name: str
    """Name of the recipe, and of its run unless --name is given."""
    about: About = field(default_factory=About)
    """Source and results."""
    imports: tuple[str, ...] = ()
    """Python modules that are imported first, so that the recipe can use what they register; `--import MODULE` adds
    one, and finds it in the current folder too."""
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Registered callbacks and their options, called in this order, e.g. {my-stopper: {evaluations: 5}}."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of initial weights, sample order and augmentation."""
    data: Data = field(default_factory=Data)
    """Dataset."""
    model: Model = field(default_factory=Model)
    """Model."""
    train: Train = field(default_factory=Train)
    """Duration and batch size."""
    phases: tuple[Phase, ...] = ()
    """Consecutive parts of training with their own settings: [{epochs: [0, 7], size: 128, lr: [1.0, 2.0]}, ...]."""
    ramp: Ramp = field(default_factory=Ramp)
    """Progressive resizing, instead of phases."""
    optim: Optim = field(default_factory=Optim)
    """Optimizer."""
    ema: Ema = field(default_factory=Ema)
    """Moving average of the weights."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """Evaluation."""
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    """Early stopping."""
    curve: ExpectedCurve = field(default_factory=ExpectedCurve)
    """Expected accuracy over time."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Checkpoints."""
    log: Log = field(default_factory=Log)
    """Logging."""
    strategy: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    """single: one rank; ddp: the whole model on every rank; fsdp: a sharded model; auto: ddp on several ranks."""
    grad_sync: GradSync = field(default_factory=GradSync)
    """Gradient synchronization."""
    fsdp: Fsdp = field(default_factory=Fsdp)
    """Sharding."""
    scaled: Scaled = field(default_factory=Scaled)
    """Scaling of the batch."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """cuda: NVIDIA GPUs, and AMD GPUs with ROCm; mps: Apple GPUs, one process; auto: cuda if there is a GPU."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Mixed precision. auto: bf16 if the device supports it, fp16 with loss scaling on other GPUs, else fp32."""
    channels_last: bool = True
    """Keep images and convolutions in channels-last (NHWC) memory format, which is usually faster."""
    tf32: bool = True
    """GPUs: compute fp32 matrix multiplications and convolutions in TF32, which is several times faster; false: full
    fp32."""
    compile: bool = False
    """Compile the repeated blocks of the model with torch.compile, once per image size and batch size."""

    def all_phases(self) -> tuple[Phase, ...]:
        """The phases of the recipe or of its ramp, or one endless phase."""
        length = parse(self.train.duration)
        if self.ramp.sizes[1] and length.unit == "ep":
            return self.ramp.phases(length.value)
        return self.phases or (Phase((0.0, math.inf)),)


PLACE_FIELDS = ("path", "decode_threads", "max_corrupt")
"""Fields of `data` about where and how it is read; the order of images does not depend on them."""


def near_multiples(value: int, of: int) -> list[int]:
    """The positive multiples of `of` next to `value`, as suggestions in an error message."""
    below = value // of * of
    return [multiple for multiple in (below, below + of) if multiple > 0]
