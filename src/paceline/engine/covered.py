"""Chooses the checkpoint to resume from: one whose steps are all in the records."""

from paceline.checkpoint import store
from paceline.checkpoint.verified import CheckpointInfo, CorruptCheckpoint, describe, open_verified
from paceline.system.logs import log
from paceline.track.records import RunFolder


def newest_covered(folder: RunFolder) -> CheckpointInfo | None:
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
