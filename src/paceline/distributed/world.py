"""Rank, world size and collectives, as a value that is read from the environment once.

A single process, gloo on CPUs and NCCL on GPUs use the same code.
"""

import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store

from paceline.distributed import env
from paceline.distributed import slurm as srun
from paceline.distributed.objects import all_gather_object, broadcast_object
from paceline.distributed.process_group import connect_ranks, set_timeout
from paceline.distributed.sockets import refuse_new_connections
from paceline.distributed.store import store_at
from paceline.errors import UserError
from paceline.system.host import confine, cores, host_name, machine_id, unbind

T = TypeVar("T")
_CPU = torch.device("cpu")
LOST_RANK = "rank-lost"
"""Code of the error of a rank that lost the connection to another one."""
_LOST = re.compile("connection (closed|reset) by peer|broken pipe|timed out waiting", re.IGNORECASE)
# Keeps process groups alive: if DDP's reducer held the last reference, it would destroy the group while holding the
# GIL, and deadlock with a gloo thread that needs the GIL to release its last tensor
_KEPT: list[object] = []
_STARTUP_TIMEOUT = timedelta(seconds=60)  # one node may read or compile for longer than others
_DISK_TIMEOUT = timedelta(hours=1)
_RANK_TIMEOUT = 600  # seconds; torch's default of 30 minutes is too long to wait for a hung run


@dataclass(frozen=True)
class World:
    """This process among all ranks, with the collectives between them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = _CPU

    @classmethod
    def from_env(cls, device: str = "auto") -> "World":
        """Return the world that torchrun or srun set up; without either, a world of size 1."""
        ranks = env.rank_env(os.environ)
        for name, value in ranks.master_env.items():
            os.environ.setdefault(name, value)
        return cls(ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, _device(device, ranks.local_rank))

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @contextmanager
    def connected(self) -> Iterator["World"]:
        """Set threads and device, and initialize the process group; destroy it at the end."""
        torch.set_num_threads(threads_per_process(self.local_size))
        if self.device.type == "cpu":
            keep_freed_memory()
            if env.AGENT in os.environ and "PACELINE_THREADS" not in os.environ:
                confine(self.local_rank, self.local_size)
        if self.device.type == "cuda":
            unbind()
            torch.cuda.set_device(self.device)
        if self.size == 1:
            yield self
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        timeout = max(rank_timeout(), _STARTUP_TIMEOUT)
        if store := _store(self.size):
            connect_ranks(backend, store, self.rank, self.size, timeout)
        else:
            _join_at_master(backend, self.rank, self.size, timeout)
        self.close_ports()
        try:
            yield self
            self.barrier()
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise UserError(
                LOST_RANK,
                f"rank {self.rank} lost the connection to another rank ({str(error).splitlines()[0][:120]}). Look for "
                "the first failure in the log of that rank, then run the same command again to resume from the last "
                "checkpoint.",
                rank=self.rank,
            ) from None
        finally:
            _KEPT.append(dist.group.WORLD)
            dist.destroy_process_group()

    def close_ports(self) -> None:
        """Refuse new connections to this rank, once a process group is connected; NCCL opens its ports later."""
        if _has_own_store():  # torch's store needs further connections
            refuse_new_connections()

    def shorten_timeout(self) -> None:
        """Use the rank timeout from now on: after start-up all ranks take equally long, so a silent one has failed."""
        if self.size > 1:
            set_timeout(rank_timeout())

    @contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Wait longer for other ranks, while each one does work whose duration depends on its disk."""
        if self.size > 1:
            set_timeout(_DISK_TIMEOUT)
        yield
        if self.size > 1:
            set_timeout(max(rank_timeout(), _STARTUP_TIMEOUT))

    def wait_until(self, condition: Callable[[], bool], interval: float = 0.1) -> None:
        """Wait until a condition holds on every rank. A collective that is repeated, so that it cannot time out."""
        while self.sum_(torch.tensor([0 if condition() else 1])).item():
            time.sleep(interval)

    def raise_together(self, action: Callable[[], T]) -> T:
        """Call a function on every rank and return its result. If it raises a UserError on any, all raise the first."""
        error, result = None, None
        try:
            result = action()
        except UserError as raised:
            error = raised
        if found := [each for each in self.all_gather_object(error.to_json() if error else None) if each]:
            raise error or UserError.from_json(found[0])
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """All-reduce (sum) in place, and return the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def broadcast_(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite the tensor with that of rank `src`, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, src)
        return tensor

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src` on every rank."""
        if self.size == 1:
            return value
        received: T = broadcast_object(value, src, self.rank)
        return received

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Call a function on rank 0 only. Every rank returns its result, or raises its UserError with code and fields.

        Fields that JSON has no type for, such as paths, become strings on all ranks.
        """
        if self.size == 1:
            return action()
        outcome: dict[str, Any] = {}
        if self.is_rank_zero:
            try:
                outcome = {"result": action()}
            except UserError as error:
                outcome = {"error": error.to_json()}
        outcome = self.broadcast_object(outcome)
        if "error" in outcome:
            raise UserError.from_json(outcome["error"])
        result: T = outcome["result"]
        return result

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        return all_gather_object(value, self.size)

    def hosts(self) -> list[str]:
        """Return the host name of every rank."""
        return self.all_gather_object(host_name())

    def processes_here(self) -> list[int]:
        """Return the process IDs of the ranks on this machine, also those of other simulated nodes."""
        machine = machine_id()
        return [number for there, number in self.all_gather_object((machine, os.getpid())) if there == machine]

    def gpus_here(self) -> list[str]:
        """Return the UUIDs of the GPUs that ranks on this host use."""
        cuda = self.device.type == "cuda"
        uuid = str(torch.cuda.get_device_properties(self.device).uuid) if cuda else ""
        host = host_name()
        return [gpu for there, gpu in self.all_gather_object((host, uuid)) if there == host and gpu]


def is_lost_connection(error: BaseException) -> bool:
    """Return whether another rank ended while this one communicated with it."""
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def _join_at_master(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """Initialize the process group at the address that another launcher, such as torchrun, gave."""
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    except dist.DistNetworkError as error:
        master = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        message = (
            f"Rank {rank} of {size} cannot use {master} ({str(error).splitlines()[0][:200]}). "
            "Set them to an address of the node of rank 0 and a free port there."
        )
        raise UserError("master-unavailable", message, rank=rank) from None


def _has_own_store() -> bool:
    """Return whether ranks use Paceline's store; not under another launcher such as torchrun."""
    return bool(os.environ.get(env.STORE)) or ("RANK" not in os.environ and env.in_srun(os.environ))


