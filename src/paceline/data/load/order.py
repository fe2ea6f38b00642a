"""Sample order and random numbers: pure functions of seed, epoch and sample id.

They do not depend on ranks, workers or restarts. A run therefore sees the same global batches on any number of ranks,
and a run that resumes in the middle of an epoch neither repeats nor skips a sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise

import torch

from paceline.config.batch import BatchLayout, layouts
from paceline.config.recipe import Recipe
from paceline.config.timeline import ResolvedPhase, Timeline
from paceline.errors import UserError

_MASK = (1 << 64) - 1
_ORDER = 0xA11  # separates the random stream of the order from those of augmentation
_TURNS = 0xBA1


def _mix(*parts: int) -> int:
    """Hash integers to 64 bits, with the finalizer of splitmix64."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed for random numbers inside the model, such as dropout, in one step on one rank."""
    return _mix(seed, step, rank)


def known(labels: torch.Tensor | None, setting: str) -> torch.Tensor:
    """Return the labels of all training images. Raises if they are known only after the images have been read."""
    if labels is None:
        message = (
            f"{setting} needs the labels of all training images, but this dataset gives labels only with images. "
            "Prepare it with `paceline prepare`, or give the registered dataset an attribute `targets`."
        )
        raise UserError("labels-unknown", message, setting=setting)
    return labels


