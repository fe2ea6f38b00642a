"""The training of a learning-rate range test: that of the recipe, with a learning rate that grows at every step."""

import json
import math
from dataclasses import replace

import torch

from paceline.config.optim import Ema, MomentumSchedule, Schedule
from paceline.config.phases import Ramp
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data import kinds
from paceline.data.load.order import step_seed
from paceline.data.load.source import fetch
from paceline.distributed.world import World
from paceline.engine.build import Setup, build
from paceline.engine.memory import memory_of_training
from paceline.engine.parts import check_parts
from paceline.engine.rank_checks import check_same_data, check_same_imports, check_same_recipe
from paceline.engine.train import train_step
from paceline.models import preprocessing
from paceline.optim.lr_range import LrRange, StopRule
from paceline.optim.schedules import LrPlan, lr_at, momentum_at
from paceline.system import logs


def try_lr(recipe: Recipe, lrs: LrRange) -> None:
    """Train until the last learning rate or until the loss diverges. Rank 0 prints every loss, and then the facts."""
    world = World.from_env(recipe.device)
    logs.set_up(1, 2)  # warnings only
    check_parts(recipe)
    recipe = preprocessing.resolve(kinds.resolve(recipe))[0]
    fetch(recipe)
    with world.connected():
        check_same_recipe(recipe, world)
        check_same_imports(recipe, world)
        with memory_of_training(recipe, world):
            setup = build(as_lr_test(recipe, lrs.steps), world)
            check_same_data(setup.source, world)
            plan = LrPlan.of(recipe.optim, Timeline.of(recipe, setup.source.num_train))
            setup.lr_plan = _with_momentum(setup.lr_plan, plan)
            _train(setup, lrs)
        if world.is_rank_zero:
            peak_factor = plan.highest / recipe.optim.lr or 1.0
            facts = {"ranks": world.size, "precision": setup.precision, "peak_factor": peak_factor}
            print(json.dumps(facts), flush=True)


def as_lr_test(recipe: Recipe, steps: int) -> Recipe:
    """Return the recipe for some steps with the settings of its first phase."""
    return replace(
        recipe,
        train=replace(recipe.train, duration=f"{steps}ba"),
        phases=(replace(recipe.all_phases()[0], epochs=(0.0, math.inf), lr=()),),
        ramp=Ramp(),
        optim=replace(recipe.optim, schedule=Schedule(name="constant")),
        ema=recipe.ema if recipe.ema.lookahead else Ema(),  # another average does not change the training
    )


def _with_momentum(tested: LrPlan, plan: LrPlan) -> LrPlan:
    """Return the schedule of the test with the momentum that the recipe has at its highest learning rate."""
    peak = max(range(0, plan.total, math.ceil(plan.total / 1000)), key=lambda step: lr_at(step, plan))
    momentum = momentum_at(peak, plan)
    if momentum is None:
        return tested
    return replace(tested, momentum=MomentumSchedule("piecewise"), momentum_points=((0, momentum),))


def _train(setup: Setup, lrs: LrRange) -> None:
    world, rule, batches = setup.world, StopRule(lrs.steps), setup.loader.steps()
    for step in range(lrs.steps):
        setup.temporary.before_step(step, setup.replica.freeze)
        torch.manual_seed(step_seed(setup.recipe.seed, step, world.rank))
        result = train_step(setup, next(batches), step, lrs.lr_at(step))
        if setup.ema:
            setup.ema.update(setup.replica.module, step + 1)
        loss = (world.sum_(result.loss.cpu().double()) / world.size).item()  # waits for the device and for all ranks
        if step == 0:
            world.shorten_timeout()
        if world.is_rank_zero:
            print(json.dumps({"step": step, "loss": loss if math.isfinite(loss) else None}), flush=True)
        if rule.diverged(loss):  # the same on all ranks, because the mean loss is
            return
