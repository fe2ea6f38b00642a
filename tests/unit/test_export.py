"""Exports: the same model, classes and preprocessing in every format, and nothing left behind by a failure."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from conftest import raises
from PIL import Image
from safetensors.torch import load_file
from timm.data import resolve_model_data_config

import paceline as pl
from paceline.checkpoint import store
from paceline.cli.export import _FORMATS
from paceline.engine.trained_model import load_model
from paceline.exports import comparison, graphs
from paceline.exports.metadata import read_metadata
from paceline.exports.write import SUFFIXES, choose_format

SHORT: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "model.name": "test_resnet",
    "model.options": {},
    "data": {"name": "synthetic", "synthetic": {"size": 32, "channels": 3, "classes": 3}, "augment": None},
    "train.duration": "4ba",
    "train.global_batch": 12,
    "log.tensorboard": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a timm model, with averaged weights that differ from the trained ones."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    run = pl.train("digits", SHORT | {"ema.decay": 0.5}, name="trained", runs=folder, in_process=True)
    torch.set_num_threads(threads)
    return run.path


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run in all formats, with the names that the model card uses."""
    folder = tmp_path_factory.mktemp("formats")
    (folder / "FOLDER.txt").write_text(pl.export(trained, folder / "FOLDER", license="mit"))
    for name in ("model.md", "model.safetensors", "model.onnx", "model.pt2"):
        (folder / f"{name}.txt").write_text(pl.export(trained, folder / name))
    return folder


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    assert not list(tmp_path.glob(".*")), "a temporary file is left"


def _images(number: int = 3) -> torch.Tensor:
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def _logits(run: Path, **more: Any) -> torch.Tensor:
    return load_model(run, **more)(_images())


def test_timm_loads_the_folder_with_the_same_logits_classes_and_preprocessing(trained: Path, exported: Path) -> None:
    folder = exported / "FOLDER"
    assert f"timm.create_model('local-dir:{folder}', pretrained=True)" in (exported / "FOLDER.txt").read_text()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(model(_images()), _logits(trained))
    metadata = read_metadata(folder)
    assert model.pretrained_cfg["label_names"] == [id_ for id_, _ in metadata["classes"]]
    config, seen = resolve_model_data_config(model), metadata["preprocessing"]
    assert [*config["input_size"]] == [3, *seen["size"]]
    assert ([*config["mean"]], [*config["std"]]) == (seen["mean"], seen["std"])
    assert (config["interpolation"], config["crop_pct"]) == (seen["interpolation"], seen["crop_pct"])
    assert "\nlicense: mit\n" in (folder / "README.md").read_text().split("---")[1]


def test_onnx_computes_the_same_for_any_batch_size_and_describes_itself(trained: Path, exported: Path) -> None:
    session = onnxruntime.InferenceSession(exported / "model.onnx")
    assert [entry.name for entry in (*session.get_inputs(), *session.get_outputs())] == ["images", "logits"]
    images = _images(7)
    for batch in (1, 2, 5, 7):
        (found,) = session.run(None, {"images": images[:batch].numpy()})
        with torch.no_grad():
            assert np.allclose(found, load_model(trained)(images[:batch]).numpy(), atol=1e-4)
    props = session.get_modelmeta().custom_metadata_map
    metadata = json.loads(props["paceline"])
    assert json.loads(props["labels"]) == [name for _, name in metadata["classes"]]
    assert json.loads(props["preprocessing.mean"]) == metadata["preprocessing"]["mean"]
    compared = metadata["comparison"]
    assert (compared["images"], compared["top1_agreement"]) == (64, 1.0)
    assert {1, 2, 5} <= set(compared["batch_sizes"])
    assert compared["origin"] == "validation images of synthetic"
    assert f"{compared['largest_difference']:.2g}" in (exported / "model.onnx.txt").read_text()
    assert metadata == read_metadata(exported / "model.onnx")


def test_torch_export_computes_the_same_without_the_code_of_the_model(trained: Path, exported: Path) -> None:
    extra = {"paceline.json": ""}
    model = torch.export.load(exported / "model.pt2", extra_files=extra).module()
    assert torch.allclose(model(_images()), _logits(trained), atol=1e-5)
    assert model(_images(1)).shape == (1, 3)
    assert json.loads(extra["paceline.json"]) == read_metadata(exported / "model.pt2")


def test_metadata_is_the_same_in_checkpoint_and_export(trained: Path, exported: Path) -> None:
    checkpoint, metadata = store.last(trained / "checkpoints"), read_metadata(exported / "model.safetensors")
    assert checkpoint
    assert (metadata["step"], metadata["weights"], metadata["precision"]) == (4, "ema", "fp32")
    assert metadata["metrics"] == {"val": checkpoint.metrics}
    assert checkpoint.metrics["samples"] == metadata["data"]["splits"]["val"] > 0
    assert metadata["data"]["name"] == "synthetic"
    assert metadata["data"]["fingerprint"] == pl.Run(trained).summary["data"]["fingerprint"]
    assert metadata["recipe"]["train"]["global_batch"] == 12
    assert metadata["versions"]["torch"] == torch.__version__


