"""The data section of a recipe: which images are used, and how they are augmented."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.config.fields import (
    STRICT,
    Count,
    CountOrZero,
    Fraction,
    FractionOrOne,
    NotNegative,
    Positive,
    PositiveFraction,
    Side,
)
from paceline.errors import Problem
from paceline.system.remote import is_remote, last_name, redacted

BUILT_IN = ("digits", "synthetic")
"""Datasets that need no files."""
ARRAYS = ("cifar10", "cifar100")
"""Datasets that `paceline prepare` writes as arrays."""
IN_MEMORY = (*BUILT_IN, *ARRAYS)
IMAGENET_IMAGES = (1_281_167, 50_000)
"""Training and validation images of ImageNet."""
"""Datasets that are held in memory."""
FROM_FILES = ("imagenet", "shards", "folder", "list")
"""Kinds of data that are read from files during training."""
Interpolation = Literal["bilinear", "bicubic"]
"""How images are resized; both are antialiased."""
Policy = Literal["none", "randaugment", "trivialaugment", "timm-randaugment"]
"""Automatic augmentation."""
TIMM_MAX_MAGNITUDE = 10
"""The largest magnitude of timm's operations."""
_TIMM_FIELDS = ("magnitude_std", "op_probability", "increasing")


def dataset_name(kind: str, place: str) -> str:
    """Return the name of a dataset: that of its folder, list or URL, or its kind if that is a dataset, e.g. cifar10."""
    if not place or kind not in ("", *FROM_FILES):
        return kind
    if is_remote(place):
        return last_name(redacted(place)) or kind
    path = Path(os.path.abspath(place))  # "." and ".." have no name
    return (path.stem if kind == "list" else path.name) or kind


@dataclass(frozen=True)
class Synthetic:
    """Shape of the generated dataset (data.name: synthetic)."""

    __pydantic_config__ = STRICT

    train_samples: Count = 2048
    """Training images to generate."""
    val_samples: Count = 512
    """Validation images to generate."""
    channels: Count = 3
    """Color channels."""
    size: Count = 32
    """Height and width in pixels."""
    classes: Annotated[int, Field(ge=2)] = 10
    """Number of classes."""


@dataclass(frozen=True)
class Augment:
    """Training augmentation; a pure function of (seed, epoch, sample id)."""

    __pydantic_config__ = STRICT

    flip: Literal["none", "random", "alternating"] = "none"
    """Horizontal flip: random, or alternating between epochs after a random start."""
    translate: CountOrZero = 0
    """Datasets in memory: random shift by up to this many pixels in each direction, with reflection padding."""
    cutout: CountOrZero = 0
    """Side in pixels of a square at a random place that is set to the mean color; 0: off."""
    crop: Literal["random", "center"] = "random"
    """Image files: a random crop (torchvision's RandomResizedCrop), or a center crop, as in evaluation."""
    crop_scale: tuple[PositiveFraction, PositiveFraction] = (0.08, 1.0)
    """Image files: minimum and maximum fraction of the area that a random crop covers."""
    crop_ratio: tuple[Positive, Positive] = (0.75, 4 / 3)
    """Image files: minimum and maximum aspect ratio of a random crop."""
    random_interpolation: bool = False
    """Image files: resize each crop with the bilinear or the bicubic filter at random, as timm does. If false,
    data.interpolation applies. timm-randaugment also draws the filter of each operation."""
    policy: Policy = "none"
    """Image files: automatic augmentation. randaugment and trivialaugment are those of torchvision; timm-randaugment is
    that of timm, which has other operations and magnitudes."""
    num_ops: Annotated[Count, Field(le=32)] = 2
    """randaugment, timm-randaugment: operations per image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of the operations: 0 to 30 with randaugment, 0 to 10 with timm-randaugment."""
    magnitude_std: Annotated[NotNegative, Field(le=10)] = 0.0
    """timm-randaugment: standard deviation of the magnitude, which is drawn for each operation (timm's mstd)."""
    op_probability: FractionOrOne = 0.5
    """timm-randaugment: probability of each operation (timm's p)."""
    increasing: bool = False
    """timm-randaugment: use operations whose effect increases with the magnitude (timm's inc1)."""
    color_jitter: Annotated[NotNegative, Field(le=1)] = 0.0
    """Image files: random change of brightness, contrast and saturation by up to this fraction."""
    random_erasing: Fraction = 0.0
    """Probability that a random rectangle of an image is erased, after normalization."""
    random_erasing_mode: Literal["const", "pixel"] = "const"
    """const: the rectangle is set to the mean color, as in torchvision; pixel: every value in it is drawn from a normal
    distribution, as in timm."""
    custom: dict[str, dict[str, Any]] = field(default_factory=dict, hash=False)
    """Registered augmentations and their options, applied in this order, e.g. {my-blur: {sigma: 2}}."""


