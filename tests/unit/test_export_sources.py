"""Models that come from a folder of timm are used and exported without it; registered models in some formats only."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import raises
from safetensors import safe_open
from torch import nn

import paceline as pl
from paceline import extensions
from paceline.config.model import Model
from paceline.engine.trained_model import load_model
from paceline.exports.metadata import read_metadata
from paceline.models import hub
from paceline.models.factory import architecture_of, create, untrained

SHORT: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "model.weights": "pretrained",
    "model.options": {},
    "data": {"name": "synthetic", "synthetic": {"size": 32, "channels": 3, "classes": 3}, "augment": None},
    "train.duration": "2ba",
    "train.global_batch": 12,
    "log.tensorboard": False,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder whose config.json has arguments that the architecture needs."""
    options = {"img_size": 32, "embed_dim": 32, "drop_path_rate": 0.1}
    model = timm.create_model("test_vit", num_classes=5, **options)
    timm.models.save_for_hf(model, tmp_path / "private" / "vit", model_args=options)
    return tmp_path / "private" / "vit"


def test_runs_and_exports_do_not_need_the_folder_of_their_model(source: Path, tmp_path: Path, one_thread) -> None:
    overrides = SHORT | {"model.name": f"local-dir:{source}", "model.drop_path": 0.2}
    run = pl.train("digits", overrides, runs=tmp_path / "runs", in_process=True).path
    source.parent.rename(tmp_path / "elsewhere")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = load_model(run)(images)
    assert pl.evaluate(run, in_process=True)["samples"] > 0
    pl.load_classifier(run, device="cpu")
    pl.export(run, tmp_path / "model.safetensors")
    pl.export(run, tmp_path / "hub")
    pl.export(run, tmp_path / "model.md")
    pl.load_classifier(tmp_path / "model.safetensors", device="cpu")
    with torch.no_grad():
        assert torch.equal(timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True).eval()(images), expected)
    metadata = read_metadata(tmp_path / "model.safetensors")
    assert (metadata["model"]["name"], metadata["model"]["options"]["embed_dim"]) == ("test_vit", 32)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "private" not in str(file.metadata())
    card = (tmp_path / "model.md").read_text()
    assert "private" not in card
    assert "timm.create_model('test_vit', num_classes=3, in_chans=3, " in card


def test_arguments_that_a_repository_implies_are_saved(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = json.loads((source / "config.json").read_text())
    written["pretrained_cfg"]["input_size"] = [3, 48, 48]  # timm builds it for this size
    written["model_args"] = {"num_classes": 5, "embed_dim": 32}
    (source / "config.json").write_text(json.dumps(written))
    config = Model(name=f"local-dir:{source}", options={"class_token": False, "global_pool": "avg"})
    model = create(config, 3, 3)
    monkeypatch.setattr(hub, "read_config", lambda _: written)
    saved = architecture_of(Model(name="hf-hub:someone/vit", options=config.options), model)
    assert saved["name"] == "test_vit"
    again = create(untrained(Model(name="hf-hub:someone/vit"), saved), 3, 3)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert {name: tensor.shape for name, tensor in again.state_dict().items()} == shapes


class _NotExpressible(nn.Module):
    """Its result depends on values, which a graph cannot express; or on the batch, which must not be compiled in."""

    def __init__(self, num_classes: int, in_chans: int, wrong: str = "") -> None:
        super().__init__()
        self.head, self.wrong = nn.Linear(in_chans, num_classes), wrong

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pooled = images.mean((2, 3))
        if self.wrong == "values":
            for _ in range(int(pooled.abs().sum().item())):
                pooled = pooled * 1.5
        return self.head(pooled)


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a registered model."""
    monkeypatch.setattr(extensions, "_registered", dict(extensions._registered))
    pl.register_model("not-expressible")(_NotExpressible)
    overrides = SHORT | {
        "model.name": "not-expressible",
        "model.options": {"wrong": "values"},
        "model.weights": "random",
    }
    return pl.train("digits", overrides, runs=tmp_path_factory.mktemp("small"), in_process=True).path


def test_models_that_a_format_cannot_express_leave_nothing_behind(small: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, code in (
        ("m.onnx", "model-not-exportable"),
        ("m.pt2", "model-not-exportable"),
        ("m", "not-a-timm-model"),
    ):
        with raises(code):
            pl.export(small, name)
    assert not list(tmp_path.iterdir())
    pl.export(small, "m.safetensors")
    assert read_metadata(Path("m.safetensors"))["model"]["name"] == "not-expressible"
