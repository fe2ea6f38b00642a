"""The interface of the engine to the data of a recipe, in memory, in shards or in image files."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from paceline.config.data import FROM_FILES, IN_MEMORY
from paceline.config.recipe import Recipe
from paceline.config.timeline import ResolvedPhase, Timeline
from paceline.data import cache, sets
from paceline.data.classes import Class
from paceline.data.images import ImageFiles, ImageSplit
from paceline.data.listing import list_images, list_one_split, listing_fingerprint
from paceline.data.load.datasets import ImageData, ResidentData, split_unknown
from paceline.data.load.in_memory import ResidentEvaluator, ResidentLoader
from paceline.data.load.loader import ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.load.variants import local, needed_variants, place_of
from paceline.data.registered import open_registered
from paceline.data.shards import ORIGINAL, Dataset, default_folder
from paceline.data.splits import SPLITS, TRAIN, VAL, default_split, no_split
from paceline.system.logs import log
from paceline.system.remote import is_remote

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

    def evaluation_variant(self, phase: ResolvedPhase) -> str:
        """Return the variant of prepared images that a phase is validated on; empty for other data."""

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


def evaluation_variants(source: DataSource, timeline: Timeline) -> list[str]:
    """Return the variants of prepared images that a run is validated on, one after the other; none of other data."""
    return list(filter(None, dict.fromkeys(source.evaluation_variant(phase) for phase in timeline.phases)))


def without_effect(source: DataSource, variants: Collection[str]) -> str:
    """Return a warning about named variants of images that are not prepared; empty if all of them are used."""
    unused = sorted({*variants} - {"", ORIGINAL})
    if source.variants or not unused:
        return ""
    return (
        f"variant {', '.join(unused)} has no effect: {source.place or source.name} is not prepared, so its images are "
        "read as they are. Run `paceline prepare`, or leave the variant empty."
    )


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
    return ResidentData(recipe, sets.load(recipe.data))


def fetch(recipe: Recipe) -> None:
    """Download remote data to the local cache."""
    place = place_of(recipe)
    if recipe.data.name in _PREPARED and is_remote(place):
        local(place, needed_variants(recipe, cache.described(place)))


def _shards(recipe: Recipe, only_evaluate: bool, wanted: str) -> ImageData:
    place = place_of(recipe)
    dataset = cache.described(place)
    known = [split for split in SPLITS if split in dataset.description["splits"]]
    if not only_evaluate and (lacking := [split for split in (TRAIN, VAL) if split not in known]):
        raise no_split(place, lacking[0], known)
    default = default_split(known)
    if not wanted and default != VAL:
        log.info("%s has no val split; evaluating its %s split", place, default)
    if wanted and wanted not in known:
        raise split_unknown(place, wanted, known)
    needed = needed_variants(recipe, dataset, (wanted or default) if only_evaluate else "")
    evaluated = needed[wanted or default]
    if not recipe.evaluate.variant and ORIGINAL not in evaluated:
        log.info("%s has no original images; evaluating on %s", place, " and ".join(evaluated))
    dataset = Dataset.open(local(place, needed))
    splits: dict[str, Mapping[str, ImageSplit]] = {
        split: {name: dataset.split(split, name) for name in names} for split, names in needed.items() if split in known
    }
    names = tuple(dict.fromkeys(name for names in needed.values() for name in names))
    return ImageData(
        recipe,
        dataset.name,
        place,
        tuple(dataset.classes),
        f"{dataset.fingerprint}-{'+'.join(names)}",
        splits,
        {split: int(dataset.description["splits"][split]["samples"]) for split in known},
        names,
        default_split=default,
        dataset=dataset,
    )


def _files(recipe: Recipe, root: Path, only_evaluate: bool, split: str) -> ImageData:
    files = list_one_split(root, split) if only_evaluate else list_images(root)
    if not only_evaluate:  # which reads every image once, as preparing them would
        log.info(
            "%s: %d image files, which are decoded on every use. Prepared images load many times faster: run "
            '"paceline prepare %s --out DIR".',
            *(root, sum(map(len, files.splits.values())), root),
        )
    digest = listing_fingerprint(files, root)
    splits = {split: {"": ImageFiles(root, entries)} for split, entries in files.splits.items()}
    counts = {split: len(entries) for split, entries in files.splits.items()}
    classes = tuple(Class(id_, id_) for id_ in files.ids)
    default = next(split for split, entries in files.splits.items() if entries) if only_evaluate else VAL
    return ImageData(recipe, recipe.data.name, str(root), classes, digest, splits, counts, default_split=default)


def _registered(recipe: Recipe) -> ImageData:
    found, fingerprint = open_registered(recipe.data)
    classes = tuple(Class(name, name) for name in found["train"].classes)
    splits = {name: {"": split} for name, split in found.items()}
    counts = {name: len(split) for name, split in found.items()}
    return ImageData(recipe, recipe.data.name, "", classes, fingerprint, splits, counts)
