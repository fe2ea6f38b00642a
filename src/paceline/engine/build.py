"""From a recipe and a place in the world to everything the loop needs."""

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.config.batch import BatchLayout
from paceline.config.io import to_tree
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data.load.order import Plan
from paceline.data.load.source import Evaluator, Loader, Source, open_source
from paceline.distributed.ddp import Replica, average_buffers
from paceline.distributed.sync_batchnorm import synchronize
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.engine.objective import Objective
from paceline.errors import UserError
from paceline.models import factory
from paceline.models.airbench import AirbenchNet
from paceline.optim import groups
from paceline.optim.ema import AveragedModel
from paceline.optim.schedules import LrPlan
from paceline.system.logs import log

if TYPE_CHECKING:
    from paceline.distributed.fsdp import Sharded


@dataclass
class Setup:
    """One experiment on one rank."""

    recipe: Recipe
    world: World
    timeline: Timeline
    layouts: dict[int, BatchLayout]
    source: Source
    loader: Loader
    replica: "Replica | Sharded"
    optimizer: Optimizer
    objective: Objective
    ema: AveragedModel | None
    scaler: torch.amp.GradScaler
    precision: str
    lr_plan: LrPlan
    _evaluators: dict[tuple[int, bool, str], Evaluator] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        return self.timeline.total

    @property
    def layout(self) -> BatchLayout:
        """Of the last phase."""
        return self.layouts[self.timeline.phases[-1].global_batch]

    def evaluator(self, step: int) -> Evaluator:
        """Validation batches as the phase that ends with, or holds, this step wants them."""
        phase = self.timeline.phase_at(max(0, step - 1))
        key = (phase.evaluate_size, phase.rectangular, phase.variant)
        if key not in self._evaluators:
            self._evaluators = {key: self.source.evaluator(phase, self.world.rank, self.world.size, self.world.device)}
        return self._evaluators[key]

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
        """Everything that resuming needs, whole; order, augmentation and dropout follow from seed and step alone."""
        whole = self.replica.gathered
        return {
            "model": whole(self.replica.module.state_dict()),
            "ema": whole(self.ema.model.state_dict()) if self.ema else {},
            "optimizer": whole(self.optimizer.state_dict()),
            "progress": {
                "step": step,
                "scaler": self.scaler.state_dict(),
                "recipe": to_tree(self.recipe),
                "data": self.source.fingerprint,
                **self.described(step),
            },
        }

    def described(self, step: int) -> dict[str, Any]:
        """What using the weights needs: classes, preprocessing, model arguments."""
        model, phase = self.recipe.model, self.timeline.phase_at(max(0, step - 1))
        return {
            "classes": [[own.id, own.name] for own in self.source.classes],
            "preprocessing": {
                "mean": self.loader.mean.tolist(),
                "std": self.loader.std.tolist(),
                **self.source.preprocessing(phase),
            },
            "model": {
                "name": model.name,
                "num_classes": len(self.source.classes),
                "in_chans": self.source.channels,
                "options": model.options,
            },
        }

    def load(self, parts: dict[str, Any], origin: str) -> int:
        """Take over a saved state; the step to go on from."""
        step: int = parts["progress"]["step"]
        if parts["progress"]["data"] != self.source.fingerprint:
            raise UserError(
                f"{origin} was trained on other data (fingerprint {parts['progress']['data']}, here "
                f"{self.source.fingerprint}); start a new run with --name"
            )
        load_weights(self.replica.module, parts["model"], origin)
        if self.ema:
            load_weights(self.ema.model, parts["ema"] or parts["model"], origin)
        groups.load_state(self.optimizer, parts["optimizer"], step, origin)
        if parts["progress"]["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(parts["progress"]["scaler"])
        return step


def build(recipe: Recipe, world: World) -> Setup:
    source = open_source(recipe)
    plan = Plan.of(recipe, source.num_train, world.size, world.rank)
    timeline = plan.timeline
    loader = source.loader(plan, world.device)
    model = build_model(recipe, source, len(source.classes), timeline, world)
    if isinstance(model, AirbenchNet) and recipe.model.weights == "random":
        model.prepare(loader.plain_images(5000))
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in model.modules())
    for layout in plan.layouts.values():
        if layout.per_rank_batch == 1 and has_batch_norm and not recipe.model.sync_batchnorm:
            raise UserError(
                f"{layout}: batch norm cannot learn from one image at a time; raise --train.global_batch, or use fewer "
                "ranks or less accumulation"
            )
    resolved = precision.resolve(recipe.precision, world.device)
    lr_plan = LrPlan.of(recipe.optim, timeline)
    ema = AveragedModel(model, recipe.ema) if recipe.ema.decay else None
    sharded = _strategy(recipe, world) == "fsdp"
    replica = _sharded(model, ema, world, recipe, resolved) if sharded else Replica(model, world, recipe)
    return Setup(
        recipe=recipe,
        world=world,
        timeline=timeline,
        layouts=plan.layouts,
        source=source,
        loader=loader,
        replica=replica,
        optimizer=groups.create(model, recipe.optim, fused=resolved != "fp16" and not sharded),
        objective=Objective(recipe.train, len(source.classes), recipe.seed),
        ema=ema,
        scaler=precision.grad_scaler(resolved, world.device, recipe.train.init_loss_scale),
        precision=resolved,
        lr_plan=lr_plan,
    )


