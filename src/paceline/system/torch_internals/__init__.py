"""The private names of torch and torchvision that Paceline uses, each with the reason why no public one will do.

tests/unit/test_torch_internals.py checks them on the installed torch; pyproject.toml allows only versions it passes on.
"""

import torch
from torch.distributed import distributed_c10d


def restart_group_names() -> None:
    """Give the next process group the name of the first one, which must be the same on all ranks.

    torch ignores `group_name` of init_process_group and counts groups, even those that could not be initialized.
    """
    distributed_c10d._world.group_count = 0


def copy_all_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors in place. torch has no public function that copies a list without a kernel launch per tensor."""
    if targets:
        torch._foreach_copy_(targets, sources)


def augmentation_op(image: torch.Tensor, name: str, magnitude: float) -> torch.Tensor:
    """Return the image after one operation of torchvision's RandAugment, whose public classes draw both at random."""
    from torchvision.transforms.autoaugment import _apply_op
    from torchvision.transforms.functional import InterpolationMode

    changed: torch.Tensor = _apply_op(image, name, magnitude, InterpolationMode.NEAREST, None)
    return changed
