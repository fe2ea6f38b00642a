"""Rank, world size and collectives, as a value that is read from the environment once.

A single process, gloo on CPUs and NCCL on GPUs use the same code.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store

from paceline.distributed import env, process_group
from paceline.distributed import slurm as srun
from paceline.distributed.devices import RankDevice, check_devices, choose_device, describe, sharing_cores
from paceline.distributed.flight_recorder import CollectiveWatch, lost_rank
from paceline.distributed.objects import all_gather_object, broadcast_object
from paceline.distributed.reports import report_leaving
from paceline.distributed.sockets import refuse_new_connections
from paceline.distributed.store import store_at
from paceline.errors import Stopped, UserError
from paceline.system.device import pci_address, wait
from paceline.system.host import bind_near_gpu, confine, cores, host_name, keep_freed_memory, machine_id

T = TypeVar("T")
_CPU = torch.device("cpu")
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
        chosen = choose_device(device, ranks.local_rank, ranks.size)
        return cls(ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, chosen)

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0

    @contextmanager
    def connected(self) -> Iterator["World"]:
        """Set threads and device, and initialize the process group; destroy it at the end."""
        if self.size == 1:
            self._set_up(1)
            yield self
            return
        timeout = max(rank_timeout(), _STARTUP_TIMEOUT)
        store = _store(self.size)
        ranks_store = store or _store_of_launcher(self.rank, self.size, timeout)
        # before connecting: NCCL and gloo wait for each other, and NCCL fails on a shared GPU
        devices = self._agree_on_devices(ranks_store, timeout)
        self._set_up(sharing_cores(devices, self.rank))
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        process_group.connect_ranks(backend, ranks_store, self.rank, self.size, timeout)
        self.close_ports()
        watch = CollectiveWatch(ranks_store, self.rank, [device.host for device in devices])
        watch.start()
        try:
            if self.device.type == "cuda":
                process_group.connect_gpus(self.device)
            with _until_stopped() as stopped:
                yield self
            self.barrier()
            process_group.destroy_group()
        except BaseException as error:
            # destroying the group would wait for ranks that may be dead
            report_leaving()
            process_group.abandon_group()
            if not process_group.is_lost_connection(error):
                raise
            raise _explained(watch, self.rank, error) from None
        finally:
            watch.stop()
        if stopped:
            raise stopped[0]

    def _agree_on_devices(self, store: Store, timeout: timedelta) -> list[RankDevice]:
        """Return the devices of all ranks, which may start at different times; UserError if they do not fit."""
        own = json.dumps(describe(self.device))
        found = process_group.gather_through(store, "device", self.rank, self.size, own, timeout)
        devices = [RankDevice(*json.loads(text)) for text in found]
        check_devices(devices)
        return devices

    def _set_up(self, sharing: int) -> None:
        """Set threads and device; `sharing` ranks may use the same cores as this one."""
        torch.set_num_threads(threads_per_process(sharing))
        if self.device.type == "cpu":
            keep_freed_memory()
            if env.AGENT in os.environ and "PACELINE_THREADS" not in os.environ:
                confine(self.local_rank, self.local_size)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            _bind_near_gpu(self.device, self.local_rank, self.local_size)

    def close_ports(self) -> None:
        """Refuse new connections to this rank, once a process group is connected; NCCL opens its ports later."""
        if _has_own_store():  # torch's store needs further connections
            refuse_new_connections()

    def shorten_timeout(self) -> None:
        """Use the rank timeout from now on: after start-up all ranks take equally long, so a silent one has failed."""
        if self.size > 1:
            wait(self.device)  # collectives that a GPU has not completed were started with the longer timeout
            self.barrier()
            process_group.set_timeout(rank_timeout())

    @contextmanager
    def long_timeout(self) -> Iterator[None]:
        """Wait longer for other ranks, while each one does work whose duration depends on its disk."""
        if self.size > 1:
            process_group.set_timeout(_DISK_TIMEOUT)
        yield
        if self.size > 1:
            process_group.set_timeout(max(rank_timeout(), _STARTUP_TIMEOUT))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds on every rank. A collective that is repeated, so that it cannot time out."""
        pause = 0.001
        while self.sum_(torch.tensor([0 if condition() else 1])).item():
            time.sleep(pause)
            pause = min(0.1, 2 * pause)

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


@contextmanager
def _until_stopped() -> Iterator[list[Stopped]]:
    """Collect the stop of a run, which all ranks agreed on, so that they can leave together."""
    stopped: list[Stopped] = []
    try:
        yield stopped
    except Stopped as stop:
        stopped.append(stop)


def _explained(watch: CollectiveWatch, rank: int, error: BaseException) -> UserError:
    """Return the error of a rank that lost another one, which names the other if possible."""
    with suppress(RuntimeError):  # the store may be lost too
        if explained := watch.explain():
            return explained
    return lost_rank(rank, f"it lost the connection to another rank ({str(error).splitlines()[0][:120]})")


def _store_of_launcher(rank: int, size: int, timeout: timedelta) -> Store:
    """Return the store at the address that another launcher, such as torchrun, gave."""
    try:
        store: Store = next(dist.rendezvous("env://", rank, size, timeout=timeout))[0]
    except dist.DistNetworkError as error:
        master = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={os.environ.get('MASTER_PORT')}"
        message = (
            f"Rank {rank} of {size} cannot use {master} ({str(error).splitlines()[0][:200]}). "
            "Set them to an address of the node of rank 0 and a free port there."
        )
        raise UserError("master-unavailable", message, rank=rank) from None
    return dist.PrefixStore("paceline", store)


def _has_own_store() -> bool:
    """Return whether ranks use Paceline's store; not under another launcher such as torchrun."""
    return bool(os.environ.get(env.STORE)) or ("RANK" not in os.environ and env.in_srun(os.environ))


def _store(size: int) -> Store | None:
    """Return the ranks' store; None if torch uses its own."""
    if location := os.environ.get(env.STORE):
        return store_at(location, size, os.environ)
    return srun.store(env.rank_env(os.environ), os.environ) if _has_own_store() else None


def _bind_near_gpu(device: torch.device, local_rank: int, local_size: int) -> None:
    """Bind this rank to cores near its GPU. SLURM may give each task its own cores, and its own GPU as cuda:0."""
    own_gpu = torch.cuda.device_count() < local_size
    gpus = [device] if own_gpu else [torch.device(device.type, number) for number in range(local_size)]
    divided = own_gpu or ("RANK" not in os.environ and env.in_srun(os.environ))
    bind_near_gpu([pci_address(gpu) for gpu in gpus], 0 if own_gpu else local_rank, divided)


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
