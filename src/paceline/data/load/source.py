"""A recipe's data, whether it lives in memory or in shards: what the engine asks of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from paceline.base.logs import log
from paceline.base.remote import is_remote
from paceline.config.batch import BatchLayout
from paceline.config.data import Data
from paceline.config.recipe import Recipe
from paceline.data import cache, sets
from paceline.data.load.loader import DEFAULT_SIZE, PhotographEvaluator, PhotographLoader
from paceline.data.load.resident import ResidentEvaluator, ResidentLoader
from paceline.data.photographs import Files, Photographs
from paceline.data.prepare.sources import fingerprint, listing
from paceline.data.shards import Dataset, default_folder
from paceline.errors import UserError

_PREPARED = ("imagenet", "shards")
Loader = ResidentLoader | PhotographLoader
Evaluator = ResidentEvaluator | PhotographEvaluator


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
    data = recipe.data
    if data.name in _PREPARED:
        return _shards(recipe, Dataset.open(_local(data)))
    if data.name == "folder":
        if is_remote(data.path):
            raise UserError(f"data.path={data.path}: only prepared images can be remote; see `paceline prepare --help`")
        return _folder(recipe, Path(data.path or default_folder(data.name)))
    return _Resident(recipe, sets.load(recipe.data))


def fetch(recipe: Recipe) -> None:
    """Bring data that lies elsewhere to this machine."""
    if recipe.data.name in _PREPARED:
        _local(recipe.data)


def _local(data: Data) -> Path:
    return cache.local(data.path or str(default_folder(data.name)), data.variant)


def _shards(recipe: Recipe, dataset: Dataset) -> "_Photographs":
    variant = recipe.data.variant
    print_of = f"{dataset.fingerprint}-{variant or dataset.variants[0]}"
    return _Photographs(recipe, dataset.name, dataset.classes, print_of, lambda split: dataset.split(split, variant))


def _folder(recipe: Recipe, root: Path) -> "_Photographs":
    files = listing(root)
    log.info(
        "%s: %d image files, which Pillow decodes anew at every use; prepared, they load many times faster: "
        "paceline prepare folder %s --out DIR",
        *(root, len(files.train) + len(files.val), root),
    )
    print_of = fingerprint(files, root)
    return _Photographs(recipe, "folder", tuple(files.ids), print_of, lambda split: Files(root, files.splits[split]))


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
class _Photographs:
    recipe: Recipe
    name: str
    classes: tuple[str, ...]
    fingerprint: str
    split: Callable[[str], Photographs]
    channels: int = 3

    def sizes(self) -> set[tuple[int, int]]:
        evaluated = self.recipe.evaluate.size or self.recipe.data.size or DEFAULT_SIZE
        trained = _training_sizes(self.recipe.data) or {(self.recipe.data.size or DEFAULT_SIZE,) * 2}
        return {(evaluated, evaluated), *trained}

    @property
    def threads(self) -> int:
        return self.recipe.data.threads or torch.get_num_threads()

    def loader(self, layout: BatchLayout, rank: int, device: torch.device) -> PhotographLoader:
        return PhotographLoader(
            self.recipe.data, self.split("train"), layout, rank, self.recipe.seed, device, self.threads
        )

    def evaluator(self, rank: int, ranks: int, device: torch.device) -> PhotographEvaluator:
        data, evaluate = self.recipe.data, self.recipe.evaluate
        return PhotographEvaluator(data, evaluate, self.split("val"), rank, ranks, device, self.threads)
