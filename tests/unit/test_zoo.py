from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.config.recipe import Model
from paceline.errors import UserError
from paceline.model.airbench import AirbenchNet
from paceline.model.zoo import create

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
    images = torch.randn(64, 3, 16, 16, generator=generator).cumsum(-1).cumsum(-2)  # neighbours resemble each other
    net = AirbenchNet(widths=(8, 16))
    net.prepare(images)
    answers = net.whiten(images).permute(0, 2, 3, 1).reshape(-1, 24)[:, :12]
    covariance = answers.T @ answers / len(answers)
    assert torch.allclose(covariance, torch.eye(12), atol=5e-3)
    assert not net.whiten.weight.requires_grad
