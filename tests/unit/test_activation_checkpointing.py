"""Recomputed activations: the same training with less memory. On the CPU, fp32, one thread."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, raises
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.config.model import Model
from paceline.models.activation_checkpointing import checkpoint_activations
from paceline.system.torchvision_compat import allow_torchvision
from paceline.track.records import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("none", "full", "selective")


class Block(nn.Module):
    """Batch norm, dropout, an in-place activation directly after a convolution, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.act, self.drop = nn.Conv2d(8, 8, 1), nn.SiLU(inplace=True), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.act(self.second(torch.tanh(self.norm(self.first(x))))))


class Overwriting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.first(x).mul_(2).tanh()


def network(kind: str, block: type[nn.Module] = Block) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sequential(block(), block()), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, 3, 8, 8))
    checkpoint_activations(model, Model(name="any", activation_checkpointing=kind))
    return model


def trained(model: nn.Module, size: int = 8) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of some steps and the state after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        loss = nn.functional.cross_entropy(model(torch.randn(4, 3, size, size)), torch.tensor([0, 1, 2, 0]))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_losses_weights_and_batch_norm_statistics_are_the_same(kind: str) -> None:
    """Bit for bit: dropout repeats its random numbers, and running statistics are updated once per step."""
    (plain, before), (recomputed, after) = trained(network("none")), trained(network(kind))
    assert recomputed == plain
    assert list(after) == list(before)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert after["1.0.norm.num_batches_tracked"] == 5


@pytest.mark.parametrize("kind", KINDS[1:])
def test_transformers_of_timm_are_trained_the_same_way(kind: str) -> None:
    allow_torchvision()
    import timm

    results = []
    for chosen in ("none", kind):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=3, img_size=32, drop_path_rate=0.2, proj_drop_rate=0.1)
        checkpoint_activations(model, Model(name="test_vit", activation_checkpointing=chosen))
        results.append(trained(model, 32))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][key], results[1][1][key]) for key in results[0][1])


class Allocations(TorchDispatchMode):
    """The storages of all results, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor):
                self.sizes[StorageWeakRef(result.untyped_storage())] = result.untyped_storage().nbytes()
        return results

    def alive(self) -> int:
        return sum(size for storage, size in self.sizes.items() if not storage.expired())


def test_less_memory_is_held_between_forward_and_backward() -> None:
    held = {}
    for kind in KINDS:
        model, images = network(kind), torch.randn(4, 3, 8, 8)
        with Allocations() as allocations:
            loss = model(images).sum()
            held[kind] = allocations.alive()
            loss.backward()
    assert held["full"] < held["selective"] < held["none"]


def test_only_selective_keeps_the_results_of_convolutions() -> None:
    called: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called[kind] = called.get(kind, 0) + (func is torch.ops.aten.convolution.default)
            return func(*args, **(kwargs or {}))

    for kind in KINDS:
        model = network(kind)
        with Count():
            model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert called == {"none": 5, "full": 9, "selective": 5}


def test_evaluation_is_not_recomputed() -> None:
    model = network("full").eval()
    images = torch.randn(4, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(images), network("none").eval()(images))


def test_models_that_cannot_be_recomputed_are_refused() -> None:
    with raises("no-blocks-to-recompute"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2)), Model(name="any", activation_checkpointing="full"))
    model = network("selective", Overwriting)
    with raises("selective-checkpointing-unsupported") as caught:
        model(torch.randn(4, 3, 8, 8)).sum().backward()
    assert caught.value.fields == {"model": "any"}
    network("full", Overwriting)(torch.randn(4, 3, 8, 8)).sum().backward()


def test_a_run_is_resumed_with_and_without_it(here, tmp_path: Path) -> None:
    words = (*TINY, "--precision", "fp32", "--device", "cpu", "--evaluate.every", "10ba")
    words += ("--optim.schedule", "{name: constant, warmup: 0ep}")
    assert here("train", "digits", *words, "--name", "plain", "--train.duration", "20ba").returncode == 0
    assert here("train", "digits", *words, "--name", "changed", "--train.duration", "10ba").returncode == 0
    resumed = here(
        *("train", "--resume", "runs/changed", "--train.duration", "20ba", "--model.activation_checkpointing", "full")
    )
    assert resumed.returncode == 0, resumed.stderr
    plain, changed = (
        [record["loss"] for record in RunFolder(tmp_path / "runs" / name).records() if record["kind"] == "train"]
        for name in ("plain", "changed")
    )
    assert len(plain) == 20
    assert plain == changed