def epoch_order(seed: int, epoch: int, num_samples: int, repeats: int = 1) -> torch.Tensor:
    """Return the keys of an epoch in order. A key is a sample's id plus `num_samples` for every earlier copy.

    With `repeats`, all copies of a sample follow one another; `micro_batches` spreads them over the ranks.
    """
    generator = torch.Generator().manual_seed(_mix(seed, epoch, _ORDER))
    order = torch.randperm(num_samples, generator=generator)
    if repeats == 1:
        return order
    shown = order[: -(-num_samples // repeats)]
    return (shown[:, None] + num_samples * torch.arange(repeats)).flatten()[:num_samples]


def balanced_order(seed: int, epoch: int, labels: torch.Tensor) -> torch.Tensor:
    """Return the keys of an epoch in which every class that has images is drawn equally often, give or take one draw.

    Classes take turns over the whole run, and each class goes through its images in rounds, every round in a new random
    order. So after any number of epochs, the images of a class have been drawn equally often, give or take one draw.
    """
    num = len(labels)
    counts = torch.bincount(labels)
    counts = counts[counts > 0]
    classes, by_class = len(counts), labels.argsort(stable=True)

    def turns_before(draw: int) -> torch.Tensor:
        return (draw - torch.arange(classes) + classes - 1) // classes

    begin_turn, end_turn = turns_before(epoch * num), turns_before((epoch + 1) * num)
    first_round = begin_turn // counts
    rounds = torch.where(end_turn > begin_turn, (end_turn - 1) // counts - first_round + 1, 0)
    # all images of every round that this epoch has a part of, class by class
    sizes = rounds * counts
    starts = sizes.cumsum(0) - sizes
    owner = torch.repeat_interleave(torch.arange(classes), sizes)
    place = torch.arange(len(owner)) - starts[owner]
    repeat = place // counts[owner]
    ids = by_class[(counts.cumsum(0) - counts)[owner] + place % counts[owner]]
    # a round is shuffled by sorting its images by random bits, which are unique
    shuffled = _bits(ids + num * (first_round[owner] + repeat), begin(seed, 0, _TURNS)).argsort()
    shuffled = shuffled[(starts[owner] + repeat * counts[owner])[shuffled].argsort(stable=True)]
    keys = (ids + num * repeat)[shuffled]
    draws = torch.arange(epoch * num, (epoch + 1) * num)
    drawn = draws % classes
    keys = keys[starts[drawn] + draws // classes - (first_round * counts)[drawn]]
    return keys[torch.randperm(num, generator=torch.Generator().manual_seed(_mix(seed, epoch, _ORDER)))]


def micro_batches(order: torch.Tensor, step: int, layout: BatchLayout, rank: int, repeats: int = 1) -> torch.Tensor:
    """Return the keys of one rank in one step of the epoch, one row per micro-batch.

    The last incomplete global batch of an epoch is dropped; every epoch drops other samples.
    """
    first = step * layout.global_batch
    keys = order[first : first + layout.global_batch]
    if repeats > 1:
        keys = keys[_spread(layout.global_batch, repeats, first % repeats)]
    return keys.view(layout.ranks, layout.accumulation, layout.per_rank_batch)[rank]


@lru_cache(maxsize=64)
def _spread(global_batch: int, repeats: int, first: int) -> torch.Tensor:
    """Return the order of a global batch whose samples follow one another in `repeats` copies.

    `first` is the number of the copy that the batch begins with. The first copies of all samples come first, then all
    second copies, and so on: any part of the batch, and so every rank, has as many different samples as possible.
    Mixup and cutmix mix the neighbors 2i and 2i + 1: those of a sample differ from copy to copy.
    """
    copies = (torch.arange(global_batch) + first) % repeats
    places = copies.argsort(stable=True)
    ends = copies.bincount(minlength=repeats).cumsum(0).tolist()
    for copy, (begin, end) in enumerate(pairwise([0, *ends])):
        pairs = slice(begin + begin % 2, end - end % 2)
        if pairs.start < pairs.stop:
            places[pairs] = places[pairs][_paired(pairs.stop - pairs.start, copy, repeats)]
    return places


def _paired(count: int, number: int, numbers: int) -> torch.Tensor:
    """Return an order of an even count of samples. Each of `numbers` numbers gives other neighbors.

    Samples only move within groups of a little more than `numbers`, each of which plays one round of a tournament.
    """
    size = numbers + 2 - numbers % 2
    groups = max(0, count // size - 1)  # and a last one with the rest
    places = torch.arange(groups)[:, None] * size + _tournament(size, number)
    return torch.cat([places.flatten(), groups * size + _tournament(count - groups * size, number)])


def _tournament(players: int, number: int) -> torch.Tensor:
    """Return the pairs of one round of a tournament in which all play all, after `players` - 1 rounds (circle method).

    The last player stays in place, and the others rotate.
    """
    others, apart = players - 1, torch.arange(1, players // 2)
    circle = torch.stack([number + apart, number - apart], dim=1) % others
    return torch.cat([torch.tensor([number % others, others]), circle.flatten()])


@dataclass(frozen=True)
class Plan:
    """Determines which samples a rank sees in which step."""

    seed: int
    num_samples: int
    timeline: Timeline
    layouts: dict[int, BatchLayout]
    rank: int
    repeats: int = 1
    balanced: torch.Tensor | None = None
    """The labels of all samples, if classes are drawn equally often."""

    @classmethod
    def of(
        cls, recipe: Recipe, num_samples: int, ranks: int = 1, rank: int = 0, labels: torch.Tensor | None = None
    ) -> "Plan":
        timeline, balanced = Timeline.of(recipe, num_samples), None
        if recipe.data.sampler == "balanced":
            balanced = known(labels, "data.sampler=balanced")
        return cls(recipe.seed, num_samples, timeline, layouts(recipe, ranks), rank, recipe.data.aug_repeats, balanced)

    def _order(self, epoch: int) -> torch.Tensor:
        if self.balanced is not None:
            return balanced_order(self.seed, epoch, self.balanced)
        return epoch_order(self.seed, epoch, self.num_samples, self.repeats)

    def steps(self, first_step: int) -> Iterator[tuple[ResolvedPhase, int, torch.Tensor]]:
        """Yield phase, epoch and keys of this rank (one row per micro-batch) of every step from `first_step` on."""
        order, ordered = torch.empty(0), -1
        for step in count(first_step):
            epoch, within = self.timeline.position(step)
            if epoch != ordered:
                order, ordered = self._order(epoch), epoch
            phase = self.timeline.phase_at(step)
            layout = self.layouts[phase.global_batch]
            yield phase, epoch, micro_batches(order, within, layout, self.rank, self.repeats)


def uniform(seed: int, epoch: int, ids: torch.Tensor, stream: int) -> torch.Tensor:
    """Return one number in [0, 1) per sample, equal on all devices: splitmix64 with wrapping int64 products."""
    if ids.device.type == "mps":  # its scalars pass through floating point, which does not hold 64 bits
        return uniform(seed, epoch, ids.cpu(), stream).to(ids.device)
    return _shift(_bits(ids, begin(seed, epoch, stream)), 40).to(torch.float32) / (1 << 24)


def _bits(ids: torch.Tensor, begin: int) -> torch.Tensor:
    """Return 64 random bits per id, different for different ids."""
    bits = ids * _signed(0x9E3779B97F4A7C15) + _signed(begin)
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shift(bits, 31)


def begin(seed: int, epoch: int, stream: int) -> int:
    """Return the start of a random stream, for the native code, which computes the same numbers as `uniform`."""
    return _mix(seed, epoch, stream)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without copying the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
