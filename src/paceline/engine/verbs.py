"""What verbs print."""

from collections.abc import Sequence
from pathlib import Path

from paceline.base.world import World
from paceline.checkpoint import store
from paceline.config.io import recipe_from_tree, split_overrides
from paceline.engine.session import evaluate_save, find_save
from paceline.errors import UserError


def evaluate_path(path: Path, which: str, overrides: Sequence[str], allowed: Sequence[str]) -> None:
    for key, _ in split_overrides(overrides):
        if key.partition(".")[0].replace("-", "_") not in allowed:
            raise UserError(f"--{key} has no bearing on an evaluation; possible are fields of {', '.join(allowed)}")
    folder = find_save(path, which)
    save, parts = store.read(folder)
    recipe = recipe_from_tree(parts["progress"]["recipe"], str(folder), overrides)
    metrics = evaluate_save(folder, recipe)
    if World.from_env(recipe.device).is_leader:
        print(
            f"{folder} (step {save.step}), {recipe.data.name}, views {recipe.evaluate.views}: "
            f"top-1 {metrics['top1']:.2%} ({metrics['correct']} of {metrics['samples']}), "
            f"top-5 {metrics['top5']:.2%}, loss {metrics['loss']:.4f}"
        )
