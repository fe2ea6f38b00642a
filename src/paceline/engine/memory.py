"""Turns a lack of memory into an error that names the batch and the fix.

Not a crash: an elastic job would restart its ranks, which would run out of memory again.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.config.batch import layouts
from paceline.config.recipe import Recipe
from paceline.distributed.world import World
from paceline.errors import UserError
from paceline.system.host import host_name
from paceline.track.records import RunFolder

_ON_GPU = re.compile(
    r"(CUDA|HIP) error: out of memory|(cuda|hip) failure.*out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|MPS backend out of memory",
    re.IGNORECASE,
)
_ON_HOST = re.compile(r"can't allocate memory|std::bad_alloc")


def lacking_memory(error: BaseException) -> str:
    """Return which memory was exhausted, "GPU" or "host"; "" for other errors."""
    if not isinstance(error, RuntimeError | MemoryError):
        return ""
    if isinstance(error, torch.OutOfMemoryError) or _ON_GPU.search(str(error)):
        return "GPU"
    return "host" if isinstance(error, MemoryError) or _ON_HOST.search(str(error)) else ""


@contextmanager
def memory_of_training(recipe: Recipe, world: World, folder: RunFolder | None = None) -> Iterator[None]:
    """Raise a UserError if building or training the model exhausts the memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (memory := lacking_memory(error)):
            raise
        batch = max(layout.per_rank_batch for layout in layouts(recipe, world.size).values())
        fix = (
            "`paceline find-batch` finds the largest batch that fits. Lower --train.global_batch, increase "
            "--train.grad_accumulation, or use --model.activation_checkpointing full"
            f"{' or, on several GPUs, --strategy fsdp' if memory == 'GPU' else ''}."
        )
        if folder and any(start.get("ranks", 0) > world.size for start in folder.read_starts()):
            fix += " The run had more ranks before, each with a smaller batch: --min-nodes waits for lost nodes."
        raise _error(error, world, batch, fix) from error


@contextmanager
def memory_of_evaluation(recipe: Recipe, world: World) -> Iterator[None]:
    """Raise a UserError if an evaluation exhausts the memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacking_memory(error):
            raise
        batch = recipe.evaluate.per_rank_batch
        raise _error(error, world, batch, "Lower --evaluate.per_rank_batch.") from error


@contextmanager
def memory_of_prediction(batch: int, world: World) -> Iterator[None]:
    """Raise a UserError if predictions exhaust the memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacking_memory(error):
            raise
        raise _error(error, world, batch, "Lower --batch.") from error


def _error(error: BaseException, world: World, batch: int, fix: str) -> UserError:
    memory = lacking_memory(error)
    code = "gpu-out-of-memory" if memory == "GPU" else "host-out-of-memory"
    # torch's first two sentences say how much it tried to allocate
    lines = str(error).splitlines() or [type(error).__name__]
    reason = ". ".join(lines[0].split(". ")[:2])[:200].rstrip(".")
    return UserError(
        code,
        f"rank {world.rank} on {host_name()} ({world.device}) ran out of {memory} memory with {batch} images per rank "
        f"({reason}). {fix}",
        rank=world.rank,
        device=str(world.device),
        per_rank_batch=batch,
    )