def _store(size: int) -> Store | None:
    """Return the ranks' store; None if torch uses its own."""
    if location := os.environ.get(env.STORE):
        return store_at(location, size, os.environ)
    return srun.store(env.rank_env(os.environ), os.environ) if _has_own_store() else None


def _device(requested: str, local_rank: int) -> torch.device:
    available = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cuda" and not available:
        raise UserError(
            "no-gpu", "device=cuda: PyTorch finds no GPU. Check nvidia-smi and the torch build, or use --device cpu."
        )
    if not available:
        return torch.device("cpu")
    if local_rank >= available:
        raise UserError(
            "too-few-gpus",
            f"this node has {available} GPUs, but at least {local_rank + 1} ranks. Start at most {available} per node.",
            gpus=available,
        )
    return torch.device("cuda", local_rank)


def rank_timeout() -> timedelta:
    """Return how long ranks wait for each other before one is considered failed; launched jobs set it."""
    return timedelta(seconds=float(os.environ.get("PACELINE_RANK_TIMEOUT") or _RANK_TIMEOUT))


def threads_per_process(processes: int) -> int:
    """Return the number of threads of each process, so that the processes of a node divide its cores.

    Ignores OMP_NUM_THREADS, because torchrun sets it to 1 regardless of the number of cores.
    """
    if threads := os.environ.get("PACELINE_THREADS"):
        if not threads.isdecimal() or int(threads) < 1:
            raise UserError(
                "invalid-threads",
                f"PACELINE_THREADS={threads!r} is not a positive integer. Unset it, or use --threads.",
            )
        return int(threads)
    return max(1, cores() // processes)


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks for the next step instead of returning them to the kernel.

    Activations are allocated and freed at every step. Requesting them from the kernel each time, page by page, takes a
    large part of a step on CPUs (benchmarks/loop.py measures it).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
