"""The training loop. Start here.

    paceline train digits                                         one process
    paceline train digits --procs 2                               two processes on this machine (DDP)
    torchrun --nproc-per-node 2 -m paceline train digits          the same with torchrun
    srun -N 2 --ntasks-per-node 1 paceline train RECIPE           one process per task (SLURM)
    paceline train RECIPE --nodes 2 --node-rank 0 --rendezvous HOST:29400      on the first of two nodes
    paceline train RECIPE --nodes 2 --node-rank 1 --rendezvous HOST:29400      on the second
    paceline train --resume runs/digits                           resume after a stop or a crash

Modules in the order of the data flow: config/recipe.py (settings), distributed/world.py (rank and world size),
data/load/order.py (sample order), data/load/source.py (batches, from memory or decoded from shards),
models/factory.py, engine/objective.py (the loss), distributed/ddp.py and distributed/grad_sync.py (DDP) or
distributed/fsdp.py (FSDP2), optim/, engine/evaluation/evaluate.py, checkpoint/store.py, track/ (records of the run).
engine/build.py assembles them; engine/run.py writes the run folder.
"""

import time
from contextlib import closing
from functools import partial
from typing import Any

import torch

from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data.load.batch import Batch
from paceline.data.load.order import step_seed
from paceline.engine.build import Setup
from paceline.engine.evaluation.measure import measure, test_best
from paceline.engine.interval import IntervalTrigger
from paceline.engine.model import check_logits, naming_model
from paceline.engine.run import TrainingRun
from paceline.engine.stop import Agreement, Signals
from paceline.engine.window import StepResult
from paceline.errors import Stopped
from paceline.optim.groups import set_lr, set_momentum
from paceline.optim.schedules import lr_at, momentum_at
from paceline.system.device import between, now


def train(setup: Setup, run: TrainingRun) -> dict[str, Any]:
    """Train from the first step of the run to the end of the recipe and return the summary."""
    recipe, total = setup.recipe, setup.total_steps
    log_every, evaluate_every, checkpoint_every = intervals(recipe, setup.timeline)
    # the stop of a callback ends the run at the same step on any number of ranks; only rank 0 needs callbacks
    wait = setup.world.broadcast_object(bool(recipe.callbacks))
    # a new size or batch is compiled first, which may take longer than the rank timeout
    started = max([run.first_step, *(phase.begin for phase in setup.timeline.phases if recipe.compile)])
    agreement, done = Agreement(setup.world, 5, wait), run.first_step
    batches = setup.loader.steps(run.first_step)
    with Signals(setup.world) as signals, closing(agreement):
        if _is_unevaluated(setup, run.first_step, evaluate_every):
            pause(setup, run, done, evaluating=True, checkpointing=True, stop=0, signals=signals)
        for step in range(run.first_step, total):
            if run.assessment.stop_reason:
                break
            with run.window.waiting_for_data():
                micro_batches = next(batches)
            lr = lr_at(step, setup.lr_plan)
            setup.temporary.before_step(step, setup.replica.freeze)
            torch.manual_seed(step_seed(recipe.seed, step, setup.world.rank))
            result = train_step(setup, micro_batches, step, lr)
            phase = setup.timeline.phase_at(step)
            run.window.add(result, phase.global_batch)
            setup.compilation.after_step(phase)
            done = step + 1
            if step == started:
                setup.world.shorten_timeout()
            if setup.ema:
                setup.ema.update(setup.replica.module, done)
            run.profiler.step(done)
            run.display.step(done)
            run.callbacks.step(done, setup.timeline.epoch_at(done), lr, result.loss, run.checkpoints.writing)

            now = time.monotonic()
            votes = [signals.received, log_every.vote(now), evaluate_every.vote(now), checkpoint_every.vote(now)]
            stop, log_due, evaluate_due, checkpoint_due, asked = agreement.agree([*votes, run.callbacks.vote])
            last = done == total or bool(asked and not stop)
            evaluating = evaluate_every.due(done, evaluate_due, now)
            checkpointing = checkpoint_every.due(done, checkpoint_due, now)
            if log_every.due(done, log_due, now) or evaluating or checkpointing or stop or last:
                run.log(done, lr)
            if last:
                break
            if evaluating or checkpointing or stop:
                pause(setup, run, done, evaluating, checkpointing, stop, signals)
        # the last step is always evaluated and checkpointed; a run that is stopped here resumes here
        if not run.is_saved(done):
            pause(setup, run, done, evaluating=not run.is_evaluated(done), checkpointing=True, stop=0, signals=signals)
        if setup.source.num_test:
            try:
                test_best(setup, run, done, stop=lambda: signals.received)
            except Stopped:
                run.stopped(done)
                raise
        return run.finish(done)


