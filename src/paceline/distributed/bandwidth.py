"""Bandwidth between ranks, as nccl-tests define it.

Collectives on GPUs return when they are enqueued, and the first ones also set up connections. A time therefore counts
only after a warm-up, and between two synchronizations of the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.device import wait
from paceline.system.host import host_name

_GPU_BYTES, _CPU_BYTES = 64 << 20, 4 << 20  # large enough that latency does not count
_WARM_UP, _MAX_REPEATS = 3, 1000
_ALL_PAIRS_UP_TO = 8  # ranks; a node of 8 GPUs has 28 pairs


@dataclass(frozen=True)
class Bandwidth:
    """The time of one all-reduce between some ranks: that of the slowest."""

    ranks: tuple[int, ...]
    size_bytes: int
    seconds: float

    @property
    def algorithm_bytes_per_second(self) -> float:
        """Size of the tensor over the time: nccl-tests' algbw."""
        return self.size_bytes / self.seconds

    @property
    def bus_bytes_per_second(self) -> float:
        """What every link carries, to compare with its nominal bandwidth at any number of ranks: nccl-tests' busbw."""
        return self.algorithm_bytes_per_second * 2 * (len(self.ranks) - 1) / len(self.ranks)


def seconds_per_call(
    call: Callable[[], object],
    synchronize: Callable[[], None],
    slowest: Callable[[float], float],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds that one call takes on the device, from many calls in about `budget` seconds.

    `slowest` returns the maximum of a time over the ranks that take part, so that all repeat equally often.
    """

    def timed(times: int) -> float:
        synchronize()
        begin = clock()
        for _ in range(times):
            call()
        synchronize()  # until here, the calls may only be enqueued
        return slowest(clock() - begin) / times

    timed(1)  # sets up connections
    estimate = max(timed(_WARM_UP), 1e-6)
    return timed(max(1, min(_MAX_REPEATS, int(budget / estimate))))


def all_reduce_bandwidth(world: World, seconds: float = 3.0, size_bytes: int = 0) -> Bandwidth:
    """Measure the all-reduce over all ranks for about `seconds`; return it on every rank.

    Raises UserError if the sum is wrong, as it is with a broken peer-to-peer transport.
    """
    tensor = _tensor(world, size_bytes)
    if not bool((world.sum_(tensor) == world.size).all()):  # waits for the device
        raise UserError(
            "all-reduce-wrong",
            f"rank {world.rank} received a wrong sum from an all-reduce over {world.size} ranks. Disable PCI access "
            "control services (ACS) or the IOMMU, or set NCCL_P2P_DISABLE=1.",
            rank=world.rank,
        )
    tensor.zero_()  # sums of zeros stay finite
    taken = seconds_per_call(
        lambda: world.sum_(tensor), lambda: wait(world.device), lambda own: max(world.all_gather_object(own)), seconds
    )
    return Bandwidth(tuple(range(world.size)), tensor.nbytes, taken)


def pair_bandwidths(world: World, seconds: float = 0.2, size_bytes: int = 0) -> list[Bandwidth]:
    """Measure pairs of ranks, one after the other, for about `seconds` each; return all of them on every rank.

    Both ranks of a pair send the whole tensor and receive one, which is what an all-reduce between two ranks does.
    """
    tensor = _tensor(world, size_bytes)
    own: list[tuple[int, int, float]] = []
    for low, high in pairs(world.size, world.local_size):
        world.barrier()  # a pair has the links to itself
        if world.rank in (low, high):
            peer = high if world.rank == low else low
            own.append((low, high, _pair_seconds(world, peer, tensor, seconds)))
    taken = {(low, high): each for one in world.all_gather_object(own) for low, high, each in one}
    return [Bandwidth(pair, tensor.nbytes, each) for pair, each in sorted(taken.items())]


def pairs(size: int, local_size: int) -> list[tuple[int, int]]:
    """Return the pairs to measure: all, or for many ranks the neighbors, and the same local rank on the next node."""
    if size <= _ALL_PAIRS_UP_TO:
        return list(combinations(range(size), 2))
    chosen = {tuple(sorted((rank, (rank + step) % size))) for rank in range(size) for step in (1, local_size)}
    return sorted((low, high) for low, high in chosen if low != high)


def _pair_seconds(world: World, peer: int, tensor: torch.Tensor, seconds: float) -> float:
    """Return the time that sending to and receiving from another rank takes: that of the slower of both."""
    received = torch.empty_like(tensor)

    def send_and_receive() -> None:
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
        ):
            work.wait()  # on GPUs only the stream waits

    def slowest(own: float) -> float:
        mine, other = torch.tensor([own], dtype=torch.float64), torch.empty(1, dtype=torch.float64)
        works = [dist.isend(mine, peer), dist.irecv(other, peer)]  # on the host, over gloo
        for work in works:
            assert work is not None
            work.wait()
        return max(own, float(other))

    return seconds_per_call(send_and_receive, lambda: wait(world.device), slowest, seconds)


def measure(device: str, seconds: float) -> dict[str, Any] | None:
    """Measure all ranks for about `seconds`, then pairs of them. Returns the figures on rank 0, None elsewhere."""
    world = World.from_env(device)
    with world.connected():
        ranks = world.all_gather_object(f"{host_name()} {world.device}")
        total = all_reduce_bandwidth(world, seconds)
        measured = pair_bandwidths(world, seconds / 10)
    pairs_measured = [[*one.ranks, one.bus_bytes_per_second] for one in measured]
    figures = {"ranks": ranks, "bus_bytes_per_second": total.bus_bytes_per_second, "pairs": pairs_measured}
    return figures if world.is_rank_zero else None


def _tensor(world: World, size_bytes: int) -> torch.Tensor:
    default = _CPU_BYTES if world.device.type == "cpu" else _GPU_BYTES
    return torch.ones((size_bytes or default) // 4, device=world.device)
