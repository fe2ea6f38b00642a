"""The data of a recipe in memory, and as image files or prepared images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config.data import BUILT_IN
from paceline.config.recipe import Recipe
from paceline.config.timeline import ResolvedPhase, Timeline
from paceline.data import sets
from paceline.data.classes import Class
from paceline.data.images import ImageSplit, all_labels
from paceline.data.load.in_memory import ResidentEvaluator, ResidentLoader
from paceline.data.load.loader import DEFAULT_SIZE, ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.load.variants import place_of, training_variants
from paceline.data.shards import Dataset
from paceline.data.splits import TEST, TRAIN, VAL
from paceline.errors import UserError


def split_unknown(place: str, split: str, known: list[str]) -> UserError:
    """Return the error for the evaluation of a split that the data does not have."""
    message = f"{place} has no {split} split that can be evaluated. Choose {' or '.join(known)}."
    return UserError("unknown-split", message, split=split)


@dataclass(frozen=True)
class ResidentData:
    recipe: Recipe
    images: sets.ImageSet
    default_split: str = VAL

    @property
    def name(self) -> str:
        return self.images.name

    @property
    def place(self) -> str:
        return "" if self.recipe.data.name in BUILT_IN else place_of(self.recipe)

    @property
    def classes(self) -> tuple[Class, ...]:
        return tuple(Class(name, name) for name in self.images.classes)

    @property
    def fingerprint(self) -> str:
        return self.images.fingerprint

    @property
    def variants(self) -> tuple[str, ...]:
        return ()

    def evaluation_variant(self, phase: ResolvedPhase) -> str:
        return ""

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
            raise split_unknown(self.name, split, [VAL])
        batch = self.recipe.evaluate.per_rank_batch
        return ResidentEvaluator(self.recipe.data, self.images, phase.evaluate_size, batch, rank, ranks, device, dtype)


@dataclass(frozen=True)
class ImageData:
    recipe: Recipe
    name: str
    place: str
    classes: tuple[Class, ...]
    fingerprint: str
    splits: Mapping[str, Mapping[str, ImageSplit]]
    """By split and variant; the variant of data that is not prepared is empty."""
    counts: Mapping[str, int]
    """Images of every split, also of those that are not needed."""
    variants: tuple[str, ...] = ()
    channels: int = 3
    default_split: str = VAL
    dataset: Dataset | None = None
    """Prepared images."""

    @property
    def num_train(self) -> int:
        return self.counts.get(TRAIN, 0)

    @property
    def train_labels(self) -> torch.Tensor | None:
        labels = all_labels(next(iter(self.splits["train"].values())))
        return None if labels is None else torch.from_numpy(labels)

    @property
    def num_val(self) -> int:
        return self.counts.get(VAL, 0)

    @property
    def num_test(self) -> int:
        return self.counts.get(TEST, 0)

    def evaluation_variant(self, phase: ResolvedPhase) -> str:
        if self.dataset is None:
            return ""
        return self.dataset.choose_for_evaluation(phase.evaluate_variant, phase.variant)

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
        found, dataset = self.splits[TRAIN], self.dataset
        splits = {name: found[dataset.choose(name) if dataset else ""] for name in training_variants(self.recipe)}
        return ImageLoader(self.recipe.data, splits, plan, device, self.threads)

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
            raise split_unknown(self.place or self.name, split, list(self.splits))
        data, evaluate = self.recipe.data, self.recipe.evaluate
        images = self.splits[split][self.evaluation_variant(phase)]
        return ImageEvaluator(data, evaluate, phase, images, rank, ranks, device, self.threads, dtype)
