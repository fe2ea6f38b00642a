"""Chooses the data type of the images that a model is given."""

import torch
from torch import nn

from paceline.distributed.world import World
from paceline.engine import precision
from paceline.errors import USER_CODE_ERRORS
from paceline.system.torch_internals.operators import OnlyCasts


def input_dtype(model: nn.Module, resolved: str, channels: int, size: tuple[int, int], world: World) -> torch.dtype:
    """Return autocast's data type if the model casts its input to it anyway, else float32.

    Most models begin with a convolution or a matrix multiplication, which autocast runs in the lower precision, so that
    logits do not depend on the data type. They do for a model that first computes in float32, such as one that
    normalizes its input. Rank 0 decides, because the model of other ranks may be without memory.
    """
    if resolved == "fp32":
        return torch.float32
    dtype = precision.DTYPES[resolved]
    return dtype if world.on_rank_zero(lambda: _casts_input(model, resolved, dtype, channels, size)) else torch.float32


def _casts_input(model: nn.Module, resolved: str, dtype: torch.dtype, channels: int, size: tuple[int, int]) -> bool:
    device = next(model.parameters()).device  # under FSDP, the model is not yet on the device of its rank
    was_training = model.training
    image = torch.rand(1, channels, *size, generator=torch.Generator().manual_seed(0)).to(device)
    model.eval()
    try:
        with torch.no_grad(), precision.autocast(resolved, device):
            with OnlyCasts(image, dtype) as casts:
                logits = model(image)
            lower = model(image.to(dtype))  # a model may refuse it, or treat it differently
    except USER_CODE_ERRORS:  # the model supports float32 only; if it fails there too, training reports it
        return False
    finally:
        model.train(was_training)
    # equal logits alone could be due to rounding
    return casts.holds and torch.equal(logits.float(), lower.float())