def pause(
    setup: Setup, run: TrainingRun, done: int, evaluating: bool, checkpointing: bool, stop: int, signals: Signals
) -> None:
    """Evaluate, checkpoint or stop between two steps. Stopping also writes a checkpoint."""
    if done > run.first_step:  # a checkpoint has averages already
        setup.average_buffers()
    if evaluating and not stop:
        try:
            checkpointing |= run.evaluate(done, partial(measure, setup, done, stop=lambda: signals.received))
        except Stopped as early:
            stop = early.signum
    if checkpointing or stop or run.assessment.below_curve:
        run.save(done, setup)
    if run.assessment.below_curve:
        run.give_up(done)
    if stop:
        run.stopped(done)
        raise Stopped(stop)


def _is_unevaluated(setup: Setup, first_step: int, every: IntervalTrigger) -> bool:
    """Whether a signal stopped the run in place of an evaluation that is due after the step it resumes from."""
    resumed = 0 < first_step < setup.total_steps and setup.history.last_step < first_step
    return resumed and every.due(first_step, agreed=0, now=time.monotonic())


def train_step(setup: Setup, micro_batches: list[Batch], step: int, lr: float) -> StepResult:
    """Run forward, backward and one optimizer step on all micro-batches of a global batch."""
    recipe, replica, scaler = setup.recipe, setup.replica, setup.scaler
    loss_sum, correct = torch.zeros((), device=setup.world.device), torch.zeros((), device=setup.world.device)
    for number, batch in enumerate(micro_batches, start=1):
        with replica.sync_gradients(last=number == len(micro_batches)):
            images, targets = setup.objective.prepare(batch, step)
            with setup.autocast(), naming_model(recipe.model.name):
                logits = replica.forward(images)
            check_logits(logits, recipe.model.name, (len(images), len(setup.source.classes)))
            loss = setup.objective.loss(logits.float(), targets)
            scaler.scale(loss / len(micro_batches)).backward()
        loss_sum += loss.detach() / len(micro_batches)
        correct += (logits.detach().argmax(1) == batch.labels).sum()
    sync_seconds, begin = replica.sync_seconds(), now(setup.world.device)
    setup.temporary.drop_gradients()
    set_lr(setup.optimizer, lr)
    set_momentum(setup.optimizer, momentum_at(step, setup.lr_plan))
    if recipe.optim.clip_grad_norm:
        scaler.unscale_(setup.optimizer)
        torch.nn.utils.clip_grad_norm_(replica.module.parameters(), recipe.optim.clip_grad_norm)
    scaler.step(setup.optimizer)
    with replica.follow_scale(scaler):
        scaler.update()
    setup.optimizer.zero_grad()
    return StepResult(loss_sum, correct, sync_seconds, between(begin, now(setup.world.device)))


def intervals(recipe: Recipe, timeline: Timeline) -> tuple[IntervalTrigger, IntervalTrigger, IntervalTrigger]:
    """Return when to log, to evaluate and to checkpoint."""
    texts = (recipe.log.every, recipe.evaluate.every, recipe.checkpoint.every)
    log_every, evaluate_every, checkpoint_every = (IntervalTrigger(text, timeline) for text in texts)
    return log_every, evaluate_every, checkpoint_every
