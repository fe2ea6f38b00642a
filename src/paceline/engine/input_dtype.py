"""Chooses the data type of the images that a model is given."""

import torch
from torch import nn

from paceline.engine import precision
from paceline.errors import USER_CODE_ERRORS


def input_dtype(
    model: nn.Module, resolved: str, device: torch.device, channels: int, size: tuple[int, int]
) -> torch.dtype:
    """Return autocast's data type if the model casts its input to it anyway, else float32.

    Most models begin with a convolution or a matrix product, which autocast runs in the lower precision. The logits of
    one image then do not depend on the data type. They do for a model that first computes in float32, such as one that
    normalizes its input.
    """
    if resolved == "fp32":
        return torch.float32
    was_training = model.training
    image = torch.rand(1, channels, *size, generator=torch.Generator().manual_seed(0)).to(device)
    model.eval()
    try:
        with torch.no_grad(), precision.autocast(resolved, device):
            dtype = torch.get_autocast_dtype(device.type)
            logits, lower = model(image), model(image.to(dtype))
    except USER_CODE_ERRORS:  # the model supports float32 only; if it fails there too, training reports it
        return torch.float32
    finally:
        model.train(was_training)
    return dtype if torch.equal(logits.float(), lower.float()) else torch.float32
