"""The private names of torch and torchvision that Paceline uses, each with the reason why no public one will do.

tests/unit/test_torch_internals.py checks them on the installed torch; pyproject.toml allows only versions it passes on.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d


def restart_group_names() -> None:
    """Give the next process group the name of the first one, which must be the same on all ranks.

    torch ignores `group_name` of init_process_group and counts groups, even those that could not be initialized.
    """
    distributed_c10d._world.group_count = 0


def abort_groups() -> None:
    """Abort the communication of all process groups, and forget them.

    The public ProcessGroup.abort aborts one group; NCCL's communicators can deadlock unless they are aborted together.
    """
    distributed_c10d._abort_process_group()


def flight_records(collectives: bool) -> dict[str, dict[str, Any]]:
    """Return torch's flight recorder per library, "gloo" and "nccl": the progress of groups, and recent collectives.

    The public ways to read it write pickles, which run code when loaded, or need a debug server.
    """
    dumps = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}  # the latter only in builds with NCCL
    found = {name: getattr(_distributed_c10d, dump, None) for name, dump in dumps.items()}
    return {
        name: json.loads(dump(includeCollectives=collectives, onlyActive=False)) for name, dump in found.items() if dump
    }


def copy_all_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors in place. torch has no public function that copies a list without a kernel launch per tensor."""
    if targets:
        torch._foreach_copy_(targets, sources)


def augmentation_op(image: Any, name: str, magnitude: float, interpolation: str) -> Any:
    """Return the image, a PIL image or a tensor, after one operation of torchvision's RandAugment or TrivialAugment,
    whose public classes draw it at random."""
    from torchvision.transforms.autoaugment import _apply_op
    from torchvision.transforms.functional import InterpolationMode

    return _apply_op(image, name, magnitude, InterpolationMode(interpolation), None)


def augmentation_space(policy: str, height: int, width: int) -> dict[str, tuple[list[float], bool]]:
    """Return the operations of torchvision's RandAugment or TrivialAugment: their magnitudes at the 31 levels (one if
    it does not matter), and whether the sign is random. Only the classes that draw at random know them publicly."""
    from torchvision.transforms.autoaugment import RandAugment, TrivialAugmentWide

    levels = 31
    if policy == "trivialaugment":
        space = TrivialAugmentWide()._augmentation_space(levels)
    else:
        space = RandAugment()._augmentation_space(levels, (height, width))
    return {name: (magnitudes.reshape(-1).tolist(), signed) for name, (magnitudes, signed) in space.items()}


def expensive_operators() -> list[Any]:
    """Return the operators that take most of a step. Those of attention have only private names."""
    aten = torch.ops.aten
    attention = ("flash", "flash_attention_for_cpu", "efficient", "cudnn", "fused_attention_overrideable")
    names = [f"_scaled_dot_product_{kind}" + ("" if "attention" in kind else "_attention") for kind in attention]
    products = [aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution]
    return [operator.default for operator in products + [getattr(aten, name) for name in names]]


def on_compilation(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call functions before and after torch.compile compiles something, also in a backward pass.

    Only private counters show this otherwise, and they do not hold the time of a run.
    """
    from torch._dynamo import callback  # late, because it takes seconds

    callback.on_compile_start(start)
    callback.on_compile_end(end)


def record_memory(on: bool) -> None:
    """Record every allocation on the GPU, with its stack, or stop. torch documents it under private names only."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def write_memory_snapshot(path: Path) -> None:
    """Write the recorded allocations, which https://pytorch.org/memory_viz shows."""
    torch.cuda.memory._dump_snapshot(str(path))
