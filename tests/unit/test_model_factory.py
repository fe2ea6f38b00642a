from pathlib import Path

import pytest
import torch
from conftest import raises
from safetensors.torch import save_file
from torch import nn

from paceline.config.model import Model
from paceline.distributed.world import World
from paceline.engine.precision import resolve
from paceline.models import hub
from paceline.models.airbench import AirbenchNet
from paceline.models.factory import create
from paceline.system.logs import log
from paceline.system.torchvision_compat import allow_torchvision

SMALL = {"widths": [8, 16]}


def test_timm_model_gets_head_and_channels_of_the_data() -> None:
    model = create(Model(name="test_resnet"), num_classes=7, channels=1)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_unknown_models_and_options_are_named() -> None:
    with raises("unknown-model") as caught:
        create(Model(name="resnet81"), 10, 3)
    assert "model.name='resnet81'" in str(caught.value)
    assert "resnet18" in caught.value.fields["close"]
    with raises("invalid-model-options") as caught:
        create(Model(name="airbench", options={"widhts": 3}), 10, 3)
    assert "model.options={'widhts': 3}" in str(caught.value)
    with raises("no-pretrained-weights") as caught:
        create(Model(name="airbench", weights="pretrained"), 10, 3)
    assert "model.weights=pretrained" in str(caught.value)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_from_a_file(tmp_path: Path, suffix: str) -> None:
    donor = create(Model(name="airbench", options=SMALL), 10, 3)
    path = tmp_path / f"weights.{suffix}"
    save_file(donor.state_dict(), path) if suffix == "safetensors" else torch.save(
        {"state_dict": donor.state_dict()}, path
    )
    same = create(Model(name="airbench", weights=str(path), options=SMALL), 10, 3)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(same.parameters(), donor.parameters(), strict=True))
    other_head = create(Model(name="airbench", weights=str(path), options=SMALL), 7, 3)
    assert other_head.head.weight.shape[0] == 7
    assert torch.equal(other_head.blocks[0].convs[0].weight, donor.blocks[0].convs[0].weight)
    with raises("weights-model-mismatch"):
        create(Model(name="airbench", weights=str(path), options={"widths": [8, 24]}), 10, 3)
    with raises("weights-model-mismatch"):
        create(Model(name="test_resnet", weights=str(path)), 10, 3)


def test_weights_files_that_cannot_be_read_or_would_run_code(tmp_path: Path) -> None:
    with raises("weights-not-found") as caught:
        create(Model(name="airbench", weights=str(tmp_path / "none.pth")), 10, 3)
    assert caught.value.fields == {"path": tmp_path / "none.pth"}
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"garbage")
    with raises("weights-unreadable") as caught:
        create(Model(name="airbench", weights=str(garbage)), 10, 3)
    assert caught.value.fields == {"path": garbage}

    torch.save([torch.ones(2)], tmp_path / "list.pth")
    with raises("weights-not-a-state-dict"):
        create(Model(name="airbench", weights=str(tmp_path / "list.pth")), 10, 3)

    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "owned").touch, ())

    torch.save({"state_dict": Trap()}, tmp_path / "trap.pth")
    with raises("weights-unreadable") as caught:
        create(Model(name="airbench", weights=str(tmp_path / "trap.pth")), 10, 3)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "owned").exists()


