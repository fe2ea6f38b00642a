"""A recipe's data, whether it lives in memory or in shards: what the engine asks of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from paceline.config.batch import BatchLayout
from paceline.config.data import Data
from paceline.config.recipe import Recipe
from paceline.data import sets
from paceline.data.load.loader import DEFAULT_SIZE, ShardEvaluator, ShardLoader
from paceline.data.load.resident import ResidentEvaluator, ResidentLoader
from paceline.data.shards import Dataset

Loader = ResidentLoader | ShardLoader
Evaluator = ResidentEvaluator | ShardEvaluator


class Source(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def channels(self) -> int: ...

    def sizes(self) -> set[tuple[int, int]]:
        """Height and width of every size of image that a model will see."""

    def loader(self, layout: BatchLayout, rank: int, device: torch.device) -> Loader: ...

    def evaluator(self, rank: int, ranks: int, device: torch.device) -> Evaluator: ...


def open_source(recipe: Recipe) -> Source:
    if recipe.data.name in ("imagenet", "shards"):
        folder = Path(recipe.data.path) if recipe.data.path else sets.default_folder(recipe.data.name)
        return _Shards(recipe, Dataset.open(folder))
    return _Resident(recipe, sets.load(recipe.data))


def _training_sizes(data: Data) -> set[tuple[int, int]]:
    return {(change.size, change.size) for change in data.sizes}


@dataclass(frozen=True)
class _Resident:
    recipe: Recipe
    images: sets.ImageSet

    @property
    def name(self) -> str:
        return self.images.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.images.classes

    @property
    def fingerprint(self) -> str:
        return self.images.fingerprint

    @property
    def channels(self) -> int:
        return self.images.shape[2]

    def sizes(self) -> set[tuple[int, int]]:
        size = self.recipe.data.size
        return {(size, size) if size else self.images.shape[:2], *_training_sizes(self.recipe.data)}

    def loader(self, layout: BatchLayout, rank: int, device: torch.device) -> ResidentLoader:
        return ResidentLoader(self.recipe.data, self.images, layout, rank, self.recipe.seed, device)

    def evaluator(self, rank: int, ranks: int, device: torch.device) -> ResidentEvaluator:
        batch = self.recipe.evaluate.per_rank_batch
        return ResidentEvaluator(self.recipe.data, self.images, batch, rank, ranks, device)


@dataclass(frozen=True)
class _Shards:
    recipe: Recipe
    dataset: Dataset
    channels: int = 3

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def fingerprint(self) -> str:
        return f"{self.dataset.fingerprint}-{self.recipe.data.variant or self.dataset.variants[0]}"

    def sizes(self) -> set[tuple[int, int]]:
        evaluated = self.recipe.evaluate.size or self.recipe.data.size or DEFAULT_SIZE
        trained = _training_sizes(self.recipe.data) or {(self.recipe.data.size or DEFAULT_SIZE,) * 2}
        return {(evaluated, evaluated), *trained}

    @property
    def threads(self) -> int:
        return self.recipe.data.threads or torch.get_num_threads()

    def loader(self, layout: BatchLayout, rank: int, device: torch.device) -> ShardLoader:
        split = self.dataset.split("train", self.recipe.data.variant)
        return ShardLoader(self.recipe.data, split, layout, rank, self.recipe.seed, device, self.threads)

    def evaluator(self, rank: int, ranks: int, device: torch.device) -> ShardEvaluator:
        split = self.dataset.split("val", self.recipe.data.variant)
        data, evaluate = self.recipe.data, self.recipe.evaluate
        return ShardEvaluator(data, evaluate, split, rank, ranks, device, self.threads)
