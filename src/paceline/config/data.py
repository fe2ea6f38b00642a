"""The part of a recipe that says which images are seen, and how."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from paceline.config.fields import STRICT, Area, Count, CountOrZero, NotNegative, Positive, Share, Side

BUILT_IN = ("digits", "synthetic")
"""Data sets that need no files."""
IN_MEMORY = (*BUILT_IN, "cifar10")
"""Data sets that are held in memory as a whole."""


@dataclass(frozen=True)
class Synthetic:
    """Shape of the generated set (data.name: synthetic)."""

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
    """What happens to a training image; a pure function of (seed, epoch, sample id)."""

    __pydantic_config__ = STRICT

    flip: Literal["none", "random", "alternating"] = "none"
    """Mirror left-right: by chance, or alternating from epoch to epoch after a random start."""
    translate: CountOrZero = 0
    """Shift by up to this many pixels each way, the border filled by reflection."""
    cutout: CountOrZero = 0
    """Side of a square set to the mean color at a random place; 0 for none."""
    crop: Literal["random", "center"] = "random"
    """Image files: a random crop (torchvision's RandomResizedCrop), or a center crop, as in evaluation."""
    crop_scale: tuple[Area, Area] = (0.08, 1.0)
    """Image files: smallest and largest share of the area that a random crop sees."""
    crop_ratio: tuple[Positive, Positive] = (0.75, 4 / 3)
    """Image files: narrowest and widest aspect ratio of a random crop."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """Image files: colors and shapes changed by chance, with torchvision's operations."""
    num_ops: Annotated[Count, Field(le=32)] = 2
    """randaugment: operations an image."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """randaugment: how strong they are, of 30."""
    color_jitter: Annotated[NotNegative, Field(le=1)] = 0.0
    """Image files: change brightness, contrast and saturation by up to this share."""
    random_erasing: Share = 0.0
    """Chance that a random rectangle of an image is set to the mean color."""


@dataclass(frozen=True)
class Data:
    """Which images, and how they reach the model."""

    __pydantic_config__ = STRICT

    name: Literal["", "digits", "cifar10", "synthetic", "imagenet", "shards", "folder", "list"] = ""
    """`digits` and `synthetic` are built in; `cifar10`, `imagenet` and `shards` are what `paceline prepare` wrote;
    `folder` is a tree with a folder for each class, `list` a CSV file of images. Empty: detected from data.path."""
    path: str = ""
    """Prepared folder (also its https:// or s3:// address), image folder or CSV list; empty: $PACELINE_DATA/NAME, or
    data/NAME below the current folder."""
    variant: str = ""
    """Which size of prepared images, if there are several, e.g. max-400-q90."""
    size: Side = 0
    """Side in pixels that images are resized to; 0: their own size in memory, 224 for image files."""
    mean: tuple[float, ...] = ()
    """Mean per channel (0-1) to subtract; empty: measured, or ImageNet's for image files."""
    std: tuple[Positive, ...] = ()
    """Standard deviation per channel (0-1) to divide by; empty: measured, or ImageNet's for image files."""
    augment: Augment = field(default_factory=Augment)
    """Training augmentation."""
    decode_threads: CountOrZero = 0
    """Threads that decode images, in each process; 0: as many as the process computes with."""
    aug_repeats: Annotated[Count, Field(le=64)] = 1
    """Repeated augmentation: show each image of an epoch this many times, and only that share of all images."""
    max_corrupt: Share = 0.001
    """Share of corrupt samples, replaced by their neighbors, beyond which training stops."""
    synthetic: Synthetic = field(default_factory=Synthetic)
    """Shape of the generated set."""
