"""Chooses the data type of the images that a model is given."""

import torch
from torch import nn

from paceline.distributed.world import World
from paceline.engine import precision
from paceline.errors import USER_CODE_ERRORS


def input_dtype(model: nn.Module, resolved: str, channels: int, size: tuple[int, int], world: World) -> torch.dtype:
    """Return autocast's data type if the model casts its input to it anyway, else float32.

    Most models begin with a convolution or a matrix multiplication, which autocast runs in the lower precision. The
    logits of one image then do not depend on the data type. They do for a model that first computes in float32, such as
    one that normalizes its input. Rank 0 decides, because the model of other ranks may be without memory.
    """
    if resolved == "fp32":
        return torch.float32
    casts = world.on_rank_zero(lambda: _casts_input(model, resolved, channels, size))
    return precision.DTYPES[resolved] if casts else torch.float32


def _casts_input(model: nn.Module, resolved: str, channels: int, size: tuple[int, int]) -> bool:
    device = next(model.parameters()).device  # under FSDP, the model is not yet on the device of its rank
    was_training = model.training
    image = torch.rand(1, channels, *size, generator=torch.Generator().manual_seed(0)).to(device)
    model.eval()
    try:
        with torch.no_grad(), precision.autocast(resolved, device):
            logits, lower = model(image), model(image.to(precision.DTYPES[resolved]))
    except USER_CODE_ERRORS:  # the model supports float32 only; if it fails there too, training reports it
        return False
    finally:
        model.train(was_training)
    return torch.equal(logits.float(), lower.float())
