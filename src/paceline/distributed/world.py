"""Who am I among how many: read once from the environment, passed on as a value.

A lone process, gloo on CPUs and NCCL on GPUs are the same code. No other file reads RANK and its kin.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout

from paceline.base.host import confine, cores, host_name, unbind
from paceline.config import launched
from paceline.distributed import srun
from paceline.distributed.objects import all_gather_object, broadcast_object
from paceline.distributed.process_group import join
from paceline.distributed.sockets import refuse_new_connections
from paceline.distributed.store import store_at
from paceline.errors import UserError

T = TypeVar("T")
_CPU = torch.device("cpu")
LOST_RANK = "lost another rank"
_LOST = re.compile("connection (closed|reset) by peer|broken pipe|timed out waiting", re.IGNORECASE)
# If DDP's reducer held the last reference to the process group, it would end it with the interpreter's lock in its
# hand, and wait for a thread of gloo's that needs the lock to release its last tensor: now and then a run never ended
_KEPT: list[object] = []
_AT_FIRST = timedelta(seconds=60)  # one machine may read or compile for longer than others
_PATIENCE = 600  # seconds; torch's 30 minutes leave users before a hung screen for too long


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    device: torch.device = _CPU

    @classmethod
    def from_env(cls, device: str = "auto") -> "World":
        """This process's place as torchrun, or srun, tells it; a lone process without either."""
        place = launched.place(os.environ)
        for name, value in place.meeting.items():
            os.environ.setdefault(name, value)
        return cls(place.rank, place.size, place.local_rank, place.local_size, _device(device, place.local_rank))

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @contextmanager
    def connected(self) -> Iterator["World"]:
        """Set threads and device, join the other ranks, and leave them in order."""
        torch.set_num_threads(threads_per_process(self.local_size))
        if self.device.type == "cpu":
            keep_freed_memory()
            if launched.AGENT in os.environ and "PACELINE_THREADS" not in os.environ:
                confine(self.local_rank, self.local_size)
        if self.device.type == "cuda":
            unbind()
            torch.cuda.set_device(self.device)
        if self.size == 1:
            yield self
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        timeout = max(patience(), _AT_FIRST)
        if store := _store(self.size):
            join(backend, store, self.rank, self.size, timeout)
        else:
            _join_at_master(backend, self.rank, self.size, timeout)
        if store:  # torch's own would be asked for further connections; NCCL's ports, which it needs, open later
            refuse_new_connections()
        try:
            yield self
            self.barrier()
        except RuntimeError as error:
            if not _LOST.search(str(error)):
                raise
            raise UserError(
                f"rank {self.rank} {LOST_RANK} ({str(error).splitlines()[0][:120]}); look for the first failure "
                "there, then start the same command again to go on from the last save"
            ) from None
        finally:
            _KEPT.append(dist.group.WORLD)
            dist.destroy_process_group()

    def hasten(self) -> None:
        """From now on all ranks do the same work in the same time, and a silent one is soon taken for lost."""
        if self.size > 1:
            _set_pg_timeout(patience())

    def barrier(self) -> None:
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in order of rank, on every rank."""
        if self.size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def broadcast_(self, tensor: torch.Tensor, giver: int = 0) -> torch.Tensor:
        """Overwrite with another rank's values, the leader's if nothing is said."""
        if self.size > 1:
            dist.broadcast(tensor, giver)
        return tensor

    def from_rank(self, value: T, giver: int) -> T:
        """That rank's value, on every rank."""
        if self.size == 1:
            return value
        given: T = broadcast_object(value, giver, self.rank)
        return given

    def from_leader(self, value: T) -> T:
        """The leader's value, on every rank."""
        return self.from_rank(value, 0)

    def on_leader(self, action: Callable[[], T]) -> T:
        """Do something on the leader only; its result, or its complaint to the user, reaches every rank."""
        if self.size == 1:
            return action()
        outcome: dict[str, Any] = {}
        if self.is_leader:
            try:
                outcome = {"result": action()}
            except UserError as error:
                outcome = {"complaint": str(error)}
        outcome = self.from_leader(outcome)
        if "complaint" in outcome:
            raise UserError(outcome["complaint"])
        result: T = outcome["result"]
        return result

    def from_all(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        return all_gather_object(value, self.size)

    def hosts(self) -> list[str]:
        """Host name of every rank."""
        return self.from_all(host_name())

    def processes_here(self) -> list[int]:
        """Process numbers of the ranks on this host."""
        host = host_name()
        return [number for there, number in self.from_all((host, os.getpid())) if there == host]

    def gpus_here(self) -> list[str]:
        """Identifiers of the GPUs that ranks on this host compute on."""
        cuda = self.device.type == "cuda"
        own = str(torch.cuda.get_device_properties(self.device).uuid) if cuda else ""
        host = host_name()
        return [gpu for there, gpu in self.from_all((host, own)) if there == host and gpu]


def _join_at_master(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """As torch does it by itself, at the address that another launcher gave."""
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    except dist.DistNetworkError as error:
        place = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        raise UserError(
            f"rank {rank} of {size} cannot use {place} ({str(error).splitlines()[0][:200]}); set them to an address of "
            "rank 0's machine and a port that is free there"
        ) from None


def _store(size: int) -> Store | None:
    """By which ranks find each other; None under another launcher, such as torchrun: then it is torch's own."""
    if place := os.environ.get(launched.STORE):
        return store_at(place, size, os.environ)
    if "RANK" not in os.environ and launched.in_srun(os.environ):
        return srun.store(launched.place(os.environ), os.environ)
    return None


def _device(wanted: str, local_rank: int) -> torch.device:
    available = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == "cuda" and not available:
        raise UserError(
            "device=cuda: this PyTorch sees no GPU; check nvidia-smi and the torch build, or use --device cpu"
        )
    if not available:
        return torch.device("cpu")
    if local_rank >= available:
        raise UserError(f"{local_rank + 1} processes on this machine, but {available} GPUs; start at most {available}")
    return torch.device("cuda", local_rank)


def patience() -> timedelta:
    """How long ranks wait for each other before they take one for lost; launched jobs say it."""
    return timedelta(seconds=float(os.environ.get("PACELINE_PATIENCE") or _PATIENCE))


def threads_per_process(processes: int) -> int:
    """Cores are shared out between the processes of a machine, so that they do not fight for them.

    OMP_NUM_THREADS is not asked, because torchrun sets it to 1 whatever the machine has.
    """
    if wanted := os.environ.get("PACELINE_THREADS"):
        if not wanted.isdecimal() or int(wanted) < 1:
            raise UserError(f"PACELINE_THREADS={wanted!r} is not a whole number from 1 on; unset it, or use --threads")
        return int(wanted)
    return max(1, cores() // processes)


def keep_freed_memory() -> None:
    """Let the C library keep large freed blocks for the next step instead of returning them to the kernel.

    Activations are allocated and freed at every step; getting them from the kernel each time, page by page, is a large
    part of a step on CPUs (benchmarks/loop.py shows how large).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
