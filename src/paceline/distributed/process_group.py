"""Forming torch's process group.

gloo listens while ranks connect, and whoever connects first takes the place of a rank, which then waits in vain. Ranks
tell each other through the store, which strangers cannot reach, whether they are connected, and else try again.
"""

from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _set_pg_timeout, _world

from paceline.errors import UserError

_ATTEMPTS = 3
_AT_ONCE = timedelta(seconds=30)  # ranks that are all there connect in a moment


def join(backend: str, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Connect all ranks, however far apart they start; `timeout` is that of the group afterwards."""
    _from_all(store, "arrived", rank, size, "yes", timeout)
    for attempt in range(_ATTEMPTS):
        mistake = _try(backend, PrefixStore(str(attempt), store), rank, size)
        answers = _from_all(store, f"connected-{attempt}", rank, size, mistake or "yes", timeout)
        if all(answer == "yes" for answer in answers):
            _set_pg_timeout(timeout)
            return
        _leave()
    failed = {number: answer for number, answer in enumerate(answers) if answer != "yes"}
    first = min(failed)
    raise UserError(
        f"{len(failed)} of {size} ranks could not be connected, rank {first} first ({failed[first]}); check that nodes "
        "reach each other on all ports, and that no other program connects to them"
    )


def _try(backend: str, store: Store, rank: int, size: int) -> str:
    """Why it failed; empty if it did not."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_AT_ONCE)
    except RuntimeError as error:
        return str(error).splitlines()[0][:120] or type(error).__name__
    return ""


def _from_all(store: Store, key: str, rank: int, size: int, value: str, timeout: timedelta) -> list[str]:
    store.set(f"{key}/{rank}", value)
    keys = [f"{key}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    return [store.get(key).decode() for key in keys]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _world.group_count = 0  # from which torch makes the group's name, the same on all ranks
