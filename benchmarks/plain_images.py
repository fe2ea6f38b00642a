"""Images for plain loops: class folders are read with Pillow and torchvision, as in the sources of the recipes."""

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from paceline.system.torchvision_compat import allow_torchvision

allow_torchvision()
from torchvision.transforms import InterpolationMode  # noqa: E402
from torchvision.transforms import functional as tv  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Transform = Callable[[Image.Image], torch.Tensor]


@dataclass(frozen=True)
class Reading:
    """How the images of a training epoch are read."""

    batch: int
    size: int
    variant: str = "original"
    """`original`, or the limit of the shorter or longer side of re-encoded files: short-160, max-400."""
    min_crop: float = 0.08
    repeats: int = 1
    """Number of copies of an image in an epoch, which has 1/repeats of all images."""


@dataclass(frozen=True)
class Validation:
    """How images are validated."""

    size: int
    resize: int
    """The shorter side before the center crop."""
    variant: str = "original"
    rectangular: int = 0
    """Images per batch of similar aspect ratio; 0: square crops."""
    flip: bool = False
    """Average the logits of the image and its mirror image."""
    bicubic: bool = False


class Folder:
    """Images in split/class/file."""

    def __init__(self, root: Path):
        classes = sorted(path.name for path in (root / "train").iterdir())
        self.num_classes = len(classes)
        self.files = {
            split: [
                (path, label) for label, name in enumerate(classes) for path in sorted((root / split / name).iterdir())
            ]
            for split in ("train", "val")
        }

    def steps_per_epoch(self, reading: Reading) -> int:
        return len(self.files["train"]) // reading.batch

    def batches(
        self, reading: Reading, transform: Transform, generator: torch.Generator
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the batches of an epoch in random order, without the last incomplete one."""
        files = self.files["train"]
        order = torch.randperm(len(files), generator=generator).repeat_interleave(reading.repeats)[: len(files)]
        for ids in order.split(reading.batch):
            if len(ids) == reading.batch:
                chosen = [files[number] for number in ids.tolist()]
                images = [transform(opened(path, reading.variant)) for path, _ in chosen]
                yield torch.stack(images), torch.tensor([label for _, label in chosen])

    def validate(self, net: nn.Module, how: Validation) -> tuple[float, float]:
        """Return loss and top-1 of a network in evaluation mode."""
        net.eval()
        losses, correct = 0.0, 0
        files = self.files["val"]
        for images, labels in self._validation_batches(files, how):
            with torch.no_grad():
                logits = net(images)
                if how.flip:
                    logits = (logits + net(images.flip(-1))) / 2
            losses += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(1) == labels).sum())
        return losses / len(files), correct / len(files)

    def _validation_batches(
        self, files: list[tuple[Path, int]], how: Validation
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batch, aspects = how.rectangular or 100, {path: _aspect(opened(path, how.variant)) for path, _ in files}
        if how.rectangular:
            files = sorted(files, key=lambda file: aspects[file[0]])
        for begin in range(0, len(files), batch):
            part, size = files[begin : begin + batch], (how.size, how.size)
            if how.rectangular:
                size = _rectangle(how.size, float(np.mean([aspects[path] for path, _ in part])))
            images = [_cropped(opened(path, how.variant), how, size) for path, _ in part]
            yield torch.stack(images), torch.tensor([label for _, label in part])


def _aspect(image: Image.Image) -> float:
    return image.width / image.height


def _rectangle(size: int, aspect: float) -> tuple[int, int]:
    """Return height and width with this aspect ratio, the longer side a multiple of 8 pixels."""
    if aspect < 1:
        return int(size / aspect) // 8 * 8, size
    return size, int(size * aspect) // 8 * 8


def _cropped(image: Image.Image, how: Validation, size: tuple[int, int]) -> torch.Tensor:
    mode = InterpolationMode.BICUBIC if how.bicubic else InterpolationMode.BILINEAR
    resized = tv.resize(image, [how.resize], interpolation=mode)
    return normalized(tv.center_crop(resized, list(size)))


def normalized(image: Image.Image) -> torch.Tensor:
    """Return an image as a normalized tensor."""
    return tv.normalize(tv.to_tensor(image), list(MEAN), list(STD))


@lru_cache(maxsize=4096)
def opened(path: Path, variant: str = "original") -> Image.Image:
    """Return an image, either unchanged or as if it had been re-encoded with a limited side."""
    image = Image.open(path).convert("RGB")
    kind, _, limit = variant.partition("-")
    if kind == "original":
        return image
    side = min(image.size) if kind == "short" else max(image.size)
    if side > int(limit):
        size = (round(image.width * int(limit) / side), round(image.height * int(limit) / side))
        image = image.resize(size, Image.Resampling.LANCZOS)
    out = io.BytesIO()
    image.save(out, "jpeg", quality=90)
    return Image.open(out).convert("RGB")


def seeded(seed: int) -> torch.Generator:
    """Seed everything that transforms draw from; return a generator for the order of images."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)
