"""Nothing in a step makes the host wait for a GPU, which is pretended on the CPU (one thread).

Logging, evaluation and checkpoints may wait. Everything else of the training loop may not: input, forward and backward,
loss scaling, clipping, optimizer, EMA, and the agreement of all ranks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from collectives import mark_parts, pretend_in_sessions
from pretended_device import CUDA, PretendedDevice, Wait
from sample_images import tree

from paceline.config.io import load_recipe
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.distributed.world import World
from paceline.engine.objective import Objective
from paceline.engine.session import train_recipe
from paceline.track.records import RunFolder

SYNTHETIC = ("--data.name", "synthetic", "--data.synthetic", "{train_samples: 64, val_samples: 20, size: 16}")
FP32, FP16 = ("--precision", "fp32"), ("--precision", "fp16")
Train = Callable[..., list[Wait]]


@pytest.fixture
def waits(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Train:
    """Train on the pretended device, and return the waits of the training loop."""

    def run(*words: object, ranks: int = 1) -> list[Wait]:
        model = ("--model", "null", "--model.name", "airbench", "--model.options", "{widths: [8, 16]}")
        overrides = (*SYNTHETIC, *model, "--data.size", 0, "--train.global_batch", 16, "--train.duration", "4ba")
        overrides += ("--log.every", "2ba", "--log.tensorboard", "false", "--evaluate.every", "2ba")
        recipe = load_recipe("cifar10-resnet18", [str(word) for word in (*overrides, *words)])
        pretend_in_sessions(World(size=ranks, device=CUDA), monkeypatch)
        device = PretendedDevice()
        mark_parts(monkeypatch, device)
        with device(monkeypatch):
            path = train_recipe(recipe, tmp_path_factory.mktemp("runs"), "run")
        assert RunFolder(path).read_summary()["status"] == "finished"
        assert device.setup
        assert all(parameter in device.on_device for parameter in device.setup.replica.module.parameters())
        assert {wait.part for wait in device.waits} >= {"log", "evaluation", "checkpoint"}
        return [wait for wait in device.waits if wait.part == "loop" or wait.part.startswith("step")]

    return run


@pytest.mark.parametrize(
    "words",
    [
        (*FP32, "--optim.clip_grad_norm", 1, "--ema.decay", 0.9),
        (*FP32, "--optim.name", "adamw", "--train.grad_accumulation", 2, "--train.mixup", 0.2, "--train.cutmix", 1),
        (*FP32, "--optim.name", "lamb", "--data.augment", "{cutout: 4, random_erasing: 0.5, translate: 2}"),
        (*FP32, "--data.augment", "{random_erasing: 0.5, random_erasing_mode: pixel}"),
        (*FP16, "--optim.clip_grad_norm", 1, "--train.label_smoothing", 0.1),
        (*FP16, "--optim.name", "adamw", "--train.loss", "bce", "--train.bce_target_threshold", 0.2),
    ],
    ids=["clip and EMA", "accumulation and mixup", "augmentation", "noise", "fp16", "fp16 and AdamW"],
)
def test_no_step_waits_for_the_device(waits: Train, words: tuple[object, ...]) -> None:
    assert waits(*words) == []


@pytest.mark.parametrize(
    "words",
    [
        (*FP32, "--grad_sync.dtype", "bf16"),
        (*FP16, "--grad_sync", "{powersgd_rank: 1, powersgd_start_step: 2, bucket_mb: 0.004}"),
    ],
    ids=["all-reduce", "PowerSGD"],
)
def test_no_gradient_synchronization_waits_for_the_device(waits: Train, words: tuple[object, ...]) -> None:
    assert waits(*words, ranks=2) == []


def test_no_step_waits_for_decoded_images(waits: Train, tmp_path: Path) -> None:
    prepare(source(tree(tmp_path / "in", images=9), "folder"), tmp_path / "out", [Variant()], 2)
    words = ("--data.name", "shards", "--data.synthetic", "null", "--data.path", tmp_path / "out", "--data.size", 16)
    assert waits(*FP32, *words, "--data.augment", "{cutout: 4, translate: 0}") == []


INJECTED: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda logits: logits.sum().item(),
    "bool": lambda logits: bool(logits.isfinite().all()),
    "cpu": lambda logits: logits.cpu(),
    "tolist": lambda logits: logits.tolist(),
    "boolean index": lambda logits: logits[logits > 0],
    "nonzero": lambda logits: (logits > 0).nonzero(),
    "pageable copy": lambda logits: torch.zeros(8).to(logits.device, non_blocking=True),
    "blocking copy": lambda logits: torch.zeros(8).pin_memory().to(logits.device),
    "copy in place": lambda logits: torch.zeros_like(logits).copy_(torch.zeros(logits.shape)),
    "torch.tensor": lambda logits: torch.tensor([1.0], device=logits.device),
    "synchronize": lambda _: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_wait_is_found(waits: Train, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    loss = Objective.loss

    def waiting(self: Objective, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        INJECTED[name](logits)
        return loss(self, logits, targets)

    monkeypatch.setattr(Objective, "loss", waiting)
    assert {wait.part for wait in waits(*FP32)} >= {f"step {step}" for step in range(4)}


def test_no_operator_mixes_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PretendedDevice()
    with device(monkeypatch):
        here, there = torch.ones(3), torch.ones(3, device=CUDA)
        assert (here.device.type, there.device.type) == ("cpu", "cuda")
        assert (there + 1).sum().device == CUDA
        with pytest.raises(RuntimeError, match="on the host and on the device"):
            here + there