@dataclass(frozen=True)
class Data:
    """Which images, and how they are read and augmented."""

    __pydantic_config__ = STRICT

    name: str = ""
    """`digits` and `synthetic` are built in; `cifar10`, `cifar100`, `imagenet` and `shards` are output of `paceline
    prepare`; `folder` is a tree with one folder per class, `list` a CSV, TSV, JSONL or Parquet file of images. Empty:
    detected from data.path. Other names are those of registered datasets."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of a registered dataset."""
    path: str = ""
    """Prepared folder (also as an https:// or s3:// URL), image folder or list; empty: $PACELINE_DATA/NAME, or
    data/NAME in the current folder."""
    variant: str = ""
    """Which size of prepared images, if there are several, e.g. max-400-q90."""
    size: Side = 0
    """Side in pixels that images are resized to; 0: that of pretrained weights, else the original size for datasets in
    memory and 224 for image files."""
    interpolation: Literal["auto", Interpolation] = "auto"
    """How images are resized, antialiased, in training and evaluation: `bilinear`, or `bicubic` as many timm models
    expect. `auto`: bilinear, unless pretrained weights say otherwise."""
    mean: tuple[float, ...] = ()
    """Mean per channel (0-1) to subtract; empty: that of pretrained weights, else measured, or ImageNet's for image
    files."""
    std: tuple[Positive, ...] = ()
    """Standard deviation per channel (0-1) to divide by; empty: as for the mean."""
    augment: Augment = field(default_factory=Augment)
    """Training augmentation."""
    decode_threads: CountOrZero = 0
    """Threads that decode images, per process; 0: as many as the compute threads of the process."""
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """shuffle: every image once per epoch; balanced: every class equally often, in epochs of the same length, with the
    images of a class used in turn."""
    aug_repeats: Annotated[Count, Field(le=64)] = 1
    """Repeated augmentation: a step has this many copies of each image, each with its own augmentation and, where
    possible, on another rank. An epoch shows only 1/N of all images."""
    max_corrupt: Fraction = 0.001
    """Maximum fraction of corrupt samples, which are replaced by their neighbors; above it training stops."""
    synthetic: Synthetic = field(default_factory=Synthetic)
    """Shape of the generated dataset."""

    @property
    def resize_filter(self) -> Interpolation:
        """How images are resized, once pretrained weights have been considered."""
        return "bilinear" if self.interpolation == "auto" else self.interpolation


def augment_problems(data: Data) -> Iterator[Problem]:
    """Yield the problems of the augmentation that involve several fields."""
    augment, default = data.augment, Augment()
    for name in ("crop_scale", "crop_ratio"):
        low, high = getattr(augment, name)
        if low > high:
            yield Problem(
                "range-reversed",
                f"data.augment.{name}={low}, {high}: the first value is larger than the second. Swap them.",
            )
    if data.name not in IN_MEMORY:
        if augment.translate:
            yield Problem(
                "augment-needs-memory",
                f"data.augment.translate={augment.translate} needs a dataset held in memory, but "
                f"{data.name or data.path} is not. Set it to 0.",
            )
    else:
        for name in ("policy", "color_jitter", "random_interpolation"):
            if (value := getattr(augment, name)) != getattr(default, name):
                yield Problem(
                    "augment-needs-files",
                    f"data.augment.{name}={value} needs image files, but {data.name} has none. Set it to "
                    f"{str(getattr(default, name)).lower()}.",
                )
    if augment.policy == "timm-randaugment" and augment.magnitude > TIMM_MAX_MAGNITUDE:
        yield Problem(
            "magnitude-too-large",
            f"data.augment.magnitude={augment.magnitude} is larger than {TIMM_MAX_MAGNITUDE}, the largest magnitude of "
            f"timm-randaugment. Use at most {TIMM_MAX_MAGNITUDE}, or the policy randaugment, which goes up to 30.",
        )
    owners = dict.fromkeys(_TIMM_FIELDS, augment.policy == "timm-randaugment")
    owners["random_erasing_mode"] = bool(augment.random_erasing)
    for name, used in owners.items():
        if not used and getattr(augment, name) != getattr(default, name):
            wanted = "data.augment.policy=timm-randaugment" if name in _TIMM_FIELDS else "data.augment.random_erasing"
            yield Problem(
                "augment-field-unused",
                f"data.augment.{name}={getattr(augment, name)} has no effect without {wanted}. Set {wanted}, or remove "
                f"data.augment.{name}.",
            )
