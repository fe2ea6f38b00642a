"""Gradients in shared memory, on a single rank (CPU, fp32): what does not depend on other ranks."""

import pytest
import torch
from torch import nn

from paceline.distributed.grad_sync import SharedMemory
from paceline.distributed.world import World


def _step(sync: SharedMemory, *losses: torch.Tensor) -> None:
    for loss in losses[:-1]:
        loss.backward()
    with sync.synchronizing():
        losses[-1].backward()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.bfloat16, 0.01)])
def test_gradients_are_those_of_all_micro_batches(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    images = torch.randn(2, 5, 3, 8, 8)
    sum(model(part).square().mean() for part in images).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    sync = SharedMemory(World(), dtype, model.parameters())
    for _ in range(2):  # nothing is left from the step before
        model.zero_grad()
        _step(sync, *(model(part).square().mean() for part in images))
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad.dtype == torch.float32
            assert torch.allclose(parameter.grad, gradient, rtol=tolerance or 1e-6, atol=tolerance)
        assert model.weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_parameters_without_a_gradient_keep_none() -> None:
    """Also those that only an earlier micro-batch used have one."""
    layers = nn.ModuleList([nn.Linear(3, 1, bias=False) for _ in range(3)])
    layers[2].weight.requires_grad_(False)
    sync = SharedMemory(World(), torch.float32, layers.parameters())
    ones = torch.ones(3)
    _step(sync, layers[0](ones).sum())
    assert torch.equal(layers[0].weight.grad, torch.ones(1, 3))
    assert layers[1].weight.grad is None
    layers.zero_grad()
    _step(sync, layers[1](2 * ones).sum(), layers[0](ones).sum())
    assert torch.equal(layers[0].weight.grad, torch.ones(1, 3))
    assert torch.equal(layers[1].weight.grad, torch.full((1, 3), 2.0))
    assert layers[2].weight.grad is None


def test_the_time_of_synchronization_is_taken_once() -> None:
    layer = nn.Linear(3, 1)
    sync = SharedMemory(World(), torch.float32, layer.parameters())
    _step(sync, layer(torch.ones(3)).sum())
    assert sync.seconds_since_last()() > 0
    assert sync.seconds_since_last()() == 0
