"""Loaders for encoded images, with the same interface as the in-memory loaders."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from paceline.config.batch import check_samples
from paceline.config.data import Data, Interpolation
from paceline.config.recipe import Evaluate
from paceline.config.timeline import ResolvedPhase
from paceline.data.center import center_boxes
from paceline.data.images import ImageSplit, all_labels
from paceline.data.load.augment import cut_out_, erase_
from paceline.data.load.batch import Batch, Normalize
from paceline.data.load.crops import random_filters, training_boxes
from paceline.data.load.decode import BatchDecoder, Decoded, Request
from paceline.data.load.order import Plan
from paceline.data.load.policy import policy
from paceline.errors import UserError
from paceline.system.device import Uploader

DEFAULT_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalization(data: Data, device: torch.device, dtype: torch.dtype = torch.float32) -> Normalize:
    """Return the normalization of the recipe, else the usual one of ImageNet."""
    mean, std = (data.mean, data.std) if data.mean else (IMAGENET_MEAN, IMAGENET_STD)
    if len(mean) != 3:
        message = f"data.mean has {len(mean)} values, but prepared images have 3 channels."
        raise UserError("channels-mismatch", message, channels=3)
    return Normalize(torch.tensor(mean), torch.tensor(std), device, dtype)


class ImageLoader:
    """Training batches of one rank: random crops, decoded in the background."""

    def __init__(self, data: Data, splits: Mapping[str, ImageSplit], plan: Plan, device: torch.device, threads: int):
        """`splits`: the training images by variant, for every variant that the phases use."""
        first = next(iter(splits.values()))
        check_samples(plan.timeline, len(first), first.folder)
        self._data, self._splits, self.plan = data, splits, plan
        self.normalize = normalization(data, device)
        self.mean, self.std = self.normalize.mean, self.normalize.std
        self._uploader = Uploader(device)
        self._decoder = BatchDecoder(threads, device, data.max_corrupt)

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
        request = _center(self._splits[phase.variant], ids, 1.0, size, size, self._data.resize_filter)
        images = partial(self.normalize, dtype=torch.float32)
        for batch in self._decoder.uploaded([request], lambda decoded: _copy(decoded, self._uploader, images)):
            return batch.images
        raise AssertionError("the decoder yields one batch per request")

    @property
    def labels(self) -> torch.Tensor | None:
        """The labels of all training images, None if images must be read first."""
        labels = all_labels(next(iter(self._splits.values())))
        return None if labels is None else torch.from_numpy(labels)

    def augmented(self, ids: torch.Tensor) -> Batch:
        """Return training images augmented as in the first epoch."""
        request = self._request(ids, self.plan.timeline.phases[0], epoch=0)
        for batch in self._decoder.uploaded([request], self._start):
            return batch
        raise AssertionError("the decoder yields one batch per request")

    def steps(self, first_step: int = 0) -> Iterator[list[Batch]]:
        """Yield the micro-batches of every step from `first_step` on, without end."""
        micro: list[Batch] = []
        accumulation = next(iter(self.plan.layouts.values())).accumulation
        for batch in self._decoder.uploaded(self._requests(first_step), self._start):
            micro.append(batch)
            if len(micro) == accumulation:
                yield micro
                micro = []

    def _start(self, decoded: Decoded) -> Callable[[], Batch]:
        request, augment = decoded.request, self._data.augment
        keys = [torch.from_numpy(request.keys)] if augment.cutout or augment.random_erasing else []
        return _copy(decoded, self._uploader, partial(self._images, request.epoch), *keys)

    def _images(self, epoch: int, pixels: torch.Tensor, *keys: torch.Tensor) -> torch.Tensor:
        augment, seed, images = self._data.augment, self.plan.seed, self.normalize(pixels)
        if augment.cutout:
            cut_out_(images, keys[0], augment.cutout, seed, epoch)
        if augment.random_erasing:
            erase_(images, keys[0], augment, seed, epoch)
        return images

    def pixels(self, first_step: int = 0) -> Iterator[tuple[Request, torch.Tensor]]:
        """Yield micro-batches as uint8 in host memory; the pixels are valid until the next iteration."""
        return self._decoder.batches(self._requests(first_step))

    def _requests(self, first_step: int) -> Iterator[Request]:
        for phase, epoch, rows in self.plan.steps(first_step):
            for keys in rows:
                yield self._request(keys, phase, epoch)

    def _request(self, keys: torch.Tensor, phase: ResolvedPhase, epoch: int) -> Request:
        size, seed = phase.size or DEFAULT_SIZE, self.plan.seed
        augment = replace(self._data.augment, crop_scale=phase.crop_scale)
        return Request(
            split=self._splits[phase.variant],
            keys=keys.numpy().copy(),
            choose=training_boxes(augment, seed, epoch, size),
            width=size,
            height=size,
            interpolation=self._data.resize_filter,
            epoch=epoch,
            change=policy(augment, seed, epoch, self._data.resize_filter, self.mean.tolist()),
            is_bicubic=random_filters(seed, epoch) if augment.random_interpolation else None,
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
        dtype: torch.dtype = torch.float32,
    ):
        self._split, self._crop_pct, self._interpolation = split, evaluate.center_crop, data.resize_filter
        self._size = phase.evaluate_size or DEFAULT_SIZE
        self._rectangular = phase.rectangular
        self._normalize, self._uploader = normalization(data, device, dtype), Uploader(device)
        order = np.arange(len(split))
        if phase.rectangular:
            self._aspects = _aspects(split.sizes(order))
            order = np.argsort(self._aspects, kind="stable")
        batch = evaluate.per_rank_batch
        self._batches = [order[begin : begin + batch] for begin in range(rank * batch, len(order), ranks * batch)]
        self.num_samples = len(order)
        self.rank_samples = sum(len(ids) for ids in self._batches)
        # engine/evaluation/evaluate.py applies data.max_corrupt to the sum over all ranks
        self._decoder = BatchDecoder(threads, device, max_corrupt=1.0, replace=False)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without corrupt samples."""
        return (batch for batch in self.batches() if len(batch.ids))

    def batches(self) -> Iterator[Batch]:
        """Yield all batches without corrupt samples, also those of which no sample is left."""
        return self._decoder.uploaded((self._request(ids) for ids in self._batches), self._start)

    @property
    def names(self) -> list[str]:
        """The relative paths of all samples; empty if they come from no files."""
        return self._split.names

    def pictures(self, ids: Iterable[int], side: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield samples as center crops, uint8 (side, side, 3), without corrupt ones."""
        keys, reader = np.array([*ids], np.int64), self._split.reader()
        pixels = np.empty((len(keys), 3, side, side), np.uint8)
        failed = reader.read(keys, lambda sizes, _: center_boxes(sizes, 1.0, side, side), pixels) if len(keys) else {}
        for position, key in enumerate(keys.tolist()):
            if position not in failed:
                yield key, pixels[position].transpose(1, 2, 0)

    def _start(self, decoded: Decoded) -> Callable[[], Batch]:
        return _copy(decoded, self._uploader, self._normalize)

    def _request(self, ids: np.ndarray) -> Request:
        width = height = self._size
        if self._rectangular:
            # limited to 4:1, since a batch of panoramas would not fit into memory
            aspect = float(np.clip(np.exp(np.log(self._aspects[ids]).mean()), 0.25, 4.0))
            longer = max(self._size, round(self._size * max(aspect, 1 / aspect) / 8) * 8)
            width, height = (longer, self._size) if aspect > 1 else (self._size, longer)
        return _center(self._split, ids, self._crop_pct, width, height, self._interpolation)


def _copy(
    decoded: Decoded, uploader: Uploader, images: Callable[..., torch.Tensor], *keys: torch.Tensor
) -> Callable[[], Batch]:
    """Start to copy what the device needs of a batch, without corrupt samples. Returns a function for the batch.

    `images` computes them from pixels and keys when they are used.
    """
    request, pixels, ids = decoded.request, decoded.pixels, decoded.request.ids
    valid = request.keys >= 0
    if not valid.all():
        pixels, ids = pixels[torch.from_numpy(valid)], ids[valid]
    labels = torch.from_numpy(request.split.labels(ids).astype(np.int64))
    upload = uploader.start(pixels, labels, *keys)
    decoded.copied = upload.copied
    owner = None if upload.copied else decoded  # pixels that were not copied must not be overwritten before their use

    def arrive() -> Batch:
        pixels, labels, *keys = upload.arrive()
        return Batch(partial(images, pixels, *keys), labels, torch.from_numpy(ids), owner)

    return arrive


def _aspects(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, 0].astype(np.float64) / sizes[:, 1]


def _center(
    split: ImageSplit, ids: np.ndarray, crop_pct: float, width: int, height: int, interpolation: Interpolation
) -> Request:
    def choose(sizes: np.ndarray, _ids: np.ndarray) -> np.ndarray:
        return center_boxes(sizes, crop_pct, width, height)

    return Request(split, ids.copy(), choose, width, height, interpolation)
