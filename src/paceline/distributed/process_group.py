"""Initializing torch's process group.

gloo listens while ranks connect. Another program that connects first takes the place of a rank, which then times out.
Ranks therefore confirm through the authenticated store that all of them are connected, and retry otherwise.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from paceline.errors import UserError
from paceline.system.torch_internals import restart_group_names

_ATTEMPTS = 3
_CONNECT_TIMEOUT = timedelta(seconds=30)  # once all ranks have started, connecting takes milliseconds


def connect_ranks(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Connect all ranks, which may start at different times; `timeout` applies to the group afterwards."""
    _all_gather(store, "arrived", rank, size, "yes", timeout)
    for attempt in range(_ATTEMPTS):
        failure = _try(backend, PrefixStore(str(attempt), store), rank, size)
        answers = _all_gather(store, f"connected-{attempt}", rank, size, failure or "yes", timeout)
        if all(answer == "yes" for answer in answers):
            set_timeout(timeout)
            return
        _reset()
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
    group = dist.group.WORLD
    assert group is not None
    group.set_timeout(timeout)


def _try(backend: str, store: Store, rank: int, size: int) -> str:
    """Return why connecting failed, or ""."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_CONNECT_TIMEOUT)
    except RuntimeError as error:
        return str(error).splitlines()[0][:120] or type(error).__name__
    return ""


def _all_gather(store: Store, key: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    store.set(f"{key}/{rank}", value)
    keys = [f"{key}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]


def _reset() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    restart_group_names()
