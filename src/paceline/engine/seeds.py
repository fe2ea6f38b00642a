"""Trains the seeds of a recipe one after the other, on ranks that stay connected.

For ranks that a launcher started, and for several nodes: all ranks are at the same seed without further agreement, and
after a restart they skip the finished ones together. On one node, cli/seeds.py starts a process per seed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.config.recipe import Recipe
from paceline.config.seeds import failed_seeds, run_name
from paceline.distributed import reports
from paceline.engine.resume import folder_of_seed
from paceline.engine.session import session, train_run
from paceline.errors import UserError
from paceline.system.device import release_memory
from paceline.system.logs import log
from paceline.system.outcome import report_outcome

_OF_ONE_SEED = ("loss-not-finite", "validation-loss-not-finite", "below-expected-curve", "run-of-another-recipe")
"""Errors of one seed that all ranks raise together, so that they can train the next seed."""


def train_seeds(
    recipe: Recipe, seeds: Sequence[int], root: Path, name: str, results: str = "", profile: str = ""
) -> list[Path]:
    """Train one run per seed in `root` and return their folders; finished runs are skipped, unfinished ones resumed.

    If seeds fail that others need not follow, UserError names them at the end.
    """
    failures: dict[int, str] = {}
    paths = [root / run_name(name, seed) for seed in seeds]
    first: UserError | None = None
    with session(recipe, results, profile) as now:
        for number, (seed, path) in enumerate(zip(seeds, paths, strict=True), start=1):
            own = replace(now.recipe, seed=seed)
            reports.begin_run(number)
            with now.world.long_timeout():  # ranks end the previous run at different times
                now.world.barrier()
            if len(seeds) > 1:
                log.info("seed %d (%d of %d): %s", seed, number, len(seeds), path)
            try:
                train_run(now, own, partial(folder_of_seed, own, path), skip_finished=True)
            except UserError as error:
                if error.code not in _OF_ONE_SEED:
                    raise
                if now.world.is_rank_zero and len(seeds) > 1:
                    log.error("seed %d failed: %s", seed, error.report)
                failures[seed], first = error.report, first or error
            release_memory(now.world.device)
    if first and len(seeds) == 1:
        raise first
    if failures:
        raise failed_seeds(failures, len(seeds))
    report_outcome(runs=[str(path.absolute()) for path in paths])
    return paths
