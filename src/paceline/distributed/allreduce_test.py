"""A few seconds of what training does between ranks, to see whether it works and how fast it is."""

import time

import torch

from paceline.distributed.world import World

_NUMBERS = 1 << 20


def exchange(seconds: float) -> float | None:
    """Sum tensors over all ranks for a while; bytes of them a second, known to the leader."""
    world = World.from_env()
    with world.connected():
        numbers = torch.ones(_NUMBERS, device=world.device)
        begin = time.perf_counter()
        world.sum_(numbers)
        one = max(time.perf_counter() - begin, 1e-3)
        times = world.broadcast_object(max(1, min(1000, int(seconds / one))))
        begin = time.perf_counter()
        for _ in range(times):
            world.sum_(numbers)
            numbers /= world.size
        taken = time.perf_counter() - begin
        return 4.0 * _NUMBERS * times / taken if world.is_rank_zero else None
