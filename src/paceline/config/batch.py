"""The batch contract: per-rank batch x ranks x accumulation = global batch, stated, printed and checked."""

from dataclasses import dataclass

from paceline.config.recipe import Recipe, near_multiples
from paceline.errors import UserError


@dataclass(frozen=True)
class BatchLayout:
    global_batch: int
    ranks: int
    accumulation: int

    @classmethod
    def of(cls, recipe: Recipe, ranks: int) -> "BatchLayout":
        batch, accumulation = recipe.train.global_batch, recipe.train.accumulation
        if batch % (ranks * accumulation):
            choices = " or ".join(map(str, near_multiples(batch, ranks * accumulation)))
            raise UserError(
                f"train.global_batch={batch} is not a multiple of {ranks} ranks x accumulation {accumulation}; "
                f"try --train.global_batch {choices}"
            )
        return cls(batch, ranks, accumulation)

    def check_samples(self, samples: int, where: object) -> None:
        if self.global_batch > samples:
            raise UserError(
                f"train.global_batch={self.global_batch} is more than the {samples} training images of {where}; "
                f"use at most {samples // self.ranks * self.ranks or 'as many ranks as images'}"
            )

    @property
    def per_rank_batch(self) -> int:
        """Images one rank holds at a time: one micro-batch."""
        return self.global_batch // (self.ranks * self.accumulation)

    def __str__(self) -> str:
        return (
            f"per-rank batch {self.per_rank_batch} x {self.ranks} rank{'s' if self.ranks > 1 else ''} "
            f"x accumulation {self.accumulation} = global batch {self.global_batch}"
        )
