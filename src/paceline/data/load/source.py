"""The interface of the engine to the data of a recipe, in memory, in shards or in image files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.config.data import BUILT_IN, FROM_FILES, IN_MEMORY
from paceline.config.recipe import Recipe
from paceline.config.timeline import ResolvedPhase, Timeline
from paceline.data import cache, sets
from paceline.data.classes import Class
from paceline.data.images import ImageFiles, ImageSplit, all_labels
from paceline.data.listing import list_images, list_one_split, listing_fingerprint
from paceline.data.load.in_memory import ResidentEvaluator, ResidentLoader
from paceline.data.load.loader import DEFAULT_SIZE, ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.registered import open_registered
from paceline.data.shards import Dataset, default_folder
from paceline.data.splits import SPLITS, TEST, TRAIN, VAL, default_split, no_split
from paceline.errors import UserError
from paceline.system.logs import log

_PREPARED = ("imagenet", "shards")
Loader = ResidentLoader | ImageLoader
Evaluator = ResidentEvaluator | ImageEvaluator


class DataSource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def place(self) -> str:
        """Its path or URL; empty for built-in datasets."""

    @property
    def classes(self) -> tuple[Class, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def channels(self) -> int: ...

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants of prepared images that the recipe uses."""

    @property
    def num_train(self) -> int: ...

    @property
    def train_labels(self) -> torch.Tensor | None:
        """The labels of all training images, None if images must be read first."""

    @property
    def num_val(self) -> int: ...

    @property
    def num_test(self) -> int:
        """0 if there is no test split."""

    @property
    def default_split(self) -> str:
        """The split that is evaluated if none is named: val, or what image files have instead of it."""

    def sizes(self, timeline: Timeline) -> set[tuple[int, int]]:
        """Return (height, width) of all images that the model will see."""

    def preprocessing(self, phase: ResolvedPhase) -> dict[str, Any]:
        """Return the preprocessing for evaluation, with timm's option names."""

    def loader(self, plan: Plan, device: torch.device) -> Loader: ...

    def evaluator(
        self,
        phase: ResolvedPhase,
        rank: int,
        ranks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        split: str = VAL,
    ) -> Evaluator: ...


def open_source(recipe: Recipe, only_evaluate: bool = False, split: str = "") -> DataSource:
    """Return the data of a recipe that data/kinds.py has resolved.

    `only_evaluate`: images need no train split; `split` is then read, by default the first of val, test and train.
    """
    data = recipe.data
    if data.name in _PREPARED:
        return _shards(recipe, only_evaluate, split)
    if data.name in ("folder", "list"):
        return _files(recipe, Path(data.path or default_folder(data.name)), only_evaluate, split)
    if data.name not in (*IN_MEMORY, *FROM_FILES):
        return _registered(recipe)
    return _Resident(recipe, sets.load(recipe.data))


def _no_split(place: str, split: str, known: list[str]) -> UserError:
    message = f"{place} has no {split} split that can be evaluated. Choose {' or '.join(known)}."
    return UserError("unknown-split", message, split=split)


def fetch(recipe: Recipe) -> None:
    """Download remote data to the local cache."""
    if recipe.data.name in _PREPARED:
        _local(recipe)


def _variants(recipe: Recipe) -> list[str]:
    """Return the variants of prepared images that the phases of a recipe use."""
    return list(dict.fromkeys(phase.variant or recipe.data.variant for phase in recipe.all_phases()))


def _local(recipe: Recipe) -> Path:
    """Return the local folder of prepared images, with every variant that the recipe uses."""
    place = recipe.data.path or str(default_folder(recipe.data.name))
    return {cache.local(place, variant) for variant in _variants(recipe)}.pop()


def _shards(recipe: Recipe, only_evaluate: bool, wanted: str) -> "_ImageData":
    variants = _variants(recipe)
    dataset = Dataset.open(_local(recipe))
    names = tuple(dataset.choose(variant) for variant in variants)
    place, classes = recipe.data.path or str(default_folder(recipe.data.name)), tuple(dataset.classes)
    known = [split for split in SPLITS if split in dataset.description["splits"]]
    if not only_evaluate and (lacking := [split for split in (TRAIN, VAL) if split not in known]):
        raise no_split(place, lacking[0], known)
    splits = {split: {variant: dataset.split(split, variant) for variant in variants} for split in known}
    default = default_split(splits)
    if not wanted and default != VAL:
        log.info("%s has no val split; evaluating its %s split", place, default)
    fingerprint = f"{dataset.fingerprint}-{'+'.join(names)}"
    return _ImageData(recipe, dataset.name, place, classes, fingerprint, splits, names, default_split=default)


def _files(recipe: Recipe, root: Path, only_evaluate: bool, split: str) -> "_ImageData":
    files = list_one_split(root, split) if only_evaluate else list_images(root)
    if not only_evaluate:  # which reads every image once, as preparing them would
        log.info(
            "%s: %d image files, which are decoded on every use. Prepared images load many times faster: run "
            '"paceline prepare %s --out DIR".',
            *(root, sum(map(len, files.splits.values())), root),
        )
    digest = listing_fingerprint(files, root)
    splits = {
        split: dict.fromkeys(_variants(recipe), ImageFiles(root, entries)) for split, entries in files.splits.items()
    }
    classes = tuple(Class(id_, id_) for id_ in files.ids)
    default = next(split for split, entries in files.splits.items() if entries) if only_evaluate else VAL
    return _ImageData(recipe, recipe.data.name, str(root), classes, digest, splits, default_split=default)


