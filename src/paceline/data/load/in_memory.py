"""Loaders for datasets that fit in device memory: uint8 there, augmented and normalized batch by batch."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.nn.functional import interpolate

from paceline.config.batch import check_samples
from paceline.config.data import Augment, Data, Interpolation
from paceline.data.load.augment import cut_out_, erase_, gather
from paceline.data.load.batch import Batch, Normalize
from paceline.data.load.custom import apply_custom_
from paceline.data.load.order import Plan
from paceline.data.sets import ImageSet, TensorSplit
from paceline.errors import UserError
from paceline.system.device import Uploader, has_streams


class _Pixels:
    """The pixels of one split; makes normalized batches of them.

    They are on the device if it has streams, and then only keys and labels are copied for a batch. Registered
    augmentations run on the host, so their pixels stay there.
    """

    def __init__(
        self,
        split: TensorSplit,
        normalize: Normalize,
        custom: bool,
        device: torch.device,
        interpolation: Interpolation,
    ):
        _, height, width, channels = split.images.shape
        self.shape = (height, width, channels)
        self.labels, self._normalize, self._interpolation = split.labels, normalize, interpolation
        self._on_host = custom or not has_streams(device)
        self._pixels = split.images.to("cpu" if self._on_host else device).reshape(-1, channels)
        self._uploader = Uploader(device)

    def picture(self, number: int) -> np.ndarray:
        """Return a sample as it is stored: uint8 (height, width, channels)."""
        size = self.shape[0] * self.shape[1]
        return self._pixels[number * size : (number + 1) * size].cpu().view(self.shape).numpy()

    def batch(
        self, keys: torch.Tensor, augment: Augment, seed: int, epoch: int, size: int, dtype: torch.dtype | None = None
    ) -> Batch:
        """Return images by key, augmented at their original size, then resized to `size` (0: not resized)."""
        ids = keys % len(self.labels)
        sent = [self.labels[ids], keys]
        if self._on_host:
            pixels = gather(self._pixels, self.shape, ids, keys, augment, seed, epoch)
            apply_custom_(pixels.numpy(), keys.numpy(), augment, seed, epoch)
            sent = [sent[0], *([keys] if augment.cutout or augment.random_erasing else []), pixels]
        labels, *arrived = self._uploader.start(*sent).arrive()

        def images() -> torch.Tensor:
            keys, pixels = arrived[0], arrived[-1]
            if not self._on_host:
                pixels = gather(self._pixels, self.shape, keys % len(self.labels), keys, augment, seed, epoch)
            resized, wanted = bool(size) and size != self.shape[0], dtype or self._normalize.dtype
            images = self._normalize(pixels.permute(0, 3, 1, 2), torch.float32 if resized else wanted)
            if augment.cutout:
                cut_out_(images, keys, augment.cutout, seed, epoch)
            if augment.random_erasing:
                erase_(images, keys, augment, seed, epoch)
            if resized:
                images = self._resize(images, size)
            return images.to(wanted)

        return Batch(images, labels, ids)

    def _resize(self, images: torch.Tensor, size: int) -> torch.Tensor:
        if self._interpolation == "bilinear":
            return interpolate(images, size=(size, size), mode="bilinear", antialias=size < self.shape[0])
        # torch's bicubic filter is Pillow's only with antialias, also for enlarging; it exceeds the range at edges, and
        # Pillow clamps after each of its two passes
        for shape in ((images.shape[2], size), (size, size)):
            images = self._normalize.clamp_(interpolate(images, size=shape, mode="bicubic", antialias=True))
        return images


class ResidentLoader:
    """Training batches of one rank."""

    num_corrupt = 0
    """Samples replaced because they were corrupt: none, since all files are verified when they are read."""

    def __init__(self, data: Data, images: ImageSet, plan: Plan, device: torch.device):
        check_samples(plan.timeline, len(images.train), images.name)
        if data.augment.translate >= min(images.shape[:2]):
            raise UserError(
                "translate-too-large",
                f"data.augment.translate={data.augment.translate} is too large for images of {images.shape[0]} x "
                f"{images.shape[1]} pixels. Choose a smaller value.",
            )
        self.mean, self.std = statistics(data, images)
        self.normalize = Normalize(self.mean, self.std, device)
        self._pixels = _Pixels(images.train, self.normalize, bool(data.augment.custom), device, data.resize_filter)
        self._augment, self.plan = data.augment, plan

    def plain_images(self, count: int) -> torch.Tensor:
        """Return the first training images, normalized but not augmented, for data-dependent initialization."""
        keys = torch.arange(min(count, self.plan.num_samples))
        return self._pixels.batch(keys, Augment(), seed=0, epoch=0, size=0, dtype=torch.float32).images

    @property
    def labels(self) -> torch.Tensor:
        """The labels of all training images."""
        return self._pixels.labels

    def augmented(self, ids: torch.Tensor) -> Batch:
        """Return training images augmented as in the first epoch."""
        return self._pixels.batch(ids, self._augment, self.plan.seed, 0, self.plan.timeline.phases[0].size)

    def steps(self, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of every step from `first_step` on, without end."""
        for phase, epoch, rows in self.plan.steps(first_step):
            yield [self._pixels.batch(keys, self._augment, self.plan.seed, epoch, phase.size) for keys in rows]


class ResidentEvaluator:
    """Validation batches of one rank: every sample is in exactly one batch of exactly one rank.

    Whole batches are assigned to ranks, so a batch has the same samples, and the same logits, on any number of ranks.
    """

    def __init__(
        self,
        data: Data,
        images: ImageSet,
        size: int,
        batch: int,
        rank: int,
        ranks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        normalize = Normalize(*statistics(data, images), device, dtype)
        self._pixels = _Pixels(images.val, normalize, False, device, data.resize_filter)
        self._size = size
        self._starts = range(rank * batch, len(images.val), ranks * batch)
        self._batch, self.num_samples = batch, len(images.val)
        self.rank_samples = sum(min(batch, self.num_samples - start) for start in self._starts)

    @property
    def names(self) -> list[str]:
        """Paths of samples, which come from no files: none."""
        return []

    def pictures(self, ids: Iterable[int], side: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield samples as uint8 (height, width, channels), at most `side` pixels wide and high."""
        step = -(-max(self._pixels.shape[:2]) // side)
        for number in ids:
            yield number, self._pixels.picture(number)[::step, ::step]

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self) -> Iterator[Batch]:
        """Yield all batches."""
        for start in self._starts:
            ids = torch.arange(start, min(start + self._batch, self.num_samples))
            yield self._pixels.batch(ids, Augment(), seed=0, epoch=0, size=self._size)


def statistics(data: Data, images: ImageSet) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation per channel: from the recipe, else of the training set."""
    channels = images.shape[2]
    if data.mean:
        if len(data.mean) != channels:
            message = f"data.mean has {len(data.mean)} values, but {images.name} has {channels} channels."
            raise UserError("channels-mismatch", message, channels=channels)
        return torch.tensor(data.mean), torch.tensor(data.std)
    pixels = images.train.images.view(-1, channels)
    counts = torch.stack([torch.bincount(pixels[:, channel], minlength=256) for channel in range(channels)]).double()
    levels = torch.arange(256, dtype=torch.float64) / 255
    fractions = counts / counts.sum(1, keepdim=True)
    mean = fractions @ levels
    std = (fractions @ levels.square() - mean.square()).clamp(min=1e-6).sqrt()
    return mean.float(), std.float()
