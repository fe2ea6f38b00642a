"""The Python API trains, resumes, evaluates and explains what is wrong."""

import os
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from conftest import raises
from PIL import Image

import paceline as pl

SHORT = {"train.duration": "2ep", "evaluate.every": "1ep", "precision": "fp32", "log.tensorboard": False}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_THREADS", "1")


def test_runs_in_this_process_and_in_others_are_equal() -> None:
    """Threads are the same, so the losses are bit-identical."""
    recipe = pl.load_recipe("digits", SHORT)
    here = pl.train(recipe, name="here", in_process=True)
    there = pl.train(recipe, name="there")
    assert here.status == there.status == "finished"
    assert [record["loss"] for record in here.trained] == [record["loss"] for record in there.trained]
    assert here.path.resolve() == Path("runs/here").resolve()
    assert here.best["top1"] >= here.last["top1"] > 0.5
    metrics = pl.evaluate(there, which="last")
    assert metrics["top1"] == pytest.approx(there.last["top1"])
    assert pl.evaluate(there, which="last", in_process=True) == metrics
    assert "the same experiment" in pl.compare(here, there).summary


def test_the_model_of_a_run_predicts_as_the_evaluation_does() -> None:
    from paceline.config.data import Data
    from paceline.data import sets

    run = pl.train("digits", SHORT, in_process=True)
    model = run.load_model("last")
    val = sets.load(Data(name="digits")).val
    images = torch.stack([model.preprocess(Image.fromarray(image[..., 0].numpy())) for image in val.images])
    with torch.no_grad():
        correct = (model(images).argmax(1) == val.labels).sum().item()
    assert correct / len(val) == pytest.approx(run.last["top1"], abs=0.01)
    assert model.classes == tuple("0123456789")
    assert not model.training


def test_errors_have_the_codes_of_the_commands() -> None:
    for in_process in (True, False):
        with raises("unknown-model"):
            pl.train("digits", SHORT | {"model.name": "resnet1888"}, in_process=in_process)
    with raises("in-process-needs-one-rank"):
        pl.train("digits", procs=2, in_process=True)
    with raises("unknown-checkpoint"):
        pl.evaluate("runs/none", which="newest")
    assert "RANK" not in os.environ


def test_errors_of_ranks_keep_message_and_fields() -> None:
    overrides = SHORT | {"data.name": "cifar10"}
    with raises("data-not-found") as here:
        pl.train("digits", overrides, in_process=True)
    with raises("data-not-found") as there:
        pl.train("digits", overrides, procs=2)
    assert here.value.fields
    assert (str(there.value), there.value.fields) == (str(here.value), here.value.fields)


def test_metrics_as_a_data_frame() -> None:
    run = pl.train("digits", SHORT, in_process=True)
    frame = run.dataframe("eval")
    assert isinstance(frame, pandas.DataFrame)
    assert frame["top1"].tolist() == [record["top1"] for record in run.evaluated]


def test_model_of_photographs_predicts_as_the_evaluation_does(tmp_path: Path) -> None:
    """Preprocessing of PIL images matches that of prepared ones; the resampling filters differ a little."""
    rng = np.random.default_rng(0)
    for name, color in {"blue": (40, 40, 200), "red": (200, 40, 40)}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(24):
            pixels = np.clip(rng.normal(color, 60, (48, 64, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    folder = pl.prepare_folder("photos", "data", max_side=48, val_fraction=0.25, workers=1)
    data = {"name": "shards", "path": str(folder), "size": 32, "augment": {}}
    run = pl.train("digits", SHORT | {"data": data, "train.global_batch": 12}, in_process=True)
    prepared = pl.PreparedData(folder)
    prepared.verify()
    images = prepared.export_images("exported", ["val"])
    model, losses = run.load_model("last"), []
    for path in sorted(images.rglob("*.jpg")):
        label = torch.tensor([model.classes.index(path.parent.name)])
        losses.append(torch.nn.functional.cross_entropy(model(model.preprocess(Image.open(path))[None]), label).item())
    assert len(losses) == 12
    assert sum(losses) / 12 == pytest.approx(run.last["loss"], abs=0.05)
    assert prepared.write_contact_sheet("sheet.png", "val").is_file()


def test_runs_are_listed_exported_and_explained() -> None:
    run = pl.train("digits", SHORT, name="one", in_process=True)
    (row,) = pl.list_runs()
    assert (row.name, row.status, row.model) == ("one", "finished", "airbench")
    assert "tensors" in pl.export(run, "weights.safetensors", which="last")
    assert run.bottlenecks
    comparison = pl.compare(run, "runs/one")
    assert {path.name for path in comparison.write("out")} >= {"comparison.md", "comparison.json", "comparison.csv"}
    with raises("wrong-suffix"):
        pl.export(run, "weights.pth")
    with raises("folder-not-found"):
        pl.list_runs("nowhere")