def _sharded(model: nn.Module, ema: AveragedModel | None, world: World, recipe: Recipe, resolved: str) -> "Sharded":
    from paceline.distributed import fsdp  # not at the start: FSDP takes seconds to load

    if ema:
        fsdp.shard(ema.model, world, recipe, "fp32")
    return fsdp.Sharded(model, world, recipe, resolved)


def _strategy(recipe: Recipe, world: World) -> str:
    if recipe.strategy == "single" and world.size > 1:
        raise UserError(f"strategy=single, but there are {world.size} ranks; use ddp or fsdp, or one process")
    if recipe.strategy == "fsdp" and world.size == 1:
        log.warning("strategy=fsdp has nothing to shard on one rank: training as a single one")
        return "single"
    if recipe.strategy == "fsdp" and recipe.fsdp.cpu_offload and world.device.type == "cpu" and world.is_rank_zero:
        log.warning("fsdp.cpu_offload has nothing to move: the device is the host's own memory")
    return recipe.strategy


def build_model(recipe: Recipe, source: Source, num_classes: int, timeline: Timeline, world: World) -> nn.Module:
    """The model on its device, with the same initial weights on every rank, tried on an image of every size."""
    channels = source.channels
    torch.manual_seed(recipe.seed)
    model = factory.create(recipe.model, num_classes, channels)
    for side in source.sizes(timeline):
        try:
            with torch.no_grad():
                model.eval()(torch.zeros(1, channels, *side))
        except (RuntimeError, AssertionError, ValueError) as error:
            raise UserError(
                f"model.name={recipe.model.name} does not take images of {side[0]}x{side[1]} with {channels} channels "
                f"({' '.join(str(error).split())[:160]}); set data.size, or choose another model"
            ) from None
    if recipe.model.sync_batchnorm and world.size > 1:
        model = synchronize(model, world)
    # FSDP flattens weights, and so wants them in their plain order; images are channels_last all the same
    plain = recipe.strategy == "fsdp" or not recipe.channels_last
    layout = torch.contiguous_format if plain else torch.channels_last
    return model.train().to(world.device, memory_format=layout)  # type: ignore[call-overload]


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], origin: str) -> None:
    """Take over the weights of a checkpoint, which may be a stranger's, after all of them have been checked."""
    own = model.state_dict()
    wrong = sorted(own.keys() ^ weights.keys())
    wrong += [name for name in weights if name in own and _kind(own[name]) != _kind(weights[name])]
    if wrong:
        raise UserError(
            f"{origin} is a checkpoint of another model: {len(wrong)} tensors differ ({', '.join(wrong[:3])} ...); "
            "use the recipe it was trained with"
        )
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in weights.items():
        if problem := _odd_values(tensor, None if name in parameters else own[name]):
            raise UserError(f"{origin}: {name} {problem}; use an earlier checkpoint")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        from paceline.distributed.fsdp import load_whole

        load_whole(model, weights)
    else:
        model.load_state_dict(weights)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _odd_values(tensor: torch.Tensor, buffer: torch.Tensor | None) -> str:
    """Why a model cannot compute with these values; `buffer`: what a new model has there, None for a parameter."""
    if tensor.is_floating_point():
        masks = buffer is not None and not buffer.isfinite().all()  # minus infinity hides what is not to be seen
        return "" if masks or tensor.isfinite().all() else "holds numbers that are not finite"
    if buffer is None or not tensor.ndim:
        return "" if tensor.min() >= 0 else "counts below zero"
    # tables of places, which training leaves alone: another one would be read beyond its end
    return "" if torch.equal(tensor, buffer.to(tensor.device)) else "is not what this model has"
