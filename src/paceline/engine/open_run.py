"""Opens the outputs of a training run, after everything that could refuse its start."""

import hashlib
import os
from pathlib import Path

from paceline.checkpoint import store
from paceline.checkpoint.verified import open_checkpoint
from paceline.checkpoint.writer import NoWriter, ShardedWriter, Writer
from paceline.config.batch import memory_key, strategy
from paceline.config.import_files import file_hashes, sources
from paceline.config.io import dump_recipe, fingerprint, to_tree
from paceline.engine.build import Setup
from paceline.engine.callbacks import Callbacks
from paceline.engine.checkpoints import Checkpoints
from paceline.engine.evaluation.assessment import Assessment
from paceline.engine.examples import examples
from paceline.engine.profiling import Profiler
from paceline.engine.replicas import Replicas
from paceline.engine.resume import warn_of_changed_code
from paceline.engine.run import TrainingRun
from paceline.errors import UserError
from paceline.system.files import write_text
from paceline.system.logs import log
from paceline.track import environment
from paceline.track.json_lines import JsonLines
from paceline.track.progress import display
from paceline.track.records import RunFolder, largest_batch
from paceline.track.sinks import (
    DiskWarning,
    Guarded,
    InBackground,
    MLflow,
    MultiSink,
    Sink,
    WeightsAndBiases,
    identity,
    started,
)
from paceline.track.tensorboard import TensorBoard


def open_run(folder: RunFolder, setup: Setup, saved: Path | None, replicas: Replicas, profiled: int) -> TrainingRun:
    """Load the checkpoint of a resumed run, and return the run with its open outputs."""
    world, recipe = setup.world, setup.recipe
    first_step = 0
    if saved:
        with world.long_timeout():  # every rank reads what it needs
            first_step = world.raise_together(lambda: setup.load(open_checkpoint(saved)[1], str(saved)))
    metric = recipe.checkpoint.best
    assessment = Assessment(setup, world.on_rank_zero(lambda: _best_value(folder, metric)))
    _refuse_finished(folder, setup, first_step, assessment.stop_reason)
    callbacks = Callbacks.create(recipe, world, folder, setup.total_steps, first_step)
    if saved:
        log.info("resuming from step %d (%s)", first_step, saved)
    hosts = world.hosts()
    start, key = environment.collect(hosts, world.device), memory_key(recipe, world.size)
    if world.is_rank_zero:  # only after all checks: a refused start changes nothing
        import_files = file_hashes(recipe.imports)
        if saved:
            warn_of_changed_code(folder, import_files)
            store.set_aside_from(folder.checkpoints, first_step + 1)
        text = dump_recipe(recipe)
        checksum = hashlib.sha256(text.encode()).hexdigest()
        folder.append_environment(
            start
            | {"ranks": world.size, "host_of_rank": hosts, "precision": setup.precision, "first_step": first_step}
            | {"recipe": fingerprint(recipe), "recipe_sha256": checksum, "data": setup.source.fingerprint}
            | {"imports": sources(recipe.imports), "import_files": import_files}
            | {"strategy": strategy(recipe, world.size), "threads_chosen": "PACELINE_THREADS" in os.environ}
            | {"memory_key": key, "largest_batch": largest_batch(folder.path.parent, key)}
        )
        write_text(folder.recipe, text)
    disk = DiskWarning()
    run = TrainingRun(
        folder,
        setup,
        MultiSink(_sinks(folder, setup, first_step, disk) if world.is_rank_zero else []),
        Checkpoints(world, _writer(folder, setup), replicas),
        display(world.is_rank_zero, setup.total_steps, first_step),
        replicas,
        callbacks,
        assessment,
        first_step,
        disk=disk,
    )
    if world.is_rank_zero:
        if profiled:
            run.profiler = Profiler(folder.profile, profiled, world.device, run.sink)
        run.begin()
    return run


def _refuse_finished(folder: RunFolder, setup: Setup, first_step: int, stop_reason: str) -> None:
    """Raise an error if the run is complete, and log that a run is continued which was stopped early. A collective."""
    finished = setup.world.on_rank_zero(lambda: folder.finished)
    if first_step > setup.total_steps or (first_step == setup.total_steps and finished):
        raise UserError(
            "run-finished",
            f"{folder.path} is finished at step {first_step}. Increase --train.duration to train longer.",
            path=folder.path,
            step=first_step,
        )
    if finished and stop_reason:
        raise UserError(
            "run-finished",
            f"{folder.path} is finished: it stopped early at step {first_step}, because {stop_reason}. To train "
            f"longer, increase --early_stop.patience above {setup.recipe.early_stop.patience}, or set it to 0 (off).",
            path=folder.path,
            step=first_step,
        )
    if finished and setup.world.is_rank_zero and (reason := folder.read_summary().get("stop_reason")):
        log.info("%s was stopped early (%s). Its training continues now.", folder.path, reason)


def _writer(folder: RunFolder, setup: Setup) -> Writer | NoWriter:
    settings, shard = setup.recipe.checkpoint, setup.replica.shard
    if shard.count > 1:
        # FSDP is for models that fill the memory: on CPUs there is none for a copy, so that training waits for the disk
        copies_cpu = setup.world.device.type != "cpu"
        return ShardedWriter(folder.checkpoints, settings.keep, settings.best, shard, copies_cpu)
    return Writer(folder.checkpoints, settings.keep, settings.best) if setup.world.is_rank_zero else NoWriter()


def _best_value(folder: RunFolder, metric: str) -> float | None:
    """Return the metric of the best checkpoint, negated if lower is better."""
    best = store.best(folder.checkpoints, metric)
    return (-best.metrics[metric] if metric == "loss" else best.metrics[metric]) if best else None


def _sinks(folder: RunFolder, setup: Setup, first_step: int, disk: DiskWarning) -> list[Sink]:
    resumed = first_step > 0 or folder.metrics.exists()
    missing = first_step - folder.last_recorded_step if first_step else 0
    lines = JsonLines(folder.metrics)
    if resumed:
        gap = {"missing": missing} if missing > 0 else {}
        lines.write({"kind": "resume", "step": first_step, "ranks": setup.world.size} | gap)
    sinks: list[Sink] = [Guarded(lines, disk)]
    settings, recipe = setup.recipe.log, setup.recipe
    if settings.tensorboard:
        board = (folder.tensorboard, first_step, to_tree(recipe))
        sinks.append(started(lambda: TensorBoard(*board, examples(setup)), "TensorBoard", disk))
    begun = folder.read_starts()[0].get("started", "")
    there = (folder.path, identity(folder.path, begun), settings.project, to_tree(recipe))
    if settings.wandb:
        sinks.append(InBackground(lambda: WeightsAndBiases(*there), "Weights & Biases"))
    if settings.mlflow:
        sinks.append(InBackground(lambda: MLflow(*there), "MLflow"))
    return sinks
