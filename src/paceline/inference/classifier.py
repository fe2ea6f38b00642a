"""A trained model in use, whatever file it came from: images in, classes with probabilities out."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paceline.config.data import Interpolation
from paceline.data.center import center_boxes
from paceline.data.classes import Class
from paceline.data.images import crop, decode
from paceline.data.load.batch import Normalize
from paceline.data.pillow import MAX_BYTES, check_file, plain
from paceline.engine import precision
from paceline.engine.evaluation.evaluate import predict
from paceline.errors import UserError
from paceline.inference.prediction_files import ClassProbability
from paceline.system.untrusted import Unreadable, is_plain

_MAX_SIDE = 4096
Forward = Callable[[torch.Tensor], torch.Tensor]
"""Maps normalized images (N, C, H, W) to logits (N, classes)."""


@dataclass(frozen=True)
class ModelMetadata:
    """What is needed to use a model, from a checkpoint or an export."""

    classes: tuple[Class, ...]
    size: int
    """Height and width of the images."""
    crop_pct: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation = "bilinear"

    @classmethod
    def of(cls, values: Any, origin: object) -> "ModelMetadata":
        """Return the metadata in a JSON value, which may be untrusted. UserError names the problem."""
        try:
            if not is_plain(values):
                raise ValueError("it has numbers that are not finite, or is nested too deeply")
            settings = values["preprocessing"]
            height, width = map(int, settings["size"])
            mean, std = (tuple(map(float, settings[name])) for name in ("mean", "std"))
            classes = tuple(Class(str(id_), str(name)) for id_, name in values["classes"])
            crop_pct, interpolation = float(settings["crop_pct"]), settings["interpolation"]
        except (KeyError, TypeError, ValueError) as error:
            problem = f"its metadata is incomplete or invalid ({type(error).__name__}: {str(error)[:160]})"
            raise _invalid(origin, f"{problem}. Use another checkpoint, or export the model again") from None
        if height != width or not 1 <= height <= _MAX_SIDE:
            limit = f"only square images of at most {_MAX_SIDE}x{_MAX_SIDE} pixels are supported"
            raise _invalid(origin, f"preprocessing.size is {height}x{width}, but {limit}")
        if len(mean) not in (1, 3) or len(std) != len(mean) or min(std) <= 0 or not 0 < crop_pct <= 1:
            rule = "mean and std need one or three values each, std positive ones, and crop_pct is from 0 to 1"
            raise _invalid(origin, f"preprocessing has mean={mean}, std={std}, crop_pct={crop_pct}, but {rule}")
        if interpolation not in ("bilinear", "bicubic"):
            problem = f"preprocessing.interpolation is {interpolation!r:.40}"
            raise _invalid(origin, f"{problem}, but only bilinear and bicubic are supported")
        if len(classes) < 2:
            raise _invalid(origin, f"the number of classes is {len(classes)}, but a classifier needs at least two")
        return cls(classes, height, crop_pct, mean, std, interpolation)

    @property
    def colors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of red, green and blue, also for a model of gray images."""
        return (self.mean * 3, self.std * 3) if len(self.mean) == 1 else (self.mean, self.std)


def _invalid(origin: object, problem: str) -> UserError:
    return UserError("invalid-model-metadata", f"{origin} cannot be used: {problem}.", path=origin)


