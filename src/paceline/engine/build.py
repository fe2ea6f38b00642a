"""From a recipe and a place in the world to everything the loop needs."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.base.logs import log
from paceline.base.world import World
from paceline.config.batch import BatchLayout
from paceline.config.duration import to_steps
from paceline.config.io import to_tree
from paceline.config.recipe import Recipe
from paceline.data.load.source import Evaluator, Loader, Source, open_source
from paceline.engine import precision
from paceline.engine.parallel import Replica, average_buffers
from paceline.errors import UserError
from paceline.model import zoo
from paceline.model.airbench import AirbenchNet
from paceline.optim import groups
from paceline.optim.ema import AveragedModel
from paceline.optim.schedules import LrPlan


@dataclass
class Setup:
    """One experiment on one rank."""

    recipe: Recipe
    world: World
    layout: BatchLayout
    source: Source
    loader: Loader
    evaluator: Evaluator
    replica: Replica
    optimizer: Optimizer
    ema: AveragedModel | None
    scaler: torch.amp.GradScaler
    precision: str
    lr_plan: LrPlan

    @property
    def total_steps(self) -> int:
        return self.lr_plan.total

    @property
    def evaluated_model(self) -> nn.Module:
        return self.ema.model if self.ema else self.replica.module

    @property
    def autocast(self) -> Any:
        return partial(precision.autocast, self.precision, self.world.device)

    def average_buffers(self) -> None:
        """Make ranks agree on batch-norm statistics, those of the averaged weights included."""
        for model in [self.replica.module] + ([self.ema.model] if self.ema else []):
            average_buffers(model, self.world)

    def state(self, step: int) -> dict[str, Any]:
        """Everything that resuming needs; order, augmentation and dropout follow from seed and step alone."""
        return {
            "model": self.replica.module.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else {},
            "optimizer": self.optimizer.state_dict(),
            "progress": {
                "step": step,
                "scaler": self.scaler.state_dict(),
                "recipe": to_tree(self.recipe),
                "normalisation": {"mean": self.loader.mean.tolist(), "std": self.loader.std.tolist()},
                "data": self.source.fingerprint,
            },
        }

    def load(self, parts: dict[str, Any], origin: str) -> int:
        """Take over a saved state; the step to go on from."""
        load_weights(self.replica.module, parts["model"], origin)
        if self.ema:
            load_weights(self.ema.model, parts["ema"] or parts["model"], origin)
        groups.load_state(self.optimizer, parts["optimizer"])
        if parts["progress"]["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(parts["progress"]["scaler"])
        if parts["progress"]["data"] != self.source.fingerprint:
            raise UserError(
                f"{origin} was trained on other data (fingerprint {parts['progress']['data']}, here "
                f"{self.source.fingerprint}); start a new run with --name"
            )
        step: int = parts["progress"]["step"]
        return step


def build(recipe: Recipe, world: World) -> Setup:
    layout = BatchLayout.of(recipe, world.size)
    source = open_source(recipe)
    loader = source.loader(layout, world.rank, world.device)
    evaluator = source.evaluator(world.rank, world.size, world.device)
    model = build_model(recipe, source, world)
    if isinstance(model, AirbenchNet) and recipe.model.weights == "random":
        model.prepare(loader.plain_images(5000))
    replica = Replica(model, world, recipe)
    if layout.per_rank_batch == 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError(
            f"{layout}: batch norm cannot learn from one image at a time; raise --train.global_batch, or use fewer "
            "ranks or less accumulation"
        )
    resolved = precision.resolve(recipe.precision, world.device)
    total = to_steps(recipe.train.duration, loader.steps_per_epoch)
    if total == 0:
        raise UserError(
            f"train.duration={recipe.train.duration} is less than one step; an epoch has {loader.steps_per_epoch}"
        )
    lr_plan = LrPlan.of(recipe.optim, total, loader.steps_per_epoch)
    if lr_plan.warmup >= total and world.is_leader:
        log.warning(
            "optim.schedule.warmup=%s is not shorter than train.duration=%s: the learning rate only rises",
            *(recipe.optim.schedule.warmup, recipe.train.duration),
        )
    return Setup(
        recipe=recipe,
        world=world,
        layout=layout,
        source=source,
        loader=loader,
        evaluator=evaluator,
        replica=replica,
        optimizer=groups.create(model, recipe.optim, scaled=resolved == "fp16"),
        ema=AveragedModel(model, recipe.ema) if recipe.ema.decay else None,
        scaler=precision.grad_scaler(resolved, world.device),
        precision=resolved,
        lr_plan=lr_plan,
    )


def build_model(recipe: Recipe, source: Source, world: World) -> nn.Module:
    """The model on its device, with the same initial weights on every rank, tried on an image of every size."""
    channels = source.channels
    torch.manual_seed(recipe.seed)
    model = zoo.create(recipe.model, len(source.classes), channels)
    for side in source.sizes():
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(1, channels, *side))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UserError(
                f"model.name={recipe.model.name} does not take images of {side[0]}x{side[1]} with {channels} channels "
                f"({' '.join(str(error).split())[:160]}); set data.size, or choose another model"
            ) from None
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return model.train().to(world.device, memory_format=layout)  # type: ignore[call-overload]


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], origin: str) -> None:
    own = model.state_dict()
    wrong = [name for name in own.keys() | weights.keys() if name not in own or name not in weights]
    wrong += [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if wrong:
        raise UserError(
            f"{origin} is a save of another model: {len(wrong)} tensors differ ({', '.join(sorted(wrong)[:3])} ...); "
            "use the recipe it was trained with"
        )
    model.load_state_dict(weights)
