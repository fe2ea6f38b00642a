"""Finds what waits for the device within a training step."""

import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from paceline.engine.build import build
from paceline.engine.train import train_step
from paceline.optim.schedules import lr_at
from paceline.selftest.probes import Probing
from paceline.selftest.settings import exact_recipe
from paceline.system.torch_internals import operators

_WARM_UP, _STEPS = 3, 2
_TORCH = str(Path(torch.__file__).parent)
_OPTIM, _AUTOGRAD = f"{_TORCH}/optim", f"{_TORCH}/autograd/graph.py"
_COMPILE, _DYNAMO = f"{_TORCH}/_compile.py", f"{_TORCH}/_dynamo"  # wrap the calls of a dispatch mode
_CUDA_WARNING = "called a synchronizing CUDA operation"


def syncs(probing: Probing) -> dict[str, Any]:
    """Return where the steps of each rank wait for the device; the first steps may, since they set things up."""
    setup = build(exact_recipe(probing.settings, "auto"), probing.world)
    batches, places = setup.loader.steps(), set[str]()
    for step in range(_WARM_UP + _STEPS):
        micro_batches, lr = next(batches), lr_at(step, setup.lr_plan)
        if step < _WARM_UP:
            train_step(setup, micro_batches, step, lr)
        else:
            with finding_waits(probing.world.device, places):
                train_step(setup, micro_batches, step, lr)
    return {"per_rank": probing.world.all_gather_object(sorted(places)), "steps": _STEPS}


@contextmanager
def finding_waits(device: torch.device, places: set[str]) -> Iterator[None]:
    """Add the lines of code that read a value of a tensor; on CPUs too, where nothing waits.

    On GPUs, also add those that CUDA reports. It only warns: an error on one rank would leave the others waiting.
    """

    def on_read(what: str) -> None:
        if not _reads_own_numbers(stack := _stack()):
            places.add(f"{what} in {_line(stack)}")

    def on_warning(message: Any, *_: Any, **__: Any) -> None:
        if _CUDA_WARNING in str(message):  # CUDA waits, whoever asked for it: autograd and optimizers too
            places.add(f"synchronization in {_line(_stack())}")

    with operators.HostReads(on_read), warnings.catch_warnings():
        if device.type == "cuda":
            warnings.simplefilter("always")
            warnings.showwarning = on_warning
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def _stack() -> list[traceback.FrameSummary]:
    """Return the calls that led here. On autograd's threads for GPUs there are none: they run no Python."""
    return [frame for frame in traceback.extract_stack() if not _observes(frame)]


def _observes(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to the observation itself."""
    return frame.filename.startswith((__file__, operators.__file__, warnings.__file__, _COMPILE, _DYNAMO))


def _reads_own_numbers(stack: Sequence[traceback.FrameSummary]) -> bool:
    """Return whether torch reads numbers that are on the CPU on every device.

    Optimizers keep their step count there, and DDP's reducer its factor. CUDA reports what else they wait for.
    """
    from_autograd = not stack or stack[-1].filename == _AUTOGRAD
    return from_autograd or any(frame.filename.startswith(_OPTIM) for frame in stack)


def _line(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line that is not torch's."""
    frame = next((frame for frame in reversed(stack) if not frame.filename.startswith(_TORCH)), None)
    return f"{frame.name} ({frame.filename}:{frame.lineno})" if frame else "a thread of torch"