def test_weights_of_a_run_must_be_exported(tmp_path: Path) -> None:
    """A checkpoint folder has trained weights and their moving average; which of them is meant must be said."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    save_file(create(Model(name="airbench"), 10, 3).state_dict(), checkpoint / "model.safetensors")
    (checkpoint / "COMMIT").touch()
    for path in (tmp_path / "run", checkpoint):
        with raises("run-instead-of-weights") as caught:
            create(Model(name="airbench", weights=str(path)), 10, 3)
        assert "paceline export" in str(caught.value)
    create(Model(name="airbench", weights=str(checkpoint / "model.safetensors")), 10, 3)
    (checkpoint / "model.safetensors").rename(tmp_path / "run" / "model.safetensors")  # as if it was exported
    create(Model(name="airbench", weights=str(tmp_path / "run")), 10, 3)


def test_first_layer_whitens_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator).cumsum(-1).cumsum(-2)  # neighboring pixels are correlated
    net = AirbenchNet(widths=(8, 16))
    net.prepare(images)
    answers = net.whiten(images).permute(0, 2, 3, 1).reshape(-1, 24)[:, :12]
    covariance = answers.T @ answers / len(answers)
    assert torch.allclose(covariance, torch.eye(12), atol=5e-3)
    assert not net.whiten.weight.requires_grad


def test_pretrained_weights_get_a_new_head_for_other_classes(tmp_path: Path, caplog) -> None:
    allow_torchvision()
    import timm

    donor = timm.create_model("test_resnet", num_classes=10)
    timm.models.save_for_hf(donor, tmp_path)
    with caplog.at_level("INFO", logger=log.name):
        model = create(Model(name=f"local-dir:{tmp_path}", weights="pretrained"), num_classes=7, channels=3)
    assert torch.equal(model.conv1[0].weight, donor.conv1[0].weight)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert "the head is initialized because it has 10 classes and the data has 7" in caplog.text


def test_both_heads_of_a_distilled_model_are_initialized() -> None:
    options = {"img_size": 32, "depth": 1}
    model = create(Model(name="deit_tiny_distilled_patch16_224", options=options, head_init_std=3.0), 100, 3)
    for head in (model.head, model.head_dist):
        assert head.weight.std().item() == pytest.approx(3, rel=0.05)
        assert not head.bias.any()


def test_pretrained_weights_without_access_to_the_hub(monkeypatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    def unresolved(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(hub.socket, "getaddrinfo", unresolved)
    monkeypatch.setattr(hub.urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with raises("pretrained-weights-unavailable") as caught:
        create(Model(name="test_resnet", weights="pretrained"), 10, 3)
    assert caught.value.fields == {"model": "test_resnet", "reason": "unreachable"}
    assert "hf download timm/test_resnet.r160_in1k --local-dir DIR" in str(caught.value)


def test_precision_that_the_device_does_not_support(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with raises("precision-unsupported") as caught:
        resolve("bf16", World(device=torch.device("cuda")))
    assert caught.value.fields == {"precision": "bf16", "device": "Old GPU", "ranks": [0]}
    assert resolve("auto", World(device=torch.device("cuda"))) == "fp16"
    with caplog.at_level("WARNING", logger=log.name):
        assert resolve("bf16", World()) == "bf16"
    assert "only emulates bf16" in caplog.text


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_ffcv_resnets_are_those_of_torchvision_with_blurred_inputs(name: str) -> None:
    """apply_blurpool of ffcv-imagenet replaces strided convolutions with 16 or more input channels."""
    allow_torchvision()
    import torchvision

    class Blurred(nn.Module):
        def __init__(self, conv: nn.Conv2d):
            super().__init__()
            self.conv, self.filter = conv, torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            blur = self.filter.repeat(x.shape[1], 1, 1, 1)
            return self.conv(nn.functional.conv2d(x, blur, padding=1, groups=x.shape[1]))

    ours = create(Model(name=f"ffcv_{name}"), 7, 3).eval()
    assert not any((module.weight == 0).all() for module in ours.modules() if isinstance(module, nn.BatchNorm2d))
    theirs = getattr(torchvision.models, name)(num_classes=7).eval()
    theirs.load_state_dict(ours.state_dict())
    blurred = [path for path, module in theirs.named_modules() if getattr(module, "stride", 1) == (2, 2)][1:]
    for path in blurred:  # all but the first layer, which has 3 channels
        parent, _, child = path.rpartition(".")
        setattr(theirs.get_submodule(parent), child, Blurred(theirs.get_submodule(path)))
    images = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(images), theirs(images))
    assert len(blurred) == 6
