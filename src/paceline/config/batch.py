"""Batch sizes: per-rank batch x ranks x accumulation = global batch."""

from dataclasses import dataclass
from typing import Any

from paceline.config.recipe import Recipe, near_multiples
from paceline.config.timeline import Timeline
from paceline.errors import UserError
from paceline.system.gpus import default_procs


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch is divided over ranks and accumulation steps."""

    global_batch: int
    ranks: int
    accumulation: int

    @property
    def per_rank_batch(self) -> int:
        """Images in one micro-batch of one rank."""
        return self.global_batch // (self.ranks * self.accumulation)

    def __str__(self) -> str:
        return (
            f"per-rank batch {self.per_rank_batch} x {self.ranks} rank{'s' if self.ranks > 1 else ''} "
            f"x accumulation {self.accumulation} = global batch {self.global_batch}"
        )


def procs_per_node(recipe: Recipe, procs: int | str = "auto") -> int:
    """The processes on this node; auto: one per visible GPU, and one on other devices or with strategy=single."""
    if isinstance(procs, int):
        return procs
    return 1 if recipe.strategy == "single" else default_procs(recipe.device)


def check_strategy(recipe: Recipe, ranks: int) -> None:
    """UserError if the strategy of a recipe does not support this many ranks."""
    if recipe.strategy == "single" and ranks > 1:
        raise UserError(
            "strategy-needs-one-rank",
            f"strategy=single does not support {ranks} ranks. Use --strategy ddp or fsdp, or one process on one node.",
            ranks=ranks,
        )


def layouts(recipe: Recipe, ranks: int) -> dict[int, BatchLayout]:
    """The layout of every global batch of a recipe; UserError if ranks x accumulation does not divide one of them."""
    accumulation = recipe.train.grad_accumulation
    found: dict[int, BatchLayout] = {}
    for number, phase in enumerate(recipe.all_phases()):
        batch = phase.global_batch or recipe.train.global_batch
        field = f"phases.{number}.global_batch" if phase.global_batch else "train.global_batch"
        if batch % (ranks * accumulation):
            choices = near_multiples(batch, ranks * accumulation)
            raise UserError(
                "batch-not-divisible",
                f"{field}={batch} is not a multiple of {ranks} ranks x accumulation {accumulation}. "
                f"Try --{field} {' or '.join(map(str, choices))}{_fewer_ranks(batch, ranks, accumulation)}.",
                field=field,
                batch=batch,
                ranks=ranks,
                choices=choices,
            )
        found[batch] = layout = BatchLayout(batch, ranks, accumulation)
        mixes, repeats = recipe.train.mixup or recipe.train.cutmix, recipe.data.aug_repeats
        if mixes and repeats > 1 and batch < 2 * repeats:
            raise UserError(
                "mixup-needs-two-images",
                f"{field}={batch}: train.mixup and train.cutmix mix different images, but with "
                f"data.aug_repeats={repeats} a step may have only one. Set {field} to at least {2 * repeats}.",
                field=field,
                least=2 * repeats,
            )
        if layout.per_rank_batch % 2 and mixes:
            multiple = 2 * ranks * accumulation
            raise UserError(
                "mixup-odd-batch",
                f"{layout}: train.mixup and train.cutmix mix pairs of images, but the per-rank batch "
                f"{layout.per_rank_batch} is odd. Set {field} to a multiple of {multiple}.",
                field=field,
                multiple=multiple,
            )
    return found


def _fewer_ranks(batch: int, ranks: int, accumulation: int) -> str:
    """A number of ranks that fits as well, if there is one."""
    fitting = next((fewer for fewer in range(ranks - 1, 0, -1) if batch % (fewer * accumulation) == 0), 0)
    return f", or use {fitting} rank{'s' * (fitting > 1)} (--procs x --nodes)" if fitting else ""


def memory_key(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """The settings that decide how large a batch fits. A batch search applies to every run with the same key."""
    return {
        "model": recipe.model.name,
        "options": recipe.model.options,
        "frozen": list(recipe.model.freeze),
        "data": recipe.data.name,
        "size": max(phase.size or recipe.data.size for phase in recipe.all_phases()),
        "classes from": recipe.data.path,
        "precision": recipe.precision,
        "strategy": strategy(recipe, ranks),
        "sharding": [recipe.fsdp.reshard_after_forward, recipe.fsdp.cpu_offload],
        "optimizer": [recipe.optim.name, recipe.optim.options],
        "averaged": bool(recipe.ema.decay),
        "powersgd": bool(recipe.grad_sync.powersgd_rank) and ranks > 1,
        "sync_batchnorm": recipe.model.sync_batchnorm,
        "channels_last": recipe.channels_last,
        "compile": recipe.compile,
        "activation_checkpointing": recipe.model.activation_checkpointing,
        "ranks": ranks,
    }


def strategy(recipe: Recipe, ranks: int) -> str:
    """The strategy in use on this many ranks: single, ddp or fsdp."""
    if ranks == 1:
        return "single"
    return "ddp" if recipe.strategy == "auto" else recipe.strategy


def check_samples(timeline: Timeline, samples: int, where: object) -> None:
    """UserError if a global batch is larger than the training set."""
    largest = max(phase.global_batch for phase in timeline.phases)
    if largest > samples:
        raise UserError(
            "batch-too-large",
            f"a global batch of {largest} is larger than the training set of {where} ({samples} images). "
            "Lower --train.global_batch, or global_batch of the phases.",
            batch=largest,
            samples=samples,
        )