class Classifier:
    """Predicts the classes of images, with the pixels and the computation of an evaluation. Thread-safe.

    `classifier.classes` are the names of the classes, `classifier.size` is the side of its images in pixels.
    """

    def __init__(
        self,
        origin: str,
        metadata: ModelMetadata,
        forward: Forward,
        device: torch.device,
        resolved: str = "fp32",
        tta: str = "none",
        temperature: float = 1.0,
    ):
        self.origin, self.metadata, self.device, self.tta = origin, metadata, device, tta
        self.temperature = temperature
        self._forward, self._precision = forward, resolved
        mean, std = map(torch.tensor, metadata.colors)
        self._normalize = Normalize(mean, std, device)
        self._lock = threading.Lock()

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.metadata.classes)

    @property
    def size(self) -> int:
        return self.metadata.size

    def __repr__(self) -> str:
        return f"Classifier({self.origin!r}: {len(self.classes)} classes, {self.size}x{self.size} pixels)"

    @torch.no_grad()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of normalized images with three channels, in float32."""
        if len(self.metadata.mean) == 1:
            images = _gray(images)
        with self._autocast():
            logits = predict(self._forward, images, self.tta)
        expected = (len(images), len(self.metadata.classes))
        if tuple(logits.shape) != expected:
            raise _invalid(self.origin, f"{expected[1]} classes, but the model returns shape {tuple(logits.shape)}")
        return logits.float()

    def _autocast(self) -> AbstractContextManager[object]:
        return precision.autocast(self._precision, self.device)

    def topk(self, logits: torch.Tensor, top: int) -> list[tuple[ClassProbability, ...]]:
        """Return the most probable classes of every image, the best first."""
        return [self.named(*row) for row in zip(*(part.tolist() for part in self.best(logits, top)), strict=True)]

    def best(self, logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return numbers and probabilities of the most probable classes, each (N, top)."""
        scaled = logits if self.temperature == 1 else logits / self.temperature
        probabilities, numbers = scaled.softmax(1).topk(min(top, logits.shape[1]), dim=1)
        return numbers, probabilities

    def named(self, numbers: Sequence[int], probabilities: Sequence[float]) -> tuple[ClassProbability, ...]:
        """Return classes by number with their probabilities."""
        found = (self.metadata.classes[number] for number in numbers)
        return tuple(
            ClassProbability(each.id, each.name, value) for each, value in zip(found, probabilities, strict=True)
        )

    def classify_pixels(self, pixels: np.ndarray, top: int) -> list[tuple[ClassProbability, ...]]:
        """Return the most probable classes for decoded center crops, uint8 (N, 3, size, size)."""
        with self._lock:  # requests in parallel would compete for the same cores
            images = self._normalize(torch.from_numpy(pixels).to(self.device))
            return self.topk(self.logits(images), top)  # waits for the device

    def __call__(
        self, images: Sequence[str | Path | bytes | Image.Image], top: int = 5
    ) -> list[tuple[ClassProbability, ...]]:
        """Return the most probable classes of images: files, their content as bytes, or PIL images, in one batch."""
        _check_images(images, top)
        pixels = np.empty((len(images), 3, self.size, self.size), np.uint8)
        for number, image in enumerate(images):
            try:
                self._decode(image, pixels[number])
            except (Unreadable, OSError) as error:
                name = f"image {number}" if isinstance(image, bytes | Image.Image) else str(image)
                message = f"{name} cannot be read: {error}. Omit it, or give an image file."
                raise UserError("image-unreadable", message, image=name) from None
        return self.classify_pixels(pixels, top) if len(images) else []

    def _decode(self, image: str | Path | bytes | Image.Image, out: np.ndarray) -> None:
        def choose(sizes: np.ndarray, _: np.ndarray) -> np.ndarray:
            return center_boxes(sizes, self.metadata.crop_pct, self.size, self.size)

        if isinstance(image, Image.Image):
            image = plain(image)
            box = choose(np.array([image.size]), out)[0]
            out[:] = crop(image, box, self.size, self.size, self.metadata.interpolation)
            return
        content = image if isinstance(image, bytes) else _content(Path(image))
        decode(content, choose, np.zeros(1, np.int64), out, self.metadata.interpolation)


def _check_images(images: Any, top: int) -> None:
    """Refuse one image instead of a list, of which a string would be a list of letters, and other types."""
    kinds = (str, Path, bytes, Image.Image)
    wrong = [images] if isinstance(images, kinds) else [each for each in images if not isinstance(each, kinds)]
    if wrong:
        message = f"argument images={wrong[0]!r:.80} is invalid. Give a list of files, bytes or PIL images."
        raise UserError("invalid-argument", message, argument="images")
    if top < 1:
        raise UserError("invalid-argument", f"argument top={top} is invalid. Give a positive integer.", argument="top")


def _content(path: Path) -> bytes:
    check_file(path)
    with path.open("rb") as file:
        return file.read(MAX_BYTES)


def _gray(images: torch.Tensor) -> torch.Tensor:
    """Return the luma (ITU-R 601) of normalized colors, which is exact for images that are gray already."""
    red, green, blue = images.unbind(1)
    return (green + 0.299 * (red - green) + 0.114 * (blue - green)).unsqueeze(1)
