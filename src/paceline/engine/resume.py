"""Which run folder a start belongs to, and whether its recipe is still the one that was trained there."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.checkpoint import store
from paceline.checkpoint.verified import CheckpointInfo, CorruptCheckpoint, describe
from paceline.config.io import fingerprint, leaves, load_recipe, recipe_from_tree, to_tree
from paceline.config.recipe import PLACE_FIELDS, Recipe
from paceline.errors import ConfigError, UserError
from paceline.track.records import RunFolder


def choose_folder(recipe: Recipe, root: Path, name: str, again: bool) -> Path:
    """The unfinished run of this name and recipe, or a new folder; `again`: the finished one, after a restart."""
    if again and RunFolder(root / name).finished:
        return root / name
    numbered = [root / name, *(root / f"{name}-{number}" for number in range(2, 10_000))]
    free = next(number for number, path in enumerate(numbered) if not RunFolder(path).is_taken)
    for path in reversed(numbered[:free]):
        folder = RunFolder(path)
        if not folder.finished and _fingerprint_of(folder) == fingerprint(recipe):
            return path
    return numbered[free]


def _fingerprint_of(folder: RunFolder) -> str:
    """What the run trains: as recipe.yaml tells, or else its last start, or its newest checkpoint."""
    if folder.recipe_is_as_written is not False:
        with suppress(UserError, OSError):  # missing, corrupt, or written by another version
            return fingerprint(load_recipe(str(folder.recipe)))
    if started := [str(start["recipe"]) for start in folder.read_starts()[-1:] if "recipe" in start]:
        return started[0]
    saved = saved_recipe(folder)
    return fingerprint(saved[0]) if saved else ""


def saved_recipe(folder: RunFolder) -> tuple[Recipe, Path] | None:
    """The copy of the recipe in the newest sound checkpoint, and where that is."""
    for path in store.committed(folder.checkpoints):
        try:
            return recipe_from_tree(describe(path).recipe, str(path)), path
        except (CorruptCheckpoint, ConfigError):
            continue
    return None


def experiment(tree: dict[str, Any]) -> dict[str, Any]:
    """What a recipe says of the experiment; the data's own identity is compared by its fingerprint."""
    data = {key: value for key, value in tree["data"].items() if key not in PLACE_FIELDS}
    return {key: value for key, value in tree.items() if key != "about"} | {"data": data}


def check_recipe_file(folder: RunFolder, saved: CheckpointInfo | None, asked: Sequence[str]) -> None:
    """Refuse a recipe.yaml that differs from the checkpoint unasked: a flipped bit makes another learning rate."""
    if folder.recipe_is_lost or folder.recipe_is_as_written:
        return  # the checkpoint's copy is used; or options of an earlier resume, killed before its first checkpoint
    if saved is None:
        if folder.recipe_is_as_written is False:
            raise UserError(
                f"{folder.recipe} is not what the run was started with, and there is no checkpoint yet; start it again "
                "from its own recipe, with another --name"
            )
        return
    mine, kept = (dict(leaves(tree)) for tree in (to_tree(load_recipe(str(folder.recipe))), _tree_of(saved)))
    differing = [key for key in sorted(mine.keys() | kept.keys()) if mine.get(key) != kept.get(key)]
    if unasked := [key for key in differing if not any(_covers(option, key) for option in asked)]:
        values = "".join(f"\n  {key}: {mine.get(key)!r} there, {kept.get(key)!r} in the checkpoint" for key in unasked)
        key = unasked[0]
        raise UserError(
            f"{folder.recipe} is not the recipe of {saved.folder}:{values}\n"
            f"Delete {folder.recipe} to continue with the checkpoint's recipe, or give the values that you want as "
            f"options, e.g. --{key} {kept.get(key)}"
        )


def _covers(option: str, key: str) -> bool:
    """Whether an option sets a field: itself, its group, or an entry of its list."""
    return option == key or key.startswith(f"{option}.") or option.startswith(f"{key}.")


def _tree_of(saved: CheckpointInfo) -> dict[str, Any]:
    return to_tree(recipe_from_tree(saved.recipe, f"{saved.folder}: recipe"))


def check_same_experiment(folder: RunFolder, recipe: Recipe, saved: CheckpointInfo) -> None:
    """Overrides of a resumed run must not change what its position in the data means."""
    old, new = experiment(_tree_of(saved)), experiment(to_tree(recipe))
    changed = [key for key in ("seed", "data", "model", "phases", "ramp") if old[key] != new[key]]
    changed += [f"train.{key}" for key in ("global_batch",) if old["train"][key] != new["train"][key]]
    changed += [f"optim.{key}" for key in ("name",) if old["optim"][key] != new["optim"][key]]
    if changed:
        raise UserError(
            f"{folder.path}: {', '.join(changed)} cannot change in a resumed run; start a new one with --name"
        )
