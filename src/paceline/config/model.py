"""The part of a recipe about the model."""

from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.config.fields import STRICT, Fraction, NotNegative, Patterns

BACKBONE = "backbone"
"""In model.freeze: everything but the classifier."""


@dataclass(frozen=True)
class Model:
    """Architecture and initial weights."""

    __pydantic_config__ = STRICT

    name: str = "resnet18"
    """Any timm model, also as `local-dir:FOLDER` or `hf-hub:USER/MODEL`; `airbench`, a small built-in CIFAR network;
    `ffcv_resnet18` and `ffcv_resnet50`, built-in ResNets with BlurPool; or the name of a registered model."""
    weights: str = "random"
    """`random`, `pretrained` (from the Hugging Face Hub), a .safetensors or .pth file, or a folder with one; a head of
    another size is replaced. Mean, std, size, interpolation and crop_pct are those of the weights, unless the recipe
    sets them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional model arguments, e.g. {img_size: 384}."""
    drop_path: Fraction = 0.0
    """Stochastic depth: rate at which blocks are skipped in training (timm's drop_path_rate); 0: the model's own."""
    freeze: Patterns = ()
    """Weights that are not trained: `backbone` (all but the classifier), or patterns such as [stem.*, stages.0.*] that
    match names of modules or parameters. Batch norm of frozen modules keeps its statistics."""
    head_init_std: NotNegative = 0.0
    """Standard deviation of the weights of a new classifier, with a zero bias; 0: the model's own initialization."""
    sync_batchnorm: bool = False
    """Compute batch norm statistics over all ranks instead of per rank."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Save memory by recomputing activations of repeated blocks in the backward pass. full: all of them; selective: all
    but the results of matrix multiplications, convolutions and attention, which costs less time."""
