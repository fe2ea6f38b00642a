"""What a finished or a running run left: find a checkpoint, and evaluate it."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint import store
from paceline.checkpoint.shared import read_on_rank_zero
from paceline.checkpoint.verified import describe, read
from paceline.config.io import recipe_from_tree, split_overrides
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data import kinds
from paceline.data.classes import Class, match
from paceline.data.load.batch import Batch
from paceline.data.load.source import open_source
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.engine.build import build_model, load_weights
from paceline.engine.evaluate import evaluate, refuse_damage
from paceline.engine.session import display_of
from paceline.errors import UserError
from paceline.models import factory
from paceline.system import logs
from paceline.track.records import RunFolder


def find_checkpoint(path: Path, which: str) -> Path:
    """The checkpoint a path means: itself, or a run's best or last one."""
    if (path / "COMMIT").exists():
        return path
    folder = RunFolder(path)
    if not folder.exists and not folder.checkpoints.is_dir():
        raise UserError(f"{path} is neither a run folder (with recipe.yaml) nor a checkpoint (with COMMIT)")
    newest = next(store.committed(folder.checkpoints), None)
    if newest is None:
        raise UserError(f"{path} has no complete checkpoint; let it train to its first checkpoint")
    if which == "last":
        return newest
    # by the checkpoint's own copy: recipe.yaml is not covered by a checksum
    best = store.best(folder.checkpoints, str(describe(newest).recipe["checkpoint"].get("best")))
    return best.folder if best else newest


def evaluate_path(path: Path, which: str, overrides: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Evaluate a checkpoint with its own recipe, some fields overridden; a label, and on rank 0 the metrics."""
    # only the leader need see the folder, so a device other than the default has to come from the command line
    world = World.from_env("".join(dict(split_overrides(overrides)).get("device", [])) or "auto")
    with world.connected():
        logs.set_up(world.rank, world.size)
        # the run may be going on, and replace its checkpoints: the leader's choice counts
        checkpoint, parts = read_on_rank_zero(world, lambda: read(find_checkpoint(path, which)))
        folder = checkpoint.folder
        recipe = kinds.resolve(_saved_recipe(parts, str(folder), overrides))
        source = open_source(recipe, only_evaluate=True)
        if (channels := len(parts["progress"]["preprocessing"]["mean"])) != source.channels:
            raise UserError(
                f"{folder} was trained on images of {channels} channels, {source.name} has {source.channels}; "
                "evaluate it on data of the same kind"
            )
        # the checkpoint brings all the weights: nothing is to be fetched
        plain = dataclasses.replace(recipe, model=factory.untrained(recipe.model))
        timeline = Timeline.of(recipe, source.num_train)
        classes = [Class(*own) for own in parts["progress"]["classes"]]
        numbers = match(classes, source.classes, folder, source.place or source.name)
        model = build_model(plain, source, len(classes), timeline, world)
        load_weights(model, parts["ema"] or parts["model"], str(folder))
        resolved = precision.resolve(recipe.precision, world.device)
        batches = source.evaluator(timeline.phases[-1], world.rank, world.size, world.device)
        with closing(display_of(world)) as display, display.evaluating(batches) as advance:
            metrics = evaluate(
                model,
                _relabeled(batches, numbers),
                len(classes),
                world,
                lambda: precision.autocast(resolved, world.device),
                recipe.evaluate.tta,
                advance,
            )
    refuse_damage(metrics, batches.num_samples, recipe.data.max_corrupt)
    lost = batches.num_samples - metrics["samples"]
    some = f", {lost:g} images left out" if lost else ""
    some += f", {len(numbers)} of the model's {len(classes)} classes" if len(numbers) < len(classes) else ""
    label = f"{folder} (step {checkpoint.step}), {source.place or source.name}{some}, views {recipe.evaluate.tta}"
    return label, metrics if world.is_rank_zero else {}


def _relabeled(batches: Iterable[Batch], numbers: list[int]) -> Iterator[Batch]:
    """Labels of the data as the model numbers its classes."""
    if numbers == list(range(len(numbers))):
        yield from batches
        return
    for batch in batches:
        table = torch.tensor(numbers, device=batch.labels.device)
        yield dataclasses.replace(batch, labels=table[batch.labels])


def _saved_recipe(parts: dict[str, Any], origin: str, overrides: Sequence[str]) -> Recipe:
    """The recipe of a checkpoint; images are normalized as in training, whatever data they come from."""
    tree, seen = parts["progress"]["recipe"], parts["progress"]["preprocessing"]
    # augmentation has no bearing here, and may not suit other data
    tree["data"] = tree["data"] | {"mean": seen["mean"], "std": seen["std"], "augment": {}}
    given = {key for key, _ in split_overrides(overrides)}
    if "data.path" in given and "data.name" not in given:
        tree["data"]["name"] = ""  # the path decides
    return recipe_from_tree(tree, origin, overrides)
