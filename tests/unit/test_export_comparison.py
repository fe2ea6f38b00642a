"""The comparison of an exported graph with its model, and the validation of the metadata of exports."""

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from conftest import raises
from safetensors.torch import save_file
from torch import nn

import paceline as pl
from paceline.config.data import Augment
from paceline.config.io import load_recipe, to_tree
from paceline.config.recipe import Recipe
from paceline.errors import UserError
from paceline.exports import comparison
from paceline.exports.metadata import read_metadata


def test_graph_that_computes_something_else_is_refused() -> None:
    model, images = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), torch.randn(9, 3, 2, 2)
    real = comparison.RealImages(images, "images of a test")
    found = comparison.compare(model, lambda batch: model(batch) + 1e-5, real, "graph")
    assert found["largest_difference"] == pytest.approx(1e-5, rel=0.1)
    wrong = {
        "other values": lambda batch: model(batch) + 0.1,
        "NaN": lambda batch: model(batch) * float("nan"),
        "one batch size only": lambda batch: model(batch)[:2],
        "exception": lambda batch: 1 / (5 - len(batch)) * model(batch),
    }
    for run in wrong.values():
        with raises("export-differs"):
            comparison.compare(model, run, real, "graph")
    with raises("export-differs") as caught:
        comparison.compare(model, wrong["one batch size only"], real, "graph")
    assert "shape (2, 2) instead of (5, 2)" in str(caught.value)


def test_validation_images_have_the_preprocessing_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def resolve(recipe: Recipe) -> None:
        opened.append(recipe)
        raise UserError("data-not-found", "There is no data.")

    monkeypatch.setattr(comparison.kinds, "resolve", resolve)
    seen = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bicubic"}
    recipe = load_recipe("cifar10-resnet18", [])
    assert recipe.data.interpolation != "bicubic"
    with raises("export-needs-images"):
        comparison.validation_images({"recipe": to_tree(recipe), "preprocessing": seen, "step": 1}, "a checkpoint")
    (recipe,) = opened
    assert (recipe.data.mean, recipe.data.std) == (tuple(seen["mean"]), tuple(seen["std"]))
    assert (recipe.data.interpolation, recipe.data.augment) == ("bicubic", Augment())


@pytest.mark.parametrize("name", ["model.safetensors", "model.md", "model"])
def test_images_are_refused_where_nothing_is_compared(name: str, tmp_path: Path) -> None:
    with raises("conflicting-options"):
        pl.export(tmp_path, tmp_path / name, images=tmp_path)


def test_few_images_are_compared_in_all_batch_sizes() -> None:
    model, seen = nn.Flatten(), []
    real = comparison.RealImages(torch.randn(1, 1, 2, 2), "one image")
    assert (
        comparison.compare(model, lambda batch: seen.append(len(batch)) or model(batch), real, "graph")["images"] == 1
    )
    assert seen == [1, 2, 5]


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "model.pt2", "model"])
def test_files_of_others_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with raises("export-not-found"):
        read_metadata(Path(name))
    path = Path(name)
    if not path.suffix:
        path.mkdir()
        path /= "model.safetensors"
    path.write_bytes(b"garbage" * 10)
    with raises("export-metadata-invalid"):
        read_metadata(Path(name))


def _zipped(change: Callable[[bytearray], None], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("archive/extra/paceline.json", json.dumps({"classes": list(range(500))}))
    content = bytearray(file.getvalue())
    change(content)
    return bytes(content)


def _set(at: int, value: int) -> Callable[[bytearray], None]:
    """Change two bytes of the entry, in both of its headers."""

    def change(content: bytearray) -> None:
        central = content.index(b"PK\1\2")
        content[at : at + 2] = content[central + at + 2 : central + at + 4] = value.to_bytes(2, "little")

    return change


def _set_data(content: bytearray) -> None:
    content[57:97] = bytes([255]) * 40


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(_zipped(_set_data), id="zlib.error"),
        pytest.param(_zipped(_set_data, zipfile.ZIP_LZMA), id="LZMAError"),
        pytest.param(_zipped(_set(6, 1)), id="encrypted: RuntimeError"),
        pytest.param(_zipped(_set(8, 97)), id="unknown method: NotImplementedError"),
    ],
)
def test_corrupt_archives_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.PT2"
    path.write_bytes(content)
    with raises("export-metadata-invalid"):
        read_metadata(path)


def _written_by_others(path: Path) -> None:
    if path.suffix == ".onnx":
        path.write_bytes(onnx.ModelProto(ir_version=8).SerializeToString())
    elif path.suffix == ".pt2":
        path.write_bytes(_zipped(lambda content: None).replace(b"paceline.json", b"somebody.json"))
    else:
        save_file({"fc.weight": torch.zeros(2, 2)}, path)


@pytest.mark.parametrize("name", ["model.safetensors", "folder", "model.onnx", "model.pt2"])
def test_weights_without_metadata_are_refused_with_the_fix(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if not path.suffix:
        path.mkdir()
    _written_by_others(path if path.suffix else path / "model.safetensors")
    with raises("export-without-metadata") as caught:
        read_metadata(path)
    assert (f"--model.weights {path}" in str(caught.value)) == (path.suffix in ("", ".safetensors"))


def test_suffixes_of_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with raises("export-metadata-invalid") as caught:
        read_metadata(tmp_path / "model.bin")
    assert ".safetensors, .pt2, .onnx" in str(caught.value)


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    model = onnx.ModelProto()
    onnx.helper.set_model_props(model, {"paceline": "[]"})
    path = tmp_path / "model.ONNX"
    path.write_bytes(model.SerializeToString())
    with raises("export-metadata-invalid") as caught:
        read_metadata(path)
    assert "dictionary" in str(caught.value)  # the metadata was read