def _registered(recipe: Recipe) -> "_ImageData":
    found, fingerprint = open_registered(recipe.data)
    classes = tuple(Class(name, name) for name in found["train"].classes)
    splits = {name: dict.fromkeys(_variants(recipe), split) for name, split in found.items()}
    return _ImageData(recipe, recipe.data.name, "", classes, fingerprint, splits)


@dataclass(frozen=True)
class _Resident:
    recipe: Recipe
    images: sets.ImageSet
    default_split: str = VAL

    @property
    def name(self) -> str:
        return self.images.name

    @property
    def place(self) -> str:
        data = self.recipe.data
        return "" if data.name in BUILT_IN else data.path or str(default_folder(data.name))

    @property
    def classes(self) -> tuple[Class, ...]:
        return tuple(Class(name, name) for name in self.images.classes)

    @property
    def fingerprint(self) -> str:
        return self.images.fingerprint

    @property
    def variants(self) -> tuple[str, ...]:
        return ()

    @property
    def channels(self) -> int:
        return self.images.shape[2]

    @property
    def num_train(self) -> int:
        return len(self.images.train)

    @property
    def train_labels(self) -> torch.Tensor:
        return self.images.train.labels

    @property
    def num_val(self) -> int:
        return len(self.images.val)

    @property
    def num_test(self) -> int:
        return 0

    def sizes(self, timeline: Timeline) -> set[tuple[int, int]]:
        sides = {side for phase in timeline.phases for side in (phase.size, phase.evaluate_size)}
        return {(side, side) if side else self.images.shape[:2] for side in sides}

    def preprocessing(self, phase: ResolvedPhase) -> dict[str, Any]:
        size = [phase.evaluate_size] * 2 if phase.evaluate_size else list(self.images.shape[:2])
        return {"size": size, "crop_pct": 1.0, "interpolation": self.recipe.data.resize_filter}

    def loader(self, plan: Plan, device: torch.device) -> ResidentLoader:
        return ResidentLoader(self.recipe.data, self.images, plan, device)

    def evaluator(
        self,
        phase: ResolvedPhase,
        rank: int,
        ranks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        split: str = VAL,
    ) -> ResidentEvaluator:
        if split != VAL:
            raise _no_split(self.name, split, [VAL])
        batch = self.recipe.evaluate.per_rank_batch
        return ResidentEvaluator(self.recipe.data, self.images, phase.evaluate_size, batch, rank, ranks, device, dtype)


@dataclass(frozen=True)
class _ImageData:
    recipe: Recipe
    name: str
    place: str
    classes: tuple[Class, ...]
    fingerprint: str
    splits: Mapping[str, Mapping[str, ImageSplit]]
    """By split and variant."""
    variants: tuple[str, ...] = ()
    channels: int = 3
    default_split: str = VAL

    @property
    def num_train(self) -> int:
        return self._samples(TRAIN)

    @property
    def train_labels(self) -> torch.Tensor | None:
        labels = all_labels(next(iter(self.splits["train"].values())))
        return None if labels is None else torch.from_numpy(labels)

    @property
    def num_val(self) -> int:
        return self._samples(VAL)

    @property
    def num_test(self) -> int:
        return self._samples(TEST)

    def _samples(self, split: str) -> int:
        return len(next(iter(self.splits[split].values()))) if split in self.splits else 0

    def sizes(self, timeline: Timeline) -> set[tuple[int, int]]:
        sides = {side for phase in timeline.phases for side in (phase.size, phase.evaluate_size)}
        return {(side or DEFAULT_SIZE, side or DEFAULT_SIZE) for side in sides}

    @property
    def threads(self) -> int:
        return self.recipe.data.decode_threads or torch.get_num_threads()

    def preprocessing(self, phase: ResolvedPhase) -> dict[str, Any]:
        size = [phase.evaluate_size or DEFAULT_SIZE] * 2
        data, evaluate = self.recipe.data, self.recipe.evaluate
        return {"size": size, "crop_pct": evaluate.center_crop, "interpolation": data.resize_filter}

    def loader(self, plan: Plan, device: torch.device) -> ImageLoader:
        return ImageLoader(self.recipe.data, self.splits["train"], plan, device, self.threads)

    def evaluator(
        self,
        phase: ResolvedPhase,
        rank: int,
        ranks: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        split: str = VAL,
    ) -> ImageEvaluator:
        if split not in self.splits:
            raise _no_split(self.place or self.name, split, list(self.splits))
        data, evaluate, images = self.recipe.data, self.recipe.evaluate, self.splits[split][phase.variant]
        return ImageEvaluator(data, evaluate, phase, images, rank, ranks, device, self.threads, dtype)
