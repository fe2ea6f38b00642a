"""Creates the model of a recipe and tests it, and names a registered model in the errors of its forward pass."""

import bdb
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import DistError

from paceline import extensions
from paceline.config.model import Model
from paceline.distributed.process_group import is_lost_connection
from paceline.engine.memory import lacking_memory
from paceline.errors import USER_CODE_ERRORS, UserError, raised
from paceline.models import factory


def create_model(config: Model, seed: int, num_classes: int, channels: int) -> nn.Module:
    """Return the model with the same initial values everywhere, also of buffers that checkpoints do not hold."""
    torch.manual_seed(seed)
    return factory.create(config, num_classes, channels)


def _fix(model: nn.Module, size: tuple[int, int]) -> str:
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)  # of a ViT
    if not fixed or tuple(fixed) == size:
        return "Set data.size, or choose another model."
    return f"Set data.size to {fixed[0]}, or build the model for it: --model.options '{{img_size: {size[0]}}}'."


def probe(model: nn.Module, name: str, num_classes: int, channels: int, size: tuple[int, int]) -> None:
    """Test the model on one image, which also initializes lazy modules. `size` is height and width."""
    what = f"{size[0]}x{size[1]} images with {channels} channels"
    try:
        with torch.no_grad(), naming_model(name, f"for {what}"):
            logits = model.eval()(torch.zeros(1, channels, *size))
    except (RuntimeError, AssertionError, ValueError) as error:
        raise UserError(
            "model-input-unsupported",
            f"model.name={name} does not support {what} ({' '.join(str(error).split())[:160]}). {_fix(model, size)}",
            model=name,
            size=size,
            channels=channels,
        ) from None
    check_logits(logits, name, (1, num_classes))
    if found := [key for key, tensor in model.state_dict().items() if tensor.is_complex()]:
        message = f"model.name={name}: {found[0]} is complex. Store it as real numbers (torch.view_as_real)."
        raise UserError("complex-model-unsupported", message, model=name, tensors=found)
    if found := [key for key, module in model.named_modules() if getattr(module, "sparse", False) is True]:
        message = f"model.name={name}: {found[0]} has sparse gradients, which ranks cannot average. Use sparse=False."
        raise UserError("sparse-gradients-unsupported", message, model=name, modules=found)


def check_logits(logits: object, name: str, expected: tuple[int, int]) -> None:
    """Refuse outputs that are not logits of this shape."""
    if isinstance(logits, torch.Tensor) and logits.shape == expected:
        return
    found = f"shape {tuple(logits.shape)}" if isinstance(logits, torch.Tensor) else f"a {type(logits).__name__}"
    problem = f"returns {found} instead of logits of shape {expected}, (images, classes)"
    if registered := extensions.find("model", name):
        raise registered.error(f"creates a model that {problem}, in training and in evaluation mode alike")
    message = f"model.name={name} {problem}. Choose a classifier."
    raise UserError("model-output-unsupported", message, model=name)


@contextmanager
def naming_model(name: str, when: str = "") -> Iterator[None]:
    """Turn an exception in the forward pass of a registered model into an error that names it."""
    registered = extensions.find("model", name)
    try:
        yield
    except (UserError, bdb.BdbQuit, DistError):
        raise
    except USER_CODE_ERRORS as error:
        if registered is None or is_lost_connection(error) or lacking_memory(error):
            raise
        raise registered.error(f"creates a model that {raised(error, 'its forward pass')} {when}".rstrip()) from error
