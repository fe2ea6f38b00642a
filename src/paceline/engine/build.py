"""Builds everything the training loop needs from a recipe and this rank's place in the job."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.tensors import materialize, read_like
from paceline.config.batch import BatchLayout, check_strategy
from paceline.config.data import dataset_name
from paceline.config.io import to_tree
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data.load.batch import shortest_decimals
from paceline.data.load.order import Plan
from paceline.data.load.source import DataSource, Evaluator, Loader, open_source
from paceline.data.splits import VAL
from paceline.distributed.ddp import Replica, average_buffers, broadcast_model
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.engine.build_model import build_model, build_sharded_model
from paceline.engine.class_weights import class_weights
from paceline.engine.compiled import Compilation, compile_model
from paceline.engine.evaluation.history import History, follow_plateau
from paceline.engine.input_dtype import input_dtype
from paceline.engine.kernels import choose_kernels
from paceline.engine.objective import Objective
from paceline.engine.rank_checks import check_same_model
from paceline.engine.temporary import TemporaryParameters
from paceline.engine.weights import load_weights
from paceline.errors import UserError
from paceline.models import factory
from paceline.models.activation_checkpointing import checkpoint_activations
from paceline.models.airbench import AirbenchNet
from paceline.optim import groups
from paceline.optim.ema import AveragedModel
from paceline.optim.schedules import LrPlan
from paceline.optim.state import load_state, state_dict
from paceline.optim.template import parameters_by_number
from paceline.system.logs import log
from paceline.system.norms import BATCH_NORMS
from paceline.track.environment import package_versions

if TYPE_CHECKING:
    from paceline.distributed.fsdp import Sharded


@dataclass
class Setup:
    """Everything one rank needs to train a recipe."""

    recipe: Recipe
    world: World
    timeline: Timeline
    layouts: dict[int, BatchLayout]
    source: DataSource
    loader: Loader
    replica: "Replica | Sharded"
    optimizer: Optimizer
    objective: Objective
    ema: AveragedModel | None
    scaler: torch.amp.GradScaler
    precision: str
    lr_plan: LrPlan
    temporary: TemporaryParameters
    architecture: dict[str, Any]
    """Name and options of the model."""
    compilation: Compilation = field(default_factory=Compilation)
    history: History = field(default_factory=History)
    _evaluators: dict[tuple[int, bool, str, str], Evaluator] = field(default_factory=dict)

    @property
    def total_steps(self) -> int:
        return self.timeline.total

    @property
    def layout(self) -> BatchLayout:
        """The batch layout of the last phase."""
        return self.layouts[self.timeline.phases[-1].global_batch]

    def evaluator(self, step: int, split: str = VAL) -> Evaluator:
        """Batches of a split for the phase that ends with, or contains, this step."""
        phase = self.timeline.phase_at(max(0, step - 1))
        key = (phase.evaluate_size, phase.rectangular, self.source.evaluation_variant(phase), split)
        if key not in self._evaluators:
            place = (self.world.rank, self.world.size, self.world.device)
            self._evaluators = {key: self.source.evaluator(phase, *place, self.loader.normalize.dtype, split)}
        return self._evaluators[key]

    @property
    def evaluated_model(self) -> nn.Module:
        return self.ema.model if self.ema else self.replica.module

    @property
    def autocast(self) -> Any:
        return partial(precision.autocast, self.precision, self.world.device)

    def average_buffers(self) -> None:
        """Average batch-norm statistics over ranks, including those of the EMA model."""
        for model in [self.replica.module] + ([self.ema.model] if self.ema else []):
            average_buffers(model, self.world)

    def state(self, step: int) -> dict[str, Any]:
        """Return the state needed to resume, with sharded tensors under FSDP. Sample order, augmentation and dropout
        depend only on seed and step, so they have no state."""
        return {
            "model": self.replica.module.state_dict(),
            "ema": self.ema.model.state_dict() if self.ema else {},
            "optimizer": state_dict(self.optimizer),
            "progress": {
                "scaler": self.scaler.state_dict(),
                "evaluations": self.history.state(),
                **self._inference_metadata(step),
            },
        }

    def _inference_metadata(self, step: int) -> dict[str, Any]:
        """Return what is needed to use the weights, and how they came about."""
        phase, source = self.timeline.phase_at(max(0, step - 1)), self.source
        name = dataset_name(self.recipe.data.name, source.place) or source.name
        splits = {"train": source.num_train, "val": source.num_val, "test": source.num_test}
        return {
            "step": step,
            "epoch": self.timeline.epoch_at(step),
            "recipe": to_tree(self.recipe),
            "data": {"name": name, "fingerprint": source.fingerprint, "splits": splits},
            "precision": self.precision,
            "versions": package_versions(),
            "classes": [[entry.id, entry.name] for entry in self.source.classes],
            "preprocessing": {
                "mean": shortest_decimals(self.loader.mean),
                "std": shortest_decimals(self.loader.std),
                **self.source.preprocessing(phase),
            },
            "model": {**self.architecture, "num_classes": len(source.classes), "in_chans": source.channels},
        }

    def load(self, parts: dict[str, Any], origin: str) -> int:
        """Load an open checkpoint and return the step to resume from. `origin` names it in messages."""
        step: int = parts["progress"]["step"]
        if (trained_on := parts["progress"]["data"]["fingerprint"]) != self.source.fingerprint:
            raise UserError(
                "checkpoint-data-mismatch",
                f"{origin} was trained on data with fingerprint {trained_on}, but the fingerprint of "
                f"{self.source.name} is {self.source.fingerprint}. Start a new run with --name.",
                path=origin,
            )
        load_weights(self.replica.module, parts["model"], origin)
        if self.ema:
            load_weights(self.ema.model, parts["ema"] or parts["model"], origin)
        load_state(self.optimizer, self.recipe.optim, self._optimizer_state(parts["optimizer"]), step, origin)
        if parts["progress"]["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(parts["progress"]["scaler"])
        self.history.load(parts["progress"]["evaluations"])
        self.lr_plan = follow_plateau(self.lr_plan, self.recipe, self.history)
        return step

    def _optimizer_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Read a saved optimizer state: tensors of sharded parameters in their shards, on the parameter's device."""
        parameters = parameters_by_number(self.optimizer)
        states = {
            number: materialize(values, partial(read_like, like=parameters.get(number)))
            for number, values in saved["state"].items()
        }
        return {"state": states, "param_groups": materialize(saved["param_groups"])}


