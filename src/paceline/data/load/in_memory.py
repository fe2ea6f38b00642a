"""Loaders for datasets that fit in device memory: uint8 there, augmented and normalized batch by batch."""

from collections.abc import Iterator

import torch
from torch.nn.functional import interpolate

from paceline.config.batch import check_samples
from paceline.config.data import Augment, Data
from paceline.data.load.augment import cut_out_, erase_, gather
from paceline.data.load.batch import Batch
from paceline.data.load.custom import apply_custom_
from paceline.data.load.order import Plan
from paceline.data.sets import ImageSet, TensorSplit
from paceline.errors import UserError


class _Pixels:
    """The pixels of one split on the device; makes normalized batches of them."""

    def __init__(self, split: TensorSplit, mean: torch.Tensor, std: torch.Tensor, device: torch.device):
        _, height, width, channels = split.images.shape
        self.shape = (height, width, channels)
        self.pixels = split.images.to(device).reshape(-1, channels)
        self.labels = split.labels.to(device)
        self.scale = (1 / (255 * std)).to(device)
        self.shift = (-mean / std).to(device)
        self.device = device

    def batch(self, keys: torch.Tensor, augment: Augment, seed: int, epoch: int, size: int) -> Batch:
        """Return images by key, augmented at their original size, then resized to `size` (0: not resized)."""
        keys = keys.to(self.device, non_blocking=True)
        ids = keys % len(self.labels)
        pixels = gather(self.pixels, self.shape, ids, keys, augment, seed, epoch)
        if augment.custom:
            pixels = pixels.cpu()
            apply_custom_(pixels.numpy(), keys.cpu().numpy(), augment, seed, epoch)
        images = pixels.to(self.device, torch.float32).mul_(self.scale).add_(self.shift).permute(0, 3, 1, 2)
        if augment.cutout:
            cut_out_(images, keys, augment.cutout, seed, epoch)
        if augment.random_erasing:
            erase_(images, keys, augment.random_erasing, seed, epoch)
        if size and size != self.shape[0]:
            images = interpolate(images, size=(size, size), mode="bilinear", antialias=size < self.shape[0])
        return Batch(images, self.labels[ids], ids)


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
        self._pixels = _Pixels(images.train, self.mean, self.std, device)
        self._augment, self.plan = data.augment, plan

    def plain_images(self, count: int) -> torch.Tensor:
        """Return the first training images, normalized but not augmented, for data-dependent initialization."""
        keys = torch.arange(min(count, self.plan.num_samples))
        return self._pixels.batch(keys, Augment(), seed=0, epoch=0, size=0).images

    @property
    def labels(self) -> torch.Tensor:
        """The labels of all training images."""
        return self._pixels.labels.cpu()

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
        self, data: Data, images: ImageSet, size: int, batch: int, rank: int, ranks: int, device: torch.device
    ):
        self._pixels = _Pixels(images.val, *statistics(data, images), device)
        self._size = size
        self._starts = range(rank * batch, len(images.val), ranks * batch)
        self._batch, self.num_samples = batch, len(images.val)
        self.rank_samples = sum(min(batch, self.num_samples - start) for start in self._starts)

    def __iter__(self) -> Iterator[Batch]:
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
