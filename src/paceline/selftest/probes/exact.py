"""Kernels that compute the same values in every run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def exact_kernels() -> Iterator[None]:
    """Use deterministic kernels without TF32, whatever training chooses: it prefers the fastest ones, which may differ.

    Only comparisons need this; a run in which GPUs add in another order is not wrong.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    flags = {
        torch.backends.cudnn: {"benchmark": False, "allow_tf32": False},
        torch.backends.cuda.matmul: {"allow_tf32": False},
    }
    before = {owner: {name: getattr(owner, name) for name in values} for owner, values in flags.items()}

    def apply(wanted: dict[object, dict[str, bool]]) -> None:
        for owner, values in wanted.items():
            for name, value in values.items():
                setattr(owner, name, value)

    hook = register_module_forward_pre_hook(lambda *_: apply(flags))  # after training has made its choice
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        hook.remove()
        apply(before)
