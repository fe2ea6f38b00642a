"""Which sample comes when, and with which random numbers: pure functions of seed, epoch and sample id.

Nothing here knows ranks' history, workers or restarts, so the same run on 1, 2 or 4 ranks sees the same global batches,
and a run resumed in mid-epoch, on any number of ranks, neither repeats nor skips a sample.
"""

from collections.abc import Iterator
from itertools import count

import torch

from paceline.config.batch import BatchLayout

_MASK = (1 << 64) - 1
_ORDER = 0xA11  # keeps the order's random stream apart from the augmentations'


def _mix(*parts: int) -> int:
    """Hash whole numbers to 64 bits (splitmix64's finaliser over each part)."""
    state = 0
    for part in parts:
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def step_seed(seed: int, step: int, rank: int) -> int:
    """Seed of what a model draws itself (dropout and the like) in one step on one rank."""
    return _mix(seed, step, rank)


def epoch_order(seed: int, epoch: int, num_samples: int) -> torch.Tensor:
    """All sample ids in the order of one epoch."""
    generator = torch.Generator().manual_seed(_mix(seed, epoch, _ORDER))
    return torch.randperm(num_samples, generator=generator)


def micro_batches(order: torch.Tensor, step: int, layout: BatchLayout, rank: int) -> torch.Tensor:
    """Sample ids of one rank in one step of the epoch: a row per micro-batch.

    The last samples of an order that do not fill a global batch are left out; another epoch leaves out others.
    """
    ids = order[step * layout.global_batch : (step + 1) * layout.global_batch]
    return ids.view(layout.ranks, layout.accumulation, layout.per_rank_batch)[rank]


def steps(
    seed: int, num_samples: int, layout: BatchLayout, rank: int, first_step: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """From `first_step` on, without end: the step, its epoch, and this rank's sample ids, a row per micro-batch."""
    steps_per_epoch = num_samples // layout.global_batch
    order = torch.empty(0)
    for step in count(first_step):
        epoch, within = divmod(step, steps_per_epoch)
        if within == 0 or step == first_step:
            order = epoch_order(seed, epoch, num_samples)
        yield step, epoch, micro_batches(order, within, layout, rank)


def uniform(seed: int, epoch: int, ids: torch.Tensor, stream: int) -> torch.Tensor:
    """One number in [0, 1) per sample, the same on every device: splitmix64 on int64, whose products wrap around."""
    bits = ids * _signed(0x9E3779B97F4A7C15) + _signed(begin(seed, epoch, stream))
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    bits = bits ^ _shift(bits, 31)
    return _shift(bits, 40).to(torch.float32) / (1 << 24)


def begin(seed: int, epoch: int, stream: int) -> int:
    """Where a stream's random numbers begin, for the native code, which goes on from there as `uniform` does."""
    return _mix(seed, epoch, stream)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without copying the sign bit."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
