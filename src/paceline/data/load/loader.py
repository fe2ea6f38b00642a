"""Loaders for encoded images, with the same interface as the in-memory loaders."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from paceline.config.batch import check_samples
from paceline.config.data import Data
from paceline.config.recipe import Evaluate
from paceline.config.timeline import ResolvedPhase
from paceline.data.images import UNKNOWN, ImageSplit
from paceline.data.load.augment import cut_out_, erase_
from paceline.data.load.batch import Batch, Normalize
from paceline.data.load.crops import center_boxes, training_boxes
from paceline.data.load.decode import BatchDecoder, Request
from paceline.data.load.order import Plan
from paceline.data.load.policy import policy
from paceline.errors import UserError

DEFAULT_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalization(data: Data, device: torch.device) -> Normalize:
    """Return the normalization of the recipe, else the usual one of ImageNet."""
    mean, std = (data.mean, data.std) if data.mean else (IMAGENET_MEAN, IMAGENET_STD)
    if len(mean) != 3:
        message = f"data.mean has {len(mean)} values, but prepared images have 3 channels."
        raise UserError("channels-mismatch", message, channels=3)
    return Normalize(torch.tensor(mean), torch.tensor(std), device)


class ImageLoader:
    """Training batches of one rank: random crops, decoded in the background."""

    def __init__(self, data: Data, splits: Mapping[str, ImageSplit], plan: Plan, device: torch.device, threads: int):
        """`splits`: the training images by variant, for every variant that the phases use."""
        first = next(iter(splits.values()))
        check_samples(plan.timeline, len(first), first.folder)
        self._data, self._splits, self.plan = data, splits, plan
        self._normalize = normalization(data, device)
        self.mean, self.std = self._normalize.mean, self._normalize.std
        self._decoder = BatchDecoder(threads, device.type == "cuda", data.max_corrupt)

    @property
    def num_corrupt(self) -> int:
        """Corrupt samples that were replaced by their neighbors so far."""
        return self._decoder.replaced

    def plain_images(self, count: int) -> torch.Tensor:
        """Return center crops of the first training images, normalized, for data-dependent initialization.

        Their pixels are limited to those of `count` images of 32 x 32, since large images would fill the memory.
        """
        phase = self.plan.timeline.phases[0]
        size = phase.size or DEFAULT_SIZE
        ids = np.arange(min(max(16, count * 32 * 32 // (size * size)), self.plan.num_samples))
        request = _center(self._splits[phase.variant], ids, 1.0, size, size)
        for _, pixels in self._decoder.batches([request]):
            return self._normalize(pixels)
        raise AssertionError("the decoder yields one batch per request")

    @property
    def labels(self) -> torch.Tensor | None:
        """The labels of all training images, None if images must be read first."""
        first = next(iter(self._splits.values()))
        labels = first.labels(np.arange(len(first))).astype(np.int64)
        return None if UNKNOWN in labels else torch.from_numpy(labels)

    def augmented(self, ids: torch.Tensor) -> Batch:
        """Return training images augmented as in the first epoch."""
        request = self._request(ids, self.plan.timeline.phases[0], epoch=0)
        for _, pixels in self._decoder.batches([request]):
            return self._batch(request, pixels)
        raise AssertionError("the decoder yields one batch per request")

    def steps(self, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of every step from `first_step` on, without end."""
        micro: list[Batch] = []
        accumulation = next(iter(self.plan.layouts.values())).accumulation
        for request, pixels in self.pixels(first_step):
            micro.append(self._batch(request, pixels))
            if len(micro) == accumulation:
                yield micro
                micro = []

    def _batch(self, request: Request, pixels: torch.Tensor) -> Batch:
        augment = self._data.augment
        batch = self._normalize.batch(pixels, request.split.labels(request.ids), request.ids)
        keys = torch.from_numpy(request.keys).to(batch.images.device)
        if augment.cutout:
            cut_out_(batch.images, keys, augment.cutout, self.plan.seed, request.epoch)
        if augment.random_erasing:
            erase_(batch.images, keys, augment.random_erasing, self.plan.seed, request.epoch)
        return batch

    def pixels(self, first_step: int = 0) -> Iterator[tuple[Request, torch.Tensor]]:
        """Yield micro-batches as uint8 in host memory; the pixels are valid until the next iteration."""
        return self._decoder.batches(
            self._request(keys, phase, epoch) for phase, epoch, rows in self.plan.steps(first_step) for keys in rows
        )

    def _request(self, keys: torch.Tensor, phase: ResolvedPhase, epoch: int) -> Request:
        size, seed = phase.size or DEFAULT_SIZE, self.plan.seed
        augment = replace(self._data.augment, crop_scale=phase.crop_scale)
        return Request(
            split=self._splits[phase.variant],
            keys=keys.numpy().copy(),
            choose=training_boxes(augment, seed, epoch, size),
            width=size,
            height=size,
            epoch=epoch,
            change=policy(augment, seed, epoch),
        )


class ImageEvaluator:
    """Validation batches of one rank: every sample is in exactly one batch of exactly one rank."""

    def __init__(
        self,
        data: Data,
        evaluate: Evaluate,
        phase: ResolvedPhase,
        split: ImageSplit,
        rank: int,
        ranks: int,
        device: torch.device,
        threads: int,
    ):
        self._split, self._crop_pct = split, evaluate.crop_pct
        self._size = phase.evaluate_size or DEFAULT_SIZE
        self._rectangular = phase.rectangular
        self._normalize = normalization(data, device)
        order = np.arange(len(split))
        if phase.rectangular:
            self._aspects = _aspects(split.sizes(order))
            order = np.argsort(self._aspects, kind="stable")
        batch = evaluate.per_rank_batch
        self._batches = [order[begin : begin + batch] for begin in range(rank * batch, len(order), ranks * batch)]
        self.num_samples = len(order)
        self.rank_samples = sum(len(ids) for ids in self._batches)
        # engine/evaluate.py applies data.max_corrupt to the sum over all ranks
        self._decoder = BatchDecoder(threads, device.type == "cuda", max_corrupt=1.0, replace=False)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without corrupt samples."""
        for request, pixels in self._decoder.batches(self._request(ids) for ids in self._batches):
            valid = request.keys >= 0
            if valid.all():
                yield self._normalize.batch(pixels, self._split.labels(request.ids), request.ids)
            elif valid.any():
                ids = request.keys[valid]
                yield self._normalize.batch(pixels[torch.from_numpy(valid)], self._split.labels(ids), ids)

    def _request(self, ids: np.ndarray) -> Request:
        width = height = self._size
        if self._rectangular:
            # limited to 4:1, since a batch of panoramas would not fit into memory
            aspect = float(np.clip(np.exp(np.log(self._aspects[ids]).mean()), 0.25, 4.0))
            longer = max(self._size, round(self._size * max(aspect, 1 / aspect) / 8) * 8)
            width, height = (longer, self._size) if aspect > 1 else (self._size, longer)
        return _center(self._split, ids, self._crop_pct, width, height)


def _aspects(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, 0].astype(np.float64) / sizes[:, 1]


def _center(split: ImageSplit, ids: np.ndarray, crop_pct: float, width: int, height: int) -> Request:
    def choose(sizes: np.ndarray, _ids: np.ndarray) -> np.ndarray:
        return center_boxes(sizes, crop_pct, width, height)

    return Request(split, ids.copy(), choose, width, height)
