from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.config.recipe import Model
from paceline.engine.precision import resolve
from paceline.errors import UserError
from paceline.models import factory
from paceline.models.airbench import AirbenchNet
from paceline.models.factory import create
from paceline.system.logs import log
from paceline.system.torchvision_compat import allow_torchvision

SMALL = {"widths": [8, 16]}


def test_a_timm_model_takes_its_head_and_channels_from_the_data() -> None:
    model = create(Model(name="test_resnet"), num_classes=7, channels=1)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 7)


def test_unknown_models_and_options_are_named() -> None:
    with pytest.raises(UserError, match=r"model.name='resnet81' is no timm model; did you mean"):
        create(Model(name="resnet81"), 10, 3)
    with pytest.raises(UserError, match=r"model.options=\{'widhts': 3\} do not fit airbench"):
        create(Model(name="airbench", options={"widhts": 3}), 10, 3)
    with pytest.raises(UserError, match="airbench has no published weights"):
        create(Model(name="airbench", weights="pretrained"), 10, 3)


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
    with pytest.raises(UserError, match="weights of another model"):
        create(Model(name="airbench", weights=str(path), options={"widths": [8, 24]}), 10, 3)
    with pytest.raises(UserError, match="weights of another model"):
        create(Model(name="test_resnet", weights=str(path)), 10, 3)


def test_weights_files_that_cannot_be_read_or_would_run_code(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        create(Model(name="airbench", weights=str(tmp_path / "none.pth")), 10, 3)
    rubbish = tmp_path / "rubbish.safetensors"
    rubbish.write_bytes(b"rubbish")
    with pytest.raises(UserError, match="not readable"):
        create(Model(name="airbench", weights=str(rubbish)), 10, 3)

    torch.save([torch.ones(2)], tmp_path / "list.pth")
    with pytest.raises(UserError, match="holds no weights by name"):
        create(Model(name="airbench", weights=str(tmp_path / "list.pth")), 10, 3)

    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "owned").touch, ())

    torch.save({"state_dict": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(UserError, match="not readable"):
        create(Model(name="airbench", weights=str(tmp_path / "trap.pth")), 10, 3)
    assert not (tmp_path / "owned").exists()


def test_the_first_layer_whitens_patches() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 16, 16, generator=generator).cumsum(-1).cumsum(-2)  # neighbors resemble each other
    net = AirbenchNet(widths=(8, 16))
    net.prepare(images)
    answers = net.whiten(images).permute(0, 2, 3, 1).reshape(-1, 24)[:, :12]
    covariance = answers.T @ answers / len(answers)
    assert torch.allclose(covariance, torch.eye(12), atol=5e-3)
    assert not net.whiten.weight.requires_grad


def test_pretrained_weights_get_a_new_head_for_other_classes_and_say_so(tmp_path: Path, caplog) -> None:
    allow_torchvision()
    import timm

    donor = timm.create_model("test_resnet", num_classes=10)
    timm.models.save_for_hf(donor, tmp_path)
    with caplog.at_level("INFO", logger=log.name):
        model = create(Model(name=f"local-dir:{tmp_path}", weights="pretrained"), num_classes=7, channels=3)
    assert torch.equal(model.conv1[0].weight, donor.conv1[0].weight)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert "the head has another number of classes (10, here 7) and starts anew" in caplog.text


def test_without_a_way_to_the_hub_it_is_said_where_weights_can_come_from(monkeypatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    def nobody_knows(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(factory.socket, "getaddrinfo", nobody_knows)
    monkeypatch.setattr(factory.urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"weights of test_resnet could not be had .* set model.weights to its path"):
        create(Model(name="test_resnet", weights="pretrained"), 10, 3)


def test_a_precision_the_device_lacks(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old GPU")
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(UserError, match="precision=bf16: Old GPU does not compute in bf16; use fp16, or auto"):
        resolve("bf16", torch.device("cuda"))
    assert resolve("auto", torch.device("cuda")) == "fp16"
    with caplog.at_level("WARNING", logger=log.name):
        assert resolve("bf16", torch.device("cpu")) == "bf16"
    assert "only emulates bf16" in caplog.text
