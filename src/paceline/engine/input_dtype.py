"""Chooses the data type of the images that a model is given."""

import torch
from torch import nn

from paceline.engine import precision


def input_dtype(
    model: nn.Module, resolved: str, device: torch.device, channels: int, size: tuple[int, int]
) -> torch.dtype:
    """Return autocast's data type if the model casts its input to it anyway, else float32.

    Most models begin with a convolution or a matrix product, which autocast runs in the lower precision. The logits of
    one image then do not depend on the data type. They do for a model that first computes in float32, such as one that
    normalizes its input.
    """
    dtype, was_training = precision.DTYPES[resolved], model.training
    if dtype == torch.float32:
        return dtype
    image = torch.rand(1, channels, *size, generator=torch.Generator().manual_seed(0)).to(device)
    model.eval()
    try:
        with torch.no_grad(), precision.autocast(resolved, device):
            logits, lower = model(image), model(image.to(dtype))
    except (RuntimeError, TypeError, ValueError):  # of an operator that has no kernel for the lower precision
        return torch.float32
    finally:
        model.train(was_training)
    return dtype if torch.equal(logits.float(), lower.float()) else torch.float32
