"""Chooses the run folder of a start, and checks that a resumed run still trains the same recipe."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.analysis.sweeps.record import is_sweep
from paceline.checkpoint import store
from paceline.checkpoint.verified import CheckpointInfo, CorruptCheckpoint, describe
from paceline.config.batch import procs_per_node
from paceline.config.import_files import changed_files
from paceline.config.io import fingerprint, leaves, load_recipe, recipe_from_tree, to_tree
from paceline.config.recipe import PLACE_FIELDS, Recipe
from paceline.distributed.world import World
from paceline.errors import ConfigError, UserError
from paceline.system.logs import log
from paceline.track.records import RunFolder


def choose_folder(recipe: Recipe, root: Path, name: str, again: bool) -> Path:
    """Return the unfinished run with this name and recipe, or a new folder.

    With `again`, after a restart by the launcher, a finished run is returned as well.
    """
    if again and RunFolder(root / name).finished:
        return root / name
    numbered = [root / name, *(root / f"{name}-{number}" for number in range(2, 10_000))]
    free = next(number for number, path in enumerate(numbered) if not (RunFolder(path).contains_run or is_sweep(path)))
    for path in reversed(numbered[:free]):
        folder = RunFolder(path)
        if not folder.finished and fingerprint(recipe) in _fingerprints_of(folder):
            return path
    return numbered[free]


def folder_of_seed(recipe: Recipe, path: Path) -> Path:
    """Return the folder of one of several seeds; UserError if it has a run of another recipe."""
    if is_sweep(path):
        raise UserError("is-a-sweep", f"{path} is a sweep, not a run. Choose another --name.", path=path)
    folder = RunFolder(path)
    if folder.contains_run and fingerprint(recipe) not in _fingerprints_of(folder):
        message = (
            f"{path} has a run of another recipe than that of these seeds. Choose another --name, or move the folder "
            "away."
        )
        raise UserError("run-of-another-recipe", message, path=path, seed=recipe.seed)
    return path


def _fingerprints_of(folder: RunFolder) -> Iterator[str]:
    """Yield the fingerprint of recipe.yaml and, unless that is known to be unchanged, of the other copies."""
    as_written = folder.recipe_is_unchanged
    if as_written is not False:
        with suppress(UserError, OSError):  # missing, corrupt, or written by another version
            yield fingerprint(load_recipe(str(folder.recipe)))
    if not as_written:
        yield from (str(start["recipe"]) for start in folder.read_starts()[-1:] if "recipe" in start)
        if saved := saved_recipe(folder):
            yield fingerprint(saved[0])


def saved_recipe(folder: RunFolder) -> tuple[Recipe, Path] | None:
    """Return the copy of the recipe in the newest valid checkpoint, and the path of that checkpoint."""
    for path in store.committed(folder.checkpoints):
        try:
            return recipe_from_tree(describe(path).recipe, str(path)), path
        except (CorruptCheckpoint, ConfigError):
            continue
    return None


def how_to_resume(folder: RunFolder, recipe: Recipe, world: World) -> str:
    """Return the command that resumes an interrupted run, in as many processes as it had."""
    if job := os.environ.get("PACELINE_JOB"):
        return f"resume with: paceline resume {job}"
    if world.local_size < world.size:
        return "to resume, run the same command again on every node"
    procs = "" if world.size == procs_per_node(recipe) == 1 else f" --procs {world.size}"
    return f"resume with: paceline train --resume {folder.path}{procs}"


def experiment(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a recipe that define the experiment. Data is compared by its fingerprint, not its path."""
    data = {key: value for key, value in tree["data"].items() if key not in PLACE_FIELDS}
    return {key: value for key, value in tree.items() if key not in ("about", "imports", "callbacks")} | {"data": data}


def check_recipe_file(folder: RunFolder, saved: CheckpointInfo | None, overrides: Sequence[str]) -> None:
    """Refuse a recipe.yaml that differs from the checkpoint in fields other than `overrides`.

    A flipped bit could change the learning rate.
    """
    if folder.recipe_is_missing or folder.recipe_is_unchanged:
        return  # the copy in the checkpoint is used, or an earlier resume was killed before its first checkpoint
    if saved is None:
        if folder.recipe_is_unchanged is False:
            raise UserError(
                "recipe-file-changed",
                f"{folder.recipe} has changed since the run was started, and there is no checkpoint with a copy of "
                "it. Start a new run from the original recipe with another --name.",
                path=folder.recipe,
            )
        return
    found, kept = (dict(leaves(tree)) for tree in (to_tree(load_recipe(str(folder.recipe))), _tree_of(saved)))
    differing = [key for key in sorted(found.keys() | kept.keys()) if found.get(key) != kept.get(key)]
    if unexpected := [key for key in differing if not any(_covers(option, key) for option in overrides)]:
        values = "".join(
            f"\n  {key}: {found.get(key)!r} in recipe.yaml, {kept.get(key)!r} in the checkpoint" for key in unexpected
        )
        key = unexpected[0]
        raise UserError(
            "recipe-differs-from-checkpoint",
            f"{folder.recipe} differs from the recipe of {saved.folder}:{values}\n"
            f"Delete {folder.recipe} to continue with the checkpoint's recipe, or pass the values that you want as "
            f"options, e.g. --{key} {kept.get(key)}",
            keys=unexpected,
        )


def _covers(option: str, key: str) -> bool:
    """Return whether an option sets a field: the field itself, its group, or an entry of its list."""
    return option == key or key.startswith(f"{option}.") or option.startswith(f"{key}.")


def _tree_of(saved: CheckpointInfo) -> dict[str, Any]:
    return to_tree(recipe_from_tree(saved.recipe, f"{saved.folder}: recipe"))


def check_same_experiment(folder: RunFolder, recipe: Recipe, saved: CheckpointInfo) -> None:
    """Refuse overrides of a resumed run that change the experiment or the order of its data."""
    old, new = experiment(_tree_of(saved)), experiment(to_tree(recipe))
    for tree in (old, new):  # where activations come from does not change them
        tree["model"] = {key: value for key, value in tree["model"].items() if key != "activation_checkpointing"}
    changed = [key for key in ("seed", "data", "model", "phases", "ramp") if old[key] != new[key]]
    changed += [f"train.{key}" for key in ("global_batch",) if old["train"][key] != new["train"][key]]
    changed += [f"optim.{key}" for key in ("name", "options") if old["optim"][key] != new["optim"][key]]
    if changed:
        raise UserError(
            "resume-changes-experiment",
            f"{folder.path}: {', '.join(changed)} cannot change in a resumed run. Start a new run with --name.",
            path=folder.path,
            keys=changed,
        )


def warn_of_changed_code(folder: RunFolder, files: Mapping[str, str]) -> None:
    """Log which files of imported modules differ from those of the last start. No error: users fix their code."""
    last = (folder.read_starts() or [{}])[-1]
    if changed := changed_files(last.get("import_files", files), files):
        log.warning("the code of imported modules has changed since the last start of this run: %s", changed)
