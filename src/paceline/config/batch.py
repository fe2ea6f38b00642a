"""The batch contract: per-rank batch x ranks x accumulation = global batch, stated, printed and checked."""

from dataclasses import dataclass
from typing import Any

from paceline.config.recipe import Recipe, near_multiples
from paceline.config.timeline import Timeline
from paceline.errors import UserError


@dataclass(frozen=True)
class BatchLayout:
    global_batch: int
    ranks: int
    accumulation: int

    @property
    def per_rank_batch(self) -> int:
        """Images one rank holds at a time: one micro-batch."""
        return self.global_batch // (self.ranks * self.accumulation)

    def __str__(self) -> str:
        return (
            f"per-rank batch {self.per_rank_batch} x {self.ranks} rank{'s' if self.ranks > 1 else ''} "
            f"x accumulation {self.accumulation} = global batch {self.global_batch}"
        )


def layouts(recipe: Recipe, ranks: int) -> dict[int, BatchLayout]:
    """The layout of every global batch of a recipe; one that ranks and accumulation do not divide is an error."""
    accumulation = recipe.train.grad_accumulation
    found: dict[int, BatchLayout] = {}
    for number, phase in enumerate(recipe.all_phases()):
        batch = phase.global_batch or recipe.train.global_batch
        field = f"phases.{number}.global_batch" if phase.global_batch else "train.global_batch"
        if batch % (ranks * accumulation):
            choices = " or ".join(map(str, near_multiples(batch, ranks * accumulation)))
            raise UserError(
                f"{field}={batch} is not a multiple of {ranks} ranks x accumulation {accumulation}; "
                f"try --{field} {choices}"
            )
        found[batch] = layout = BatchLayout(batch, ranks, accumulation)
        if layout.per_rank_batch % 2 and (recipe.train.mixup or recipe.train.cutmix):
            raise UserError(
                f"{layout}: train.mixup and cutmix mix pairs of images, and {layout.per_rank_batch} is odd; choose a "
                f"multiple of {2 * ranks * accumulation} for {field}"
            )
    return found


def memory_key(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """What decides how large a batch fits: a search with the same key answers for a run."""
    return {
        "model": recipe.model.name,
        "options": recipe.model.options,
        "data": recipe.data.name,
        "size": max(phase.size or recipe.data.size for phase in recipe.all_phases()),
        "classes from": recipe.data.path,
        "precision": recipe.precision,
        "strategy": strategy(recipe, ranks),
        "sharding": [recipe.fsdp.reshard_after_forward, recipe.fsdp.cpu_offload],
        "optimizer": recipe.optim.name,
        "averaged": bool(recipe.ema.decay),
        "powersgd": bool(recipe.grad_sync.powersgd_rank) and ranks > 1,
        "sync_batchnorm": recipe.model.sync_batchnorm,
        "channels_last": recipe.channels_last,
        "compile": recipe.compile,
        "ranks": ranks,
    }


def strategy(recipe: Recipe, ranks: int) -> str:
    if ranks == 1:
        return "single"
    return "ddp" if recipe.strategy == "auto" else recipe.strategy


def check_samples(timeline: Timeline, samples: int, where: object) -> None:
    largest = max(phase.global_batch for phase in timeline.phases)
    if largest > samples:
        raise UserError(
            f"a global batch of {largest} is more than the {samples} training images of {where}; lower "
            "--train.global_batch, or that of the phases"
        )