def build(recipe: Recipe, world: World, resume: bool = False) -> Setup:
    """Return the data, model, optimizer and schedule of a recipe for this rank.

    `resume`: the weights will come from a checkpoint, so that initial weights are neither read nor downloaded.
    """
    choose_kernels(world.device, recipe.tf32)
    source = open_source(recipe)
    labels = source.train_labels
    plan = Plan.of(recipe, source.num_train, world.size, world.rank, labels)
    weights = class_weights(recipe, source.classes, labels)
    timeline = plan.timeline
    loader = source.loader(plan, world.device)
    sharded = _strategy(recipe, world) == "fsdp"
    built = replace(recipe, model=factory.untrained(recipe.model)) if resume else recipe
    create = partial(build_sharded_model if sharded else build_model, built, source, len(source.classes), timeline)
    model = world.raise_together(lambda: create(world))
    if isinstance(model, AirbenchNet) and recipe.model.weights == "random" and not model.whiten.weight.is_meta:
        model.prepare(loader.plain_images(5000))
    check_same_model(model, world)
    if not sharded:
        broadcast_model(model, world)  # before it is copied; not all weights come from torch's generator
    _check_batch_norm(model, plan, recipe.model.sync_batchnorm)
    resolved = precision.resolve(recipe.precision, world)
    size = next(iter(source.sizes(timeline)))
    loader.normalize.dtype = input_dtype(model, resolved, source.channels, size, world)
    lr_plan = LrPlan.of(recipe.optim, timeline)
    initial = model
    if sharded:
        from paceline.distributed.fsdp import without_memory  # imported late because it takes seconds

        model = without_memory(model)
    ema = None
    if recipe.ema.decay:
        ema = AveragedModel(model, recipe.ema, timeline.total, timeline.steps(recipe.ema.start))
    checkpoint_activations(model, recipe.model)  # after the copy, which evaluation runs as it is
    compilation = compile_model(model, timeline, world.device) if recipe.compile else Compilation()
    replica = _sharded(model, ema, initial, world, recipe, resolved) if sharded else Replica(model, world, recipe)
    return Setup(
        recipe=recipe,
        world=world,
        timeline=timeline,
        layouts=plan.layouts,
        source=source,
        loader=loader,
        replica=replica,
        optimizer=groups.create(model, recipe.optim, loss_scaling=resolved == "fp16"),
        objective=Objective(recipe.train, len(source.classes), recipe.seed, weights),
        ema=ema,
        scaler=precision.grad_scaler(resolved, world.device, recipe.train.init_loss_scale),
        precision=resolved,
        lr_plan=lr_plan,
        temporary=TemporaryParameters(model, recipe.optim, timeline),
        architecture=world.raise_together(lambda: factory.architecture_of(recipe.model, initial)),
        compilation=compilation,
    )


def _check_batch_norm(model: nn.Module, plan: Plan, synchronized: bool) -> None:
    has_batch_norm = any(isinstance(module, BATCH_NORMS) and module.training for module in model.modules())
    for layout in plan.layouts.values():
        if layout.per_rank_batch == 1 and has_batch_norm and not synchronized:
            raise UserError(
                "batch-too-small-for-batch-norm",
                f"{layout}: batch norm cannot train on one image at a time. Increase --train.global_batch, or use "
                "fewer ranks or accumulation steps.",
                per_rank_batch=1,
            )


def _sharded(
    model: nn.Module, ema: AveragedModel | None, initial: nn.Module, world: World, recipe: Recipe, resolved: str
) -> "Sharded":
    """Shard a model without memory and its EMA copy, and give them the initial weights of rank 0."""
    from paceline.distributed import fsdp, mesh  # imported late because it takes seconds

    ranks = mesh.create_mesh(world, recipe.fsdp.mesh)
    if ema:
        fsdp.shard(ema.model, world, recipe, "fp32", ranks)
    replica = fsdp.Sharded(model, world, recipe, resolved, ranks)
    for each in [model] + ([ema.model] if ema else []):
        fsdp.initialize(each, initial if world.is_rank_zero else None, world, recipe)
    return replica


def _strategy(recipe: Recipe, world: World) -> str:
    check_strategy(recipe, world.size)
    if recipe.strategy == "fsdp" and world.size == 1:
        log.warning("strategy=fsdp has nothing to shard on one rank; training with strategy=single")
        return "single"
    if recipe.strategy == "fsdp" and recipe.fsdp.cpu_offload and world.device.type == "cpu" and world.is_rank_zero:
        log.warning("fsdp.cpu_offload has no effect on CPU ranks, whose parameters are in host memory already")
    return recipe.strategy
