"""Models opened for use: exports predict as their run, in its precision, and ranks open the same file (CPU)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import complaint, raises
from trained_model import COLORS, CPU, train_model

import paceline as pl
from paceline.distributed.world import World
from paceline.engine import precision
from paceline.inference.classifier import ModelMetadata
from paceline.inference.open_model import Usage, open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    train_model(path)
    return path


class _SecondRank(World):
    """Rank 1 of two ranks. Rank 0 finds an export, whose metadata is `digest`; empty: that of this rank."""

    digest = ""

    def on_rank_zero(self, action: object) -> object:
        return False

    def all_gather_object(self, value: Any) -> list[Any]:
        is_digest = isinstance(value, list) and len(value) == 2
        return [[self.digest, value[1]] if self.digest and is_digest else value, value]

    @contextmanager
    def long_timeout(self) -> Iterator[None]:
        yield


def test_ranks_open_the_same_export(folder: Path, tmp_path: Path, one_thread, monkeypatch) -> None:
    world, usage = _SecondRank(rank=1, size=2), Usage(precision="fp32")
    with raises("export-not-found"):  # not an attempt to open a run, in which rank 0 would not take part
        open_model(tmp_path, world, usage)
    pl.export(folder / "runs" / "colors", tmp_path / "model.safetensors")
    assert open_model(tmp_path / "model.safetensors", world, usage).classifier.classes == tuple(COLORS)
    monkeypatch.setattr(_SecondRank, "digest", "another file")
    with raises("exports-differ"):
        open_model(tmp_path / "model.safetensors", world, usage)


def test_a_checkpoint_folder_predicts_as_its_run(folder: Path, one_thread) -> None:
    run, image = folder / "runs" / "colors", folder / "images" / "val" / "red" / "1.jpg"
    checkpoint = max((run / "checkpoints").iterdir())
    expected = pl.load_classifier(run, checkpoint="last", device="cpu", precision="fp32")([image])
    assert pl.load_classifier(checkpoint, device="cpu", precision="fp32")([image]) == expected


def test_a_run_stays_a_run_when_its_model_is_exported_into_it(tmp_path: Path, one_thread) -> None:
    run = train_model(tmp_path).rename(tmp_path / "runs" / "a.onnx")  # named like an export, too
    pl.export(run, run / "model.safetensors")
    pl.export(run, run / "model.pt2")
    pl.load_classifier(run, device="cpu", precision="bf16")
    assert pl.evaluate(run, in_process=True)["samples"] == 27


def test_default_precision_is_that_of_the_run(folder: Path, tmp_path: Path, one_thread, here, monkeypatch) -> None:
    monkeypatch.setattr(precision, "_supports_bf16", lambda _: True)  # so that auto is bf16
    run, image = folder / "runs" / "colors", folder / "images" / "val" / "red" / "1.jpg"
    pl.export(run, tmp_path / "model.safetensors")
    expected = pl.load_classifier(run, device="cpu", precision="fp32")([image])
    assert pl.load_classifier(run, device="cpu")([image]) == expected
    assert pl.load_classifier(tmp_path / "model.safetensors", device="cpu")([image]) == expected
    assert pl.load_classifier(run, device="cpu", precision="auto")([image]) != expected
    assert here("predict", run, image, "--out", tmp_path / "p.jsonl", "--device", "cpu").returncode == 0
    (line,) = (tmp_path / "p.jsonl").read_text().splitlines()
    assert json.loads(line)["top"] == [vars(each) for each in expected[0]]


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "model.pt2"])
def test_exports_predict_as_the_run(folder: Path, tmp_path: Path, one_thread, name: str) -> None:
    run, images = folder / "runs" / "colors", sorted((folder / "images" / "val").rglob("*.jpg"))
    pl.export(run, tmp_path / name)
    expected = pl.load_classifier(run, device="cpu", precision="fp32")(images)
    trust = {"trust": True} if name.endswith(".pt2") else {}
    found = pl.load_classifier(tmp_path / name, device="cpu", precision="fp32", **trust)(images)
    for one, other in zip(expected, found, strict=True):
        assert [each.name for each in one] == [each.name for each in other]
        distance = 0 if name == "model.safetensors" else 1e-5
        assert [each.probability for each in one] == pytest.approx([g.probability for g in other], abs=distance)
    if trust:
        with raises("export-not-trusted"):
            pl.load_classifier(tmp_path / name, device="cpu")
    if not name.endswith(".safetensors"):
        with raises("precision-unsupported"):
            pl.load_classifier(tmp_path / name, device="cpu", precision="bf16", **trust)


@pytest.mark.parametrize("images", ["a.jpg", b"abc", Path("a.jpg"), [5], [np.zeros((4, 4, 3), np.uint8)]])
def test_classifiers_take_lists_of_images_only(folder: Path, one_thread, images: Any) -> None:
    classifier = pl.load_classifier(folder / "runs" / "colors", device="cpu")
    with raises("invalid-argument"):
        classifier(images)
    with raises("invalid-argument"):
        classifier([folder / "images" / "val" / "red" / "1.jpg"], top=0)


def test_timm_folders_predict_as_the_run(tmp_path: Path, one_thread) -> None:
    names = {"model.name": "test_resnet", "model.options": {}, "train.duration": "2ba", "evaluate.every": "2ba"}
    run = train_model(tmp_path, **names)
    pl.export(run, tmp_path / "hub", format="timm-hub")
    images = sorted((tmp_path / "images" / "val").rglob("*.jpg"))
    expected, found = (
        pl.load_classifier(path, device="cpu", precision="fp32")(images) for path in (run, tmp_path / "hub")
    )
    assert expected == found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"size": [4, 5]},
            "preprocessing.size is 4x5, but only square images of at most 4096x4096 pixels are supported.",
        ),
        ({"std": [1, 0, 1]}, "std positive ones"),
        ({"interpolation": "nearest"}, "interpolation is 'nearest', but only bilinear and bicubic are supported."),
        ({"mean": "x"}, "could not convert string to float: 'x'). Use another checkpoint, or export the model again."),
    ],
)
def test_invalid_metadata_is_named(change: dict[str, object], problem: str) -> None:
    settings = {"size": [4, 4], "mean": [0, 0, 0], "std": [1, 1, 1], "crop_pct": 1.0, "interpolation": "bilinear"}
    values = {"classes": [["a", "a"], ["b", "b"]], "preprocessing": settings}
    assert ModelMetadata.of(values, "x").size == 4
    with raises("invalid-model-metadata") as caught:
        ModelMetadata.of(values | {"preprocessing": settings | change}, "runs/a")
    assert str(caught.value).startswith("runs/a cannot be used: ")
    assert problem in str(caught.value)
    with raises("invalid-model-metadata"):
        ModelMetadata.of(values | {"classes": [["a", "a"]]}, "runs/a")


def test_exports_that_are_corrupt_are_refused(folder: Path, tmp_path: Path, here) -> None:
    image = folder / "images" / "val" / "red" / "1.jpg"
    for name in ("a.onnx", "a.safetensors", "a.pt2"):
        (tmp_path / name).write_bytes(b"no export")
        assert "[export-metadata-invalid]" in complaint(here("predict", name, image, "--trust", *CPU))
    pl.export(folder / "runs" / "colors", tmp_path / "b.safetensors")
    content = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(content.replace(b'"weight"', b'"weighs"').replace(b"head.", b"tail."))
    assert "[checkpoint-model-mismatch]" in complaint(here("predict", "b.safetensors", image, *CPU))


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "model.pt2", "hub"])
def test_evaluations_of_exports_say_what_to_do(tmp_path: Path, here, name: str) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").touch()
    if name != "hub":
        (tmp_path / name).touch()
    message = complaint(here("evaluate", name, "--details"))
    assert "[export-instead-of-run]" in message
    assert f"paceline predict {name} IMAGES" in message