def test_raw_weights_are_the_trained_ones_and_have_no_metrics(trained: Path, exported: Path) -> None:
    pl.export(trained, "raw.safetensors", raw=True)
    raw, averaged = load_file("raw.safetensors"), load_file(exported / "model.safetensors")
    expected = load_model(trained, raw=True).state_dict()
    assert all(torch.equal(raw[name], expected[name]) for name in expected)
    assert any(not torch.equal(raw[name], averaged[name]) for name in expected)
    metadata = read_metadata(Path("raw.safetensors"))
    assert (metadata["weights"], metadata["metrics"]) == ("model", {})


def test_every_code_block_of_the_card_runs(trained: Path, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported)
    blocks = re.findall(r"```python\n(.*?)```", Path("model.md").read_text(), re.DOTALL)
    found: list[dict[str, Any]] = [{"images": _images()} for _ in blocks]
    for block, names in zip(blocks, found, strict=True):
        exec(block, names)
    by_timm, by_file, by_onnx, by_torch = found
    expected = _logits(trained)
    with torch.no_grad():
        assert torch.equal(by_timm["model"](_images()), expected)
        assert torch.equal(by_file["model"](_images()), expected)
    assert by_timm["transform"](Image.new("RGB", (50, 40))).shape == (3, 32, 32)
    assert by_file["metadata"]["classes"][0][1] == by_onnx["labels"][0]
    assert np.allclose(by_onnx["logits"], expected, atol=1e-4)
    assert torch.allclose(by_torch["logits"], expected, atol=1e-4)


def test_existing_exports_are_replaced_only_with_force(trained: Path) -> None:
    for name in ("model.safetensors", "model"):
        pl.export(trained, name)
        with raises("output-exists"):
            pl.export(trained, name, raw=True)
        assert read_metadata(Path(name))["weights"] == "ema"
        pl.export(trained, name, raw=True, force=True)
        assert read_metadata(Path(name))["weights"] == "model"


def test_link_to_a_folder_stays_a_link(trained: Path) -> None:
    pl.export(trained, "model")
    Path("link").symlink_to("model")
    pl.export(trained, "link", raw=True, force=True)
    assert Path("link").is_symlink()
    assert read_metadata(Path("model"))["weights"] == "model"


def test_folder_that_cannot_be_replaced_stays(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pl.export(trained, "model")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target.name == "model" and not path.name.endswith(".old"):
            raise OSError(28, "No space left on device", str(target))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        pl.export(trained, "model", raw=True, force=True)
    assert read_metadata(Path("model"))["weights"] == "ema"


def test_session_that_cannot_be_created_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("NOT_IMPLEMENTED : Could not find an implementation")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with raises("model-not-exportable"):
        pl.export(trained, "model.onnx")


def test_folder_of_the_user_is_never_replaced(trained: Path) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with raises("output-has-other-data"):
        pl.export(trained, "mine", force=True)
    assert Path("mine/notes.txt").read_text() == "mine"
    Path("folder.onnx").mkdir()
    with raises("output-is-a-folder"):
        pl.export(trained, "folder.onnx", force=True)


@pytest.mark.parametrize(
    ("to", "format", "code"),
    [
        ("model.pth", "", "wrong-suffix"),
        ("model.onnx", "safetensors", "wrong-suffix"),
        ("model.onnx", "timm-hub", "wrong-suffix"),
        ("model", "onnx", "wrong-suffix"),
        ("model.onnx", "tflite", "unknown-format"),
        ("nowhere/model.onnx", "", "output-folder-not-found"),
    ],
)
def test_wrong_targets_are_refused(trained: Path, tmp_path: Path, to: str, format: str, code: str) -> None:
    with raises(code):
        pl.export(trained, to, format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "options"), [("model.safetensors", {"images": "photos"}), ("model.onnx", {"license": "mit"})]
)
def test_options_without_effect_are_refused(trained: Path, to: str, options: dict[str, Any]) -> None:
    with raises("conflicting-options"):
        pl.export(trained, to, **options)


def test_format_follows_the_suffix() -> None:
    assert {choose_format(Path(f"model{suffix}")): suffix for suffix in SUFFIXES.values()} == SUFFIXES
    assert choose_format(Path("resnet18.a1"), "timm-hub") == "timm-hub"
    assert set(SUFFIXES) == set(_FORMATS)


def test_run_whose_data_is_elsewhere_needs_images(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise pl.UserError("data-not-found", "data.path 'photos' does not exist.")

    monkeypatch.setattr(comparison, "open_source", gone)
    with raises("export-needs-images") as caught:
        pl.export(trained, "model.pt2")
    assert "--images" in str(caught.value)
    Path("photos").mkdir()
    Path("photos/broken.jpg").write_bytes(b"no image")
    with raises("no-images-to-compare"):
        pl.export(trained, "model.pt2", images="photos")
    with raises("images-not-found"):
        pl.export(trained, "model.pt2", images="nowhere")
    os.mkfifo("photos/pipe.jpg")  # opening it would block
    Image.new("RGB", (60, 40), (200, 30, 30)).save("photos/red.png")
    pl.export(trained, "model.pt2", images="photos")
    compared = read_metadata(Path("model.pt2"))["comparison"]
    assert (compared["images"], compared["origin"]) == (1, "images of photos")


def test_model_beyond_the_limit_of_onnx_is_refused(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_ONNX_BYTES", 1000)
    with raises("onnx-too-large"):
        pl.export(trained, "model.onnx")


def test_missing_package_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with raises("missing-package") as caught:
        pl.export(trained, "model.onnx")
    assert "paceline[onnx]" in str(caught.value)
