"""Finds a checkpoint of a run and evaluates it."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.analysis.details.record import TRAINED_ON
from paceline.analysis.details.slices import DetailsSpec
from paceline.checkpoint import store
from paceline.checkpoint.verified import open_checkpoint, open_verified
from paceline.config.data import dataset_name
from paceline.config.imports import load_imports
from paceline.config.io import recipe_from_tree, split_overrides
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data import kinds
from paceline.data.classes import Class, match
from paceline.data.load.batch import Batch
from paceline.data.load.source import DataSource, open_source, without_effect
from paceline.data.splits import ALL, TRAIN, split_title
from paceline.distributed.ddp import broadcast_model
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.engine.build_model import build_model
from paceline.engine.evaluation.details import DetailsWriter
from paceline.engine.evaluation.evaluate import check_corrupt_fraction, evaluate
from paceline.engine.kernels import any_shape, choose_kernels
from paceline.engine.memory import memory_of_evaluation
from paceline.engine.resume import saved_recipe
from paceline.engine.weights import load_weights
from paceline.errors import UserError
from paceline.models import factory
from paceline.models.folders import EXPORT_SUFFIXES, WEIGHTS_FILE
from paceline.system import logs
from paceline.system.files import printable
from paceline.system.logs import log
from paceline.system.remote import is_remote
from paceline.system.wording import counted
from paceline.track.progress import display
from paceline.track.records import RunFolder


def _is_checkpoint(path: Path) -> bool:
    return (path / "COMMIT").exists()


def _is_run(path: Path) -> bool:
    folder = RunFolder(path)
    return folder.exists or folder.checkpoints.is_dir()


def is_export(path: Path) -> bool:
    """Return whether a path is named or built like an export.

    A checkpoint has a file of weights of the same name, and a run folder may have one because its model was exported
    into it.
    """
    if _is_checkpoint(path) or _is_run(path):
        return False
    return path.suffix.lower() in EXPORT_SUFFIXES or (path / WEIGHTS_FILE).is_file()


def find_checkpoint(path: Path, which: str) -> Path:
    """Return the checkpoint at a path: the path itself, or the best or last checkpoint of a run folder."""
    if _is_checkpoint(path):
        return path
    if is_export(path):
        raise UserError(
            "export-instead-of-run",
            f"{path} is an export, but a run or a checkpoint is needed. Give the run that it was exported from. To use "
            f"the export itself, run `paceline predict {path} IMAGES`.",
            path=path,
        )
    folder = RunFolder(path)
    if not _is_run(path):
        raise UserError(
            "not-a-run-or-checkpoint",
            f"{path} is neither a run folder (with recipe.yaml) nor a checkpoint (with COMMIT). `paceline runs` lists "
            "runs.",
            path=path,
        )
    newest = next(store.committed(folder.checkpoints), None)
    if newest is None:
        raise UserError(
            "no-checkpoint",
            f"{path} has no complete checkpoint. Let it train until its first checkpoint.",
            path=path,
        )
    if which == "last":
        return newest
    # the metric comes from the checkpoint, because recipe.yaml has no checksum
    recipe = saved_recipe(folder)
    best = store.best(folder.checkpoints, recipe[0].checkpoint.best) if recipe else None
    return best.folder if best else newest


def evaluate_path(
    path: Path, which: str, overrides: Sequence[str], split: str = "", details: DetailsSpec | None = None
) -> tuple[str, dict[str, Any]]:
    """Evaluate a checkpoint with its recipe and some overrides. Returns a label, and the metrics on rank 0.

    `split`: by default that of validation, or what image files have instead of it. `details`: also write what the
    model gets wrong; the metrics then have `details`, the folder.
    """
    # only rank 0 needs the folder, so the device cannot come from the recipe in it
    world = World.from_env("".join(dict(split_overrides(overrides)).get("device", [])) or "auto")
    with world.connected():
        logs.set_up(world.rank, world.size)
        # a run in progress may replace its checkpoints, so rank 0 chooses one for all ranks
        with world.long_timeout():
            place, progress = world.on_rank_zero(lambda: _verified(path, which))
        folder = Path(place)
        recipe = evaluation_recipe(progress, place, overrides)
        load_imports(recipe)
        recipe = kinds.resolve(recipe)
        source = open_source(recipe, only_evaluate=True, split=split)
        split = split or source.default_split
        _check_channels(folder, len(progress["preprocessing"]["mean"]), source)
        # the checkpoint has all the weights, so none are downloaded
        plain = dataclasses.replace(recipe, model=factory.untrained(recipe.model, progress["model"]))
        timeline = Timeline.of(recipe, source.num_train)
        classes = [Class(*entry) for entry in progress["classes"]]
        numbers = match(classes, source.classes, folder, source.place or source.name)
        model = build_model(plain, source, len(classes), timeline, world)
        with world.long_timeout():
            weights = world.on_rank_zero(lambda: _load(model, folder))
            broadcast_model(model, world)
        resolved = precision.resolve(recipe.precision, world)
        choose_kernels(world.device, recipe.tf32)
        batches = source.evaluator(timeline.phases[-1], world.rank, world.size, world.device, split=split)
        facts = _facts(progress, folder, weights, source, split, recipe, resolved)
        if world.is_rank_zero:
            _warn(facts, source, split, recipe)
        writer = DetailsWriter(details, facts, folder, batches, world) if details else None
        with (
            memory_of_evaluation(recipe, world),
            closing(display(world.is_rank_zero)) as shown,
            shown.evaluating(batches) as advance,
            any_shape(),
        ):
            metrics = evaluate(
                model,
                _relabeled(batches, numbers),
                len(classes),
                world,
                lambda: precision.autocast(resolved, world.device),
                recipe.evaluate.tta,
                advance,
                keep=writer.keep if writer else lambda *_: None,
            )
            check_corrupt_fraction(metrics, batches.num_samples, recipe.data.max_corrupt)
            written = {"details": writer.write()} if writer else {}
    some = _left_out(int(batches.num_samples - metrics["samples"]), len(numbers), len(classes))
    data = _shown(source, split, recipe)
    label = f"{folder} (step {progress['step']}), {data}{some}, TTA {recipe.evaluate.tta}"
    return label, metrics | written | {"num_classes": len(classes)} if world.is_rank_zero else {}


def _variant(source: DataSource, recipe: Recipe) -> str:
    return source.evaluation_variant(Timeline.of(recipe, source.num_train).phases[-1])


def _shown(source: DataSource, split: str, recipe: Recipe) -> str:
    """Return which images are evaluated."""
    variant = _variant(source, recipe)
    return f"{source.place or source.name} ({split_title(split)}{variant and f', variant {variant}'})"


def _left_out(corrupt: int, present: int, classes: int) -> str:
    """Return which images and classes are not evaluated."""
    some = f", {counted(corrupt, 'corrupt image')} left out" if corrupt else ""
    return some + (f", {present} of the model's {classes} classes" if present < classes else "")


def _check_channels(folder: Path, channels: int, source: DataSource) -> None:
    if channels != source.channels:
        raise UserError(
            "channels-mismatch",
            f"{folder} was trained on images with {counted(channels, 'channel')}, but {source.name} has "
            f"{source.channels}. "
            "Evaluate it on data with the same number of channels.",
            path=folder,
            expected=channels,
            found=source.channels,
        )


def _warn(facts: dict[str, Any], source: DataSource, split: str, recipe: Recipe) -> None:
    if facts["data"]["trained_on"]:
        log.warning("%s (%s): %s", facts["data"]["name"], split_title(split), TRAINED_ON)
    if warning := without_effect(source, [recipe.evaluate.variant_for("")]):
        log.warning(warning)


def _facts(
    progress: dict[str, Any], folder: Path, weights: str, source: DataSource, split: str, recipe: Recipe, precision: str
) -> dict[str, Any]:
    """Return what is evaluated, for details.json."""
    place = source.place and (source.place if is_remote(source.place) else str(Path(source.place).absolute()))
    # all variants have the same samples
    fingerprint = source.fingerprint.removesuffix(f"-{'+'.join(source.variants)}")
    is_own = _is_own(progress, fingerprint, recipe)
    data = {
        "name": printable(dataset_name(recipe.data.name, source.place) or source.name),
        "kind": recipe.data.name,
        "place": printable(place),
        "split": split,
        **({"variant": variant} if (variant := _variant(source, recipe)) else {}),
        "fingerprint": fingerprint,
        "own": is_own,
        "trained_on": is_own and split in (TRAIN, ALL),
    }
    classes = [{"id": printable(id_), "name": printable(name)} for id_, name in progress["classes"]]
    settings = {"weights": weights, "tta": recipe.evaluate.tta, "precision": precision}
    return {"checkpoint": folder.name, "step": progress["step"], **settings, "data": data, "classes": classes}


def _is_own(progress: dict[str, Any], fingerprint: str, recipe: Recipe) -> bool:
    """Return whether the model was trained on a split of this data.

    Image files are compared by place, because their fingerprint is that of the splits that are read.
    """
    trained, saved = progress["data"]["fingerprint"], progress["recipe"]["data"].get("path")
    if trained == fingerprint or trained.startswith(f"{fingerprint}-"):
        return True
    places = [Path(str(path or "")).expanduser().resolve() for path in (saved, recipe.data.path)]
    return recipe.data.name in ("folder", "list") and places[0] == places[1]


def _relabeled(batches: Iterable[Batch], numbers: list[int]) -> Iterator[Batch]:
    """Map labels of the data to the class indices of the model."""
    if numbers == list(range(len(numbers))):
        yield from batches
        return
    for batch in batches:
        table = torch.tensor(numbers, device=batch.labels.device)
        yield dataclasses.replace(batch, labels=table[batch.labels])


def _verified(path: Path, which: str) -> tuple[str, dict[str, Any]]:
    """Return the folder and the progress of a checkpoint, after verifying it."""
    checkpoint, parts = open_verified(find_checkpoint(path, which))
    return str(checkpoint.folder), parts["progress"]


def _load(model: nn.Module, folder: Path) -> str:
    """Load the averaged weights if there are any, else the trained ones. Returns which."""
    _, parts = open_checkpoint(folder)
    load_weights(model, parts["ema"] or parts["model"], str(folder))
    return "ema" if parts["ema"] else "model"


def evaluation_recipe(progress: dict[str, Any], origin: str, overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a checkpoint, with the preprocessing of its training data."""
    saved, seen = progress["recipe"], progress["preprocessing"]
    # evaluation does not augment, and the settings may not be valid for other data
    data = saved["data"] | {key: seen[key] for key in ("mean", "std", "interpolation")} | {"augment": {}}
    given = {key for key, _ in split_overrides(overrides)}
    if "data.path" in given and "data.name" not in given:
        data["name"] = ""  # derived from the path
    return recipe_from_tree(saved | {"data": data}, origin, overrides)
