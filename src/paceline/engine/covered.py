"""Chooses the checkpoint to resume from: one whose steps are all in the records."""

from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.verified import CheckpointInfo, CorruptCheckpoint, describe, open_verified, verify
from paceline.config.recipe import Recipe
from paceline.distributed.world import World
from paceline.engine.replicas import Replicas
from paceline.engine.resume import check_recipe_file, check_same_experiment
from paceline.system.logs import log
from paceline.track.records import RunFolder


def _newest_covered(folder: RunFolder) -> CheckpointInfo | None:
    """Return the newest valid checkpoint that the records cover; if there is none, the newest one, with a warning.

    Records cover every checkpoint unless some of them were lost.
    """
    saved = store.last(folder.checkpoints)
    end = folder.last_recorded_step
    if saved is None or saved.step <= end:
        return saved
    lost = f"{folder.metrics} has no records from step {end} to the checkpoint of step {saved.step}"
    for path in store.committed(folder.checkpoints):
        try:
            if describe(path).step > end:
                continue
            covered, _ = open_verified(path)
        except CorruptCheckpoint:
            continue
        log.warning("%s; resuming from step %d so that no record is missing", lost, covered.step)
        return covered
    log.warning("%s; the records of %d steps are missing and are marked as such", lost, saved.step - end)
    return saved


def agree_on_checkpoint(
    world: World, replicas: Replicas, folder: RunFolder, recipe: Recipe, overrides: Sequence[str] | None
) -> Path | None:
    """Return the checkpoint that all ranks resume from. Every copy of it is verified once, by one rank of its node."""

    def choose() -> str | None:
        saved = _checkpoint_to_resume(folder, recipe, overrides)
        return str(saved.folder) if saved else None

    if (chosen := world.on_rank_zero(choose)) is None:
        return None
    path = Path(chosen)
    world.raise_together(lambda: verify(path) if replicas.keeps_copy else None)
    return path


def _checkpoint_to_resume(folder: RunFolder, recipe: Recipe, overrides: Sequence[str] | None) -> CheckpointInfo | None:
    """Return the checkpoint to resume from, after checking that it is of the same experiment."""
    saved = _newest_covered(folder)
    if overrides is not None:
        check_recipe_file(folder, saved, overrides)
    if saved:
        check_same_experiment(folder, recipe, saved)
    return saved
