"""Chooses the kernels of a GPU: TF32 for fp32 operations, and the fastest convolutions for fixed shapes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def choose_kernels(device: torch.device, tf32: bool) -> None:
    """Choose kernels for training, in which few shapes are used often. CPUs have nothing to choose."""
    if device.type == "cuda":
        # not torch.backends.fp32_precision, after which other parts of torch cannot read these flags any more
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True


@contextmanager
def any_shape(compiled: bool = False) -> Iterator[None]:
    """Context for evaluation, in which shapes may differ from batch to batch: nothing is tried or compiled for them."""
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        if compiled:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
