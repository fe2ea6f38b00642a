"""Records the collectives that a rank calls, and pretends to be one rank of many.

torch's fake process group (torch.testing._internal.distributed.fake_pg) is not part of torch's public interface. It is
used in tests only, because no public back end can pretend that hundreds of ranks exist: one process acts as one of
them, and collectives return at once with values that this rank could compute.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.distributed.world import World
from paceline.engine import session, train
from paceline.engine.build import Setup
from paceline.engine.run import TrainingRun

_NO_COLLECTIVES = ("wait_tensor", "wrap_tensor")


@dataclass(frozen=True)
class Collective:
    """One call; `part` is the part of the run that made it."""

    part: str
    name: str
    shape: tuple[int, ...]
    """Of the largest tensor: a whole all-gather or reduce-scatter, not this rank's part of it."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Recorder(TorchDispatchMode):
    """Records every collective of this thread, whichever back end serves it."""

    def __init__(self, output: Path | None = None) -> None:
        """`output`: a file to which every call is appended at once, for processes that a test starts."""
        super().__init__()
        self._output = output
        self.calls: list[Collective] = []
        self.part = "start"
        self.setup: Setup | None = None
        """Of the run, once it trains."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and not any(word in func.name() for word in _NO_COLLECTIVES):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            largest = max(tensors, key=torch.Tensor.numel)
            name = func.name().partition("::")[2].strip("_").partition(".")[0]
            self.calls.append(Collective(self.part, name, tuple(largest.shape), largest.dtype))
            if self._output:
                with self._output.open("a") as file:
                    print(self.calls[-1], file=file)
        return result

    def of(self, part: str, name: str = "") -> list[Collective]:
        """Return the collectives of a part of the run, in order."""
        return [call for call in self.calls if call.part == part and name in call.name]


class HasPart(Protocol):
    part: str
    setup: Setup | None


def mark_parts(patch: pytest.MonkeyPatch, record: HasPart) -> None:
    """Keep `record.part` up to date: "start", "step N", "log", "evaluation", "checkpoint"; "loop" is between steps.

    Start-up ends after the first step, when the timeout of the ranks changes.
    """

    def marking(owner: Any, name: str, part: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            before, record.part = record.part, part(*args)
            try:
                return function(*args, **kwargs)
            finally:
                record.part = before

        patch.setattr(owner, name, marked)

    def step(setup: Setup, _batches: object, number: int, _lr: float) -> str:
        record.setup = setup
        return f"step {number}"

    marking(session, "train", lambda *_: "loop")
    marking(train, "train_step", step)
    marking(World, "shorten_timeout", lambda *_: "start")
    marking(train, "pause", lambda *_: "pause")
    marking(train, "measure", lambda *_: "evaluation")
    marking(TrainingRun, "log", lambda *_: "log")
    marking(TrainingRun, "save", lambda *_: "checkpoint")
    marking(TrainingRun, "finish", lambda *_: "finish")


@contextmanager
def pretended(world: World) -> Iterator[World]:
    """Connect one process as a rank of a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        yield world
    finally:
        dist.destroy_process_group()


def pretend_in_sessions(world: World, patch: pytest.MonkeyPatch) -> None:
    """Let `train_recipe` be rank 0 of a fake process group, or a single process."""
    patch.setattr(World, "from_env", lambda _device: world)
    patch.setattr(World, "connected", pretended if world.size > 1 else nullcontext)
    # the fake process group has no timeout
    patch.setattr("paceline.distributed.process_group.set_timeout", lambda _: None)
    patch.setattr("paceline.distributed.mesh.add_subgroup", lambda _: None)
