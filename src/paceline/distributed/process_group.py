"""Initializing torch's process group.

gloo listens while ranks connect. Another program that connects first takes the place of a rank, which then times out.
Ranks therefore confirm through the authenticated store that all of them are connected, and retry otherwise.
"""

import re
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from paceline.distributed import flight_recorder
from paceline.errors import UserError
from paceline.system.torch_internals import abort_groups, restart_group_names

_LOST = re.compile(
    r"connection (closed|reset) by (remote )?peer|broken pipe|timed out waiting|application timeout caused pair closure"
    r"|NCCL communicator was aborted|ncclRemoteError|watchdog caught collective operation timeout"
    r"|remote process exited|connection refused.*retry count|the connection to the rendezvous is lost",
    re.IGNORECASE,
)
_ATTEMPTS = 3
_CONNECT_TIMEOUT = timedelta(seconds=30)  # once all ranks have started, connecting takes milliseconds
_ABORT_TIMEOUT = 3.0  # seconds; an abort that takes longer waits for something that will not happen
# Keeps process groups alive: if DDP's reducer held the last reference, it would destroy the group while holding the
# GIL, and deadlock with a gloo thread that needs the GIL to release its last tensor
_kept: list[object] = []
_subgroups: list[dist.ProcessGroup] = []


def connect_ranks(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Connect all ranks, which have started; `timeout` applies to the group afterwards."""
    for attempt in range(_ATTEMPTS):
        failure = _try(backend, PrefixStore(str(attempt), store), rank, size)
        answers = gather_through(store, f"connected-{attempt}", rank, size, failure or "yes", timeout)
        if all(answer == "yes" for answer in answers):
            set_timeout(timeout)
            return
        abandon_group()
        restart_group_names()
    failed = {number: answer for number, answer in enumerate(answers) if answer != "yes"}
    first = min(failed)
    raise UserError(
        "ranks-not-connected",
        f"{len(failed)} of {size} ranks could not connect; rank {first}: {failed[first]}. Check that nodes can reach "
        "each other on all ports, and that no other program connects to them.",
        ranks=sorted(failed),
    )


def set_timeout(timeout: timedelta) -> None:
    """Set how long collectives wait for other ranks."""
    for group in (dist.group.WORLD, *_subgroups):
        assert group is not None
        group.set_timeout(timeout)
    flight_recorder.set_timeout(timeout)


def add_subgroup(group: dist.ProcessGroup) -> None:
    """Let a group of some ranks have the timeout of the group of all ranks, from now on."""
    group.set_timeout(flight_recorder.timeout())
    _subgroups.append(group)


def _try(backend: str, store: Store, rank: int, size: int) -> str:
    """Return why connecting failed, or ""."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_CONNECT_TIMEOUT)
    except RuntimeError as error:
        return str(error).splitlines()[0][:120] or type(error).__name__
    return ""


def gather_through(store: Store, key: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    """Return the values of all ranks, in rank order. Works before ranks are connected."""
    store.set(f"{key}/{rank}", value)
    keys = [f"{key}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]


def connect_gpus(device: torch.device) -> None:
    """Let NCCL connect now instead of at the first collective of the training, and bind the group to its GPU.

    Not `device_id` of init_process_group: NCCL would wait without a timeout for ranks that gloo could not connect.
    """
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = device
    dist.all_reduce(torch.zeros(1, device=device))
    torch.cuda.synchronize(device)


def destroy_group() -> None:
    """Destroy the process group. Waits for all other ranks, so they must be alive and at the same point."""
    _keep_groups()
    dist.destroy_process_group()


def abandon_group() -> None:
    """Stop communicating without waiting for other ranks, which may be dead. Destroying the group would wait."""
    if not dist.is_initialized():
        return
    _keep_groups()
    thread = threading.Thread(target=abort_groups, name="abort", daemon=True)
    thread.start()
    thread.join(_ABORT_TIMEOUT)


def _keep_groups() -> None:
    _kept.extend([dist.group.WORLD, *_subgroups])
    _subgroups.clear()


def is_lost_connection(error: BaseException) -> bool:
    """Return whether another rank ended while this one communicated with it."""
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))
