"""Measures the model of a training: on the validation split, and at the end the best checkpoint on the test split."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.checkpoint import store
from paceline.data.splits import TEST, VAL
from paceline.distributed.ddp import broadcast_model
from paceline.engine.build import Setup
from paceline.engine.evaluation.evaluate import check_corrupt_fraction, evaluate
from paceline.engine.kernels import any_shape
from paceline.engine.memory import memory_of_evaluation
from paceline.engine.trained_model import load_model

if TYPE_CHECKING:
    from paceline.engine.run import TrainingRun


def measure(
    setup: Setup, step: int, on_batch: Callable[[int], object], stop: Callable[[], int], split: str = VAL
) -> dict[str, float]:
    """Return the metrics on a split after a step."""
    model, tta = setup.evaluated_model, setup.recipe.evaluate.tta
    memory = memory_of_evaluation(setup.recipe, setup.world)
    with memory, setup.replica.unsharded(model), any_shape(setup.recipe.compile):
        classes = len(setup.source.classes)
        batches = setup.evaluator(step, split)
        metrics = evaluate(model, batches, classes, setup.world, setup.autocast, tta, on_batch, stop)
    check_corrupt_fraction(metrics, batches.num_samples, setup.recipe.data.max_corrupt)
    return metrics


def test_best(setup: Setup, run: "TrainingRun", step: int, stop: Callable[[], int]) -> None:
    """Measure the best checkpoint on the test split after the last step, and record the result. A collective."""
    run.wait_for_checkpoint(step)
    metric = setup.recipe.checkpoint.best
    best = setup.world.on_rank_zero(lambda: str(_best(run.folder.checkpoints, metric)))
    chosen = store.step_of(Path(best))
    if chosen != step:
        with setup.world.long_timeout():
            _load(setup, Path(best))
    begin = time.perf_counter()
    with run.display.evaluating(setup.evaluator(step, TEST)) as advance:
        metrics = measure(setup, step, advance, stop, TEST)
    run.tested(chosen, metrics | {"seconds": time.perf_counter() - begin})


def _best(checkpoints: Path, metric: str) -> Path:
    best = store.best(checkpoints, metric)
    return best.folder if best else next(store.committed(checkpoints))


def _load(setup: Setup, checkpoint: Path) -> None:
    """Replace the weights that are evaluated by those of a checkpoint, which only rank 0 needs to see."""
    world, model = setup.world, setup.evaluated_model
    source = world.raise_together(lambda: load_model(checkpoint) if world.is_rank_zero else None)
    if setup.replica.shard.count > 1:
        from paceline.distributed.fsdp import copy_weights  # imported late because it takes seconds

        copy_weights(model, source, world)
        return
    if source:
        model.load_state_dict(source.state_dict())
    broadcast_model(model, world)
