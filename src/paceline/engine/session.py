"""One training session: chooses the run folder, builds the setup, trains or resumes."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.analysis.read import read
from paceline.analysis.run import shows_top5
from paceline.analysis.verdict import verdict
from paceline.checkpoint import store
from paceline.checkpoint.results import Results
from paceline.config.recipe import Recipe
from paceline.data import kinds
from paceline.data.load.source import fetch
from paceline.distributed import flight_recorder
from paceline.distributed.reports import report_run
from paceline.distributed.world import World
from paceline.engine.announce import announce
from paceline.engine.build import Setup, build
from paceline.engine.covered import agree_on_checkpoint
from paceline.engine.memory import memory_of_training
from paceline.engine.open_run import open_run
from paceline.engine.parts import check_parts
from paceline.engine.profiling import profiled_steps
from paceline.engine.rank_checks import check_same_data, check_same_imports, check_same_recipe
from paceline.engine.replicas import Replicas
from paceline.engine.resume import choose_folder
from paceline.engine.run import TrainingRun
from paceline.engine.train import train
from paceline.errors import UserError
from paceline.models import preprocessing
from paceline.system import logs
from paceline.system.files import LOCK_NAME, FolderLock, disk_error, make_folder, suppress_os_errors
from paceline.system.logs import log
from paceline.system.outcome import report_outcome
from paceline.track.records import RunFolder
from paceline.track.telemetry import HostSampler

_LOCK_GRACE = 5.0  # seconds that ranks of a killed launcher may need to exit and free their memory


@dataclass(frozen=True)
class TrainingSession:
    """Ranks that are connected, and what all runs that they train have in common."""

    world: World
    recipe: Recipe
    """With the preprocessing of pretrained weights."""
    notes: list[str]
    results: str
    """URL that run folders are copied to."""
    profile: str
    after_disconnect: ExitStack

    @property
    def is_restart(self) -> bool:
        """Whether the elastic agent restarted a rank after a failure: a finished run is not trained again."""
        return any(self.world.all_gather_object(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))


def train_recipe(
    recipe: Recipe,
    root: Path,
    name: str,
    resume: Path | None = None,
    results: str = "",
    overrides: Sequence[str] = (),
    profile: str = "",
) -> Path:
    """Train a recipe in a new run folder in `root`, or resume an unfinished one, and return the folder.

    `overrides`: fields of a resumed run that the user set, which may differ from its recipe.yaml. `profile`: e.g. 10ba.
    """
    with session(recipe, results, profile, resume=resume is not None) as now:
        again, recipe = now.is_restart, now.recipe
        resumed = overrides if resume else None
        return train_run(now, recipe, lambda: resume or choose_folder(recipe, root, name, again), again, resumed)


@contextmanager
def session(recipe: Recipe, results: str = "", profile: str = "", resume: bool = False) -> Iterator[TrainingSession]:
    """Connect the ranks, which must have the same recipe, until the end of the block."""
    world = World.from_env(recipe.device)
    logs.set_up(world.rank, world.size)
    check_parts(recipe, resume)  # before a folder is created or data is fetched
    recipe = kinds.resolve(recipe)
    # the recipe of a run has the preprocessing of its weights, whose file may be gone
    recipe, notes = (recipe, []) if resume else preprocessing.resolve(recipe)
    fetch(recipe)  # may take longer than the timeout of connected ranks
    # uploads end after the ranks have disconnected, because a slow upload would exceed their timeout
    with ExitStack() as after_disconnect, world.connected():
        check_same_recipe(recipe, world)
        check_same_imports(recipe, world)
        yield TrainingSession(world, recipe, notes, results, profile, after_disconnect)


def train_run(
    now: TrainingSession,
    recipe: Recipe,
    choose: Callable[[], Path],
    skip_finished: bool,
    overrides: Sequence[str] | None = None,
) -> Path:
    """Train a recipe in the folder that rank 0 chooses, or resume it, and return the folder.

    `overrides`: None, unless it is the user who resumes this run.
    """
    world, results = now.world, now.results
    with ExitStack() as cleanup:
        path = Path(world.on_rank_zero(lambda: str(_claim_folder(choose(), cleanup))))
        folder = RunFolder(path)
        flight_recorder.set_folder(folder.flight_recorder)
        replicas = Replicas(world, folder)
        cleanup.callback(replicas.wait)
        replicas.copy_newest()
        if skip_finished and world.broadcast_object(folder.finished):
            log.info("%s is finished", path)
            if results and world.is_rank_zero:
                now.after_disconnect.callback(Results(path, results, recipe.checkpoint.best).close)
            return path
        if folder.contains_run and overrides is None:
            log.info("%s is not finished; resuming it", path)
        with world.long_timeout():
            saved = agree_on_checkpoint(world, replicas, folder, recipe, overrides)
        with memory_of_training(recipe, world, folder):
            setup = build(recipe, world, resume=saved is not None)
            check_same_data(setup.source, world)
            announce(setup, path, saved, now.notes)
            profiled = profiled_steps(now.profile, setup.timeline, store.step_of(saved) if saved else 0)
            run = open_run(folder, setup, saved, replicas, profiled)
        if results and world.local_rank == 0:
            only = "" if world.is_rank_zero else "telemetry"
            now.after_disconnect.callback(Results(path, results, recipe.checkpoint.best, only).close)
        _sample_host(folder, world, cleanup)
        cleanup.callback(run.display.close)
        summary = _train(setup, run)
        if world.is_rank_zero:
            _log_verdict(path)
            _log_results(folder, setup, summary)
        return path


def _train(setup: Setup, run: TrainingRun) -> dict[str, Any]:
    try:
        with memory_of_training(setup.recipe, setup.world, run.folder):
            return train(setup, run)
    except UserError as error:
        run.failed(error)
        raise


def _sample_host(folder: RunFolder, world: World, cleanup: ExitStack) -> None:
    """Record the utilization of this host until the cleanup. A collective."""
    gpus, processes = world.gpus_here(), world.processes_here()
    if world.local_rank == 0:
        sampler = HostSampler(folder.telemetry, gpus=gpus, processes=processes)
        cleanup.callback(suppress_os_errors(folder.sync))
        cleanup.callback(suppress_os_errors(sampler.stop))


def _log_results(folder: RunFolder, setup: Setup, summary: dict[str, Any]) -> None:
    final, metric = summary.get("final"), setup.recipe.checkpoint.best
    if not final:
        return
    last, best = next(store.committed(folder.checkpoints)), store.best(folder.checkpoints, metric)
    top5 = f", top-5 {final['top5']:.2%}" if shows_top5(len(setup.source.classes)) else ""
    results = f"top-1 {final['top1']:.2%}{top5} ({last.name})"
    if best and best.folder != last:
        value = f"{best.metrics['top1']:.2%}" if metric == "top1" else f"{best.metrics['loss']:.4f}"
        epoch = setup.timeline.epoch_at(best.step)
        results += (
            f"; best {'top-1' if metric == 'top1' else metric} {value} (epoch {round(epoch, 2):g}, {best.folder.name})"
        )
    if tested := summary.get("test"):
        results += f"; test top-1 {tested['top1']:.2%}"
    speed = f"{summary['train_seconds']:.1f} s of training, {summary['images_per_second']:,.0f} images/s"
    log.info("finished: %s; %s; %s", results, speed, folder.path)


def _log_verdict(path: Path) -> None:
    try:
        run = read(path)
        log.info("%s", verdict(run)[0].text)
        if run.disturbance:
            log.warning("%s", run.disturbance)
    except Exception as error:  # the run is complete, so a bug in the analysis must not fail it
        log.warning("the bottlenecks of the run could not be determined: %s", error)


def _claim_folder(path: Path, cleanup: ExitStack) -> Path:
    """Lock the folder and log to it until the cleanup, and report it to the launcher."""
    folder = RunFolder(path)
    new = not path.exists()
    if refused := list(folder.unwritable()):
        message = f"{path} is not safe to write to: {'; '.join(refused)}"
        raise UserError("run-folder-unsafe", message, path=path)
    try:
        make_folder(path)
        cleanup.callback(FolderLock(path, grace=_LOCK_GRACE).release)
        if new:
            cleanup.callback(_remove_if_unused, folder)
        handler = logs.also_to(folder.log)
    except OSError as error:
        message = f"{disk_error(error)}, or choose another folder with --runs."
        raise UserError("run-folder-not-writable", message, path=path) from None
    cleanup.callback(suppress_os_errors(handler.close))
    cleanup.callback(log.removeHandler, handler)
    report_outcome(run=str(path.absolute()))
    report_run(path.absolute())
    return path


def _remove_if_unused(folder: RunFolder) -> None:
    """Remove the folder of a start that was refused before it trained anything."""
    if not folder.exists and {path.name for path in folder.path.iterdir()} <= {LOCK_NAME, folder.log.name}:
        shutil.rmtree(folder.path)
