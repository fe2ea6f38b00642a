"""A few seconds of all-reduce between all ranks, to check that it works and to measure its bandwidth."""

import time

import torch

from paceline.distributed.world import World

_NUMBERS = 1 << 20


def measure_allreduce(seconds: float) -> float | None:
    """All-reduce tensors over all ranks for about `seconds`. Returns bytes per second on rank 0, None elsewhere."""
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
        elapsed = time.perf_counter() - begin
        return 4.0 * _NUMBERS * times / elapsed if world.is_rank_zero else None
