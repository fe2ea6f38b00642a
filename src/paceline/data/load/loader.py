"""Loaders for photographs, with the interface of those for data in memory."""

from collections.abc import Iterator

import numpy as np
import torch

from paceline.config.batch import BatchLayout
from paceline.config.data import Data
from paceline.config.duration import to_steps
from paceline.config.recipe import Evaluate
from paceline.data.load.batch import Batch, Normalise
from paceline.data.load.crops import centre_boxes, random_boxes
from paceline.data.load.decode import BatchDecoder, Request
from paceline.data.load.order import steps
from paceline.data.photographs import Photographs
from paceline.errors import UserError

DEFAULT_SIZE = 224
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def normalisation(data: Data, device: torch.device) -> Normalise:
    """The recipe's mean and standard deviation, else ImageNet's, which everybody uses for photographs."""
    mean, std = (data.mean, data.std) if data.mean else (IMAGENET_MEAN, IMAGENET_STD)
    if len(mean) != 3:
        raise UserError(f"data.mean has {len(mean)} values, but prepared images have 3 channels")
    return Normalise(torch.tensor(mean), torch.tensor(std), device)


class PhotographLoader:
    """Training batches of one rank: random crops, decoded in the background."""

    def __init__(
        self,
        data: Data,
        split: Photographs,
        layout: BatchLayout,
        rank: int,
        seed: int,
        device: torch.device,
        threads: int,
    ):
        layout.check_samples(len(split), split.folder)
        self._data, self._split, self._layout, self._rank, self._seed = data, split, layout, rank, seed
        self._normalise = normalisation(data, device)
        self.mean, self.std = self._normalise.mean, self._normalise.std
        self.steps_per_epoch = len(split) // layout.global_batch
        changes = [(to_steps(change.at, self.steps_per_epoch), change.size) for change in data.sizes]
        self._sizes = changes or [(0, data.size or DEFAULT_SIZE)]
        self._decoder = BatchDecoder(split, threads, device.type == "cuda", data.max_damaged)

    @property
    def damaged(self) -> int:
        """Samples that were damaged, and replaced by their neighbours, since the start."""
        return self._decoder.replaced

    def plain_images(self, count: int) -> torch.Tensor:
        """The first training images, their middle parts, normalised: what data-dependent initialisation looks at.

        As many as have the pixels of `count` small ones: thousands of photographs would fill the memory.
        """
        size = self._sizes[0][1]
        ids = np.arange(min(max(16, count * 32 * 32 // (size * size)), len(self._split)))
        request = _middle(ids, 1.0, size, size)
        for _, pixels in self._decoder.batches([request]):
            return self._normalise(pixels)
        raise AssertionError("a request gives a batch")

    def steps(self, first_step: int = 0) -> Iterator[list[Batch]]:
        """The micro-batches of every step from `first_step` on, epoch after epoch."""
        micro: list[Batch] = []
        for request, pixels in self.pixels(first_step):
            micro.append(self._normalise.batch(pixels, self._split.labels(request.ids), request.ids))
            if len(micro) == self._layout.accumulation:
                yield micro
                micro = []

    def pixels(self, first_step: int = 0) -> Iterator[tuple[Request, torch.Tensor]]:
        """The same, one micro-batch at a time, as uint8 in host memory; valid until the next one is asked for."""
        order = steps(self._seed, len(self._split), self._layout, self._rank, first_step)
        return self._decoder.batches(
            self._request(ids, self._size_at(step), epoch) for step, epoch, rows in order for ids in rows
        )

    def _request(self, ids: torch.Tensor, size: int, epoch: int) -> Request:
        return Request(ids.numpy().copy(), random_boxes(self._data.augment, self._seed, epoch), size, size)

    def _size_at(self, step: int) -> int:
        return next((size for begin, size in reversed(self._sizes) if step >= begin), self._sizes[0][1])


class PhotographEvaluator:
    """Validation batches of one rank: whole batches are dealt out, so that each sample is in exactly one of them."""

    def __init__(
        self,
        data: Data,
        evaluate: Evaluate,
        split: Photographs,
        rank: int,
        ranks: int,
        device: torch.device,
        threads: int,
    ):
        self._split, self._share = split, evaluate.crop_share
        self._size = evaluate.size or data.size or DEFAULT_SIZE
        self._rectangular = evaluate.rectangular
        self._normalise = normalisation(data, device)
        order = np.arange(len(split))
        if evaluate.rectangular:
            self._aspects = _aspects(split.sizes(order))
            order = np.argsort(self._aspects, kind="stable")
        batch = evaluate.per_rank_batch
        self._batches = [order[begin : begin + batch] for begin in range(rank * batch, len(order), ranks * batch)]
        self.num_samples = len(order)
        self.own_samples = sum(len(ids) for ids in self._batches)
        self._decoder = BatchDecoder(split, threads, device.type == "cuda", data.max_damaged, replace=False)

    def __iter__(self) -> Iterator[Batch]:
        """Samples that are damaged are left out, and so do not count."""
        for request, pixels in self._decoder.batches(self._request(ids) for ids in self._batches):
            sound = request.ids >= 0
            if sound.all():
                yield self._normalise.batch(pixels, self._split.labels(request.ids), request.ids)
            elif sound.any():
                ids = request.ids[sound]
                yield self._normalise.batch(pixels[torch.from_numpy(sound)], self._split.labels(ids), ids)

    def _request(self, ids: np.ndarray) -> Request:
        width = height = self._size
        if self._rectangular:
            # a panorama alone in its batch would not fit; beyond 4:1 its ends are cut off
            aspect = float(np.clip(np.exp(np.log(self._aspects[ids]).mean()), 0.25, 4.0))
            longer = max(self._size, round(self._size * max(aspect, 1 / aspect) / 8) * 8)
            width, height = (longer, self._size) if aspect > 1 else (self._size, longer)
        return _middle(ids, self._share, width, height)


def _aspects(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, 0].astype(np.float64) / sizes[:, 1]


def _middle(ids: np.ndarray, share: float, width: int, height: int) -> Request:
    def choose(sizes: np.ndarray, _ids: np.ndarray) -> np.ndarray:
        return centre_boxes(sizes, share, width, height)

    return Request(ids.copy(), choose, width, height)
