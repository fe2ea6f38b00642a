"""Activation checkpointing: the activations of repeated blocks are recomputed in the backward pass, to save memory."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.config.model import Model
from paceline.errors import UserError
from paceline.system.blocks import repeated_blocks
from paceline.system.norms import BATCH_NORMS
from paceline.system.torch_internals import expensive_operators


def checkpoint_activations(model: nn.Module, config: Model) -> None:
    """Recompute the repeated blocks of a model in the backward pass. Names of weights stay the same."""
    kind = config.activation_checkpointing
    if kind == "none":
        return
    blocks = list(repeated_blocks(model))
    if not blocks:
        raise UserError(
            "no-blocks-to-recompute",
            f"model.activation_checkpointing={kind}: model.name={config.name} has no repeated blocks. Set it to none.",
            model=config.name,
        )
    for block in blocks:
        if kind == "selective":
            _compute_out_of_place(block)
        setattr(block, "forward", _recomputed(block, kind == "selective", config.name))  # noqa: B010 (mypy refuses it)


def _recomputed(block: nn.Module, selective: bool, name: str) -> Callable[..., Any]:
    """Return the forward pass of a block that keeps only its inputs, or these and the results of some operators."""
    forward = block.forward
    norms = [module for module in block.modules() if isinstance(module, BATCH_NORMS)]
    contexts = {"context_fn": partial(_contexts, norms, selective, name)} if norms or selective else {}
    # the compiler updates statistics once by itself, and takes only PyTorch's own contexts
    traced = {"context_fn": partial(create_selective_checkpoint_contexts, expensive_operators())} if selective else {}

    @wraps(forward)
    def recomputed(*arguments: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():  # evaluation
            return forward(*arguments, **options)
        more = traced if torch.compiler.is_compiling() else contexts
        return checkpoint(forward, *arguments, use_reentrant=False, **more, **options)

    return recomputed


def _contexts(
    norms: list[Any], selective: bool, name: str
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward pass and of its recomputation."""
    if not selective:
        return nullcontext(), _without_statistics(norms)
    first, again = create_selective_checkpoint_contexts(expensive_operators())
    return first, _reusing(again, norms, name)


@contextmanager
def _without_statistics(norms: list[Any]) -> Iterator[None]:
    """Keep the running statistics of batch norm, which the first forward pass has updated already."""
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, (_, count) in zip(norms, kept, strict=True):
        # statistics without momentum do not move; without statistics the backward pass would miss them
        norm.momentum, norm.num_batches_tracked = 0.0, count if count is None else count.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


@contextmanager
def _reusing(kept: AbstractContextManager[Any], norms: list[Any], name: str) -> Iterator[None]:
    """Use results that were kept. A model may have overwritten them, which PyTorch notices."""
    try:
        with _without_statistics(norms), kept:
            yield
    except RuntimeError as error:
        if "mutated" not in str(error):
            raise
        raise UserError(
            "selective-checkpointing-unsupported",
            f"model.name={name} changes in place what selective checkpointing keeps. Use "
            "model.activation_checkpointing=full.",
            model=name,
        ) from None


def _compute_out_of_place(block: nn.Module) -> None:
    """Turn off in-place activations, which would overwrite results that are kept."""
    for module in block.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010 (mypy refuses the assignment)
