"""`paceline evaluate --details` end to end (CPU, fp32, one thread): the same files on any number of ranks."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import complaint, raises
from PIL import Image
from processes import run_ranks
from sample_images import contents

from paceline import Run, evaluate
from paceline.analysis.details.confusion import dense
from paceline.analysis.details.read import read_details
from paceline.analysis.details.record import TRAINED_ON
from paceline.analysis.details.slices import DetailsSpec
from paceline.cli.main import main
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.splits import Division
from paceline.engine.evaluation.saved import evaluate_path

MODEL = ("--model", "null", "--model.name", "airbench", "--model.options", "{widths: [8, 16], norm: group}")
PLAIN = ("--precision", "fp32", "--device", "cpu", "--evaluate.per_rank_batch", 5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of three colors by day and night, the same prepared, and a run with FSDP and EMA on them."""
    folder = tmp_path_factory.mktemp("details")
    rng = np.random.default_rng(0)
    for label, color in enumerate(([200, 50, 50], [60, 180, 60], [50, 50, 200])):
        (folder / "images" / f"class-{label}").mkdir(parents=True)
        for number in range(30):
            pixels = rng.normal(color, 70, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            time = "night" if number % 3 else "day"
            Image.fromarray(pixels).save(folder / "images" / f"class-{label}" / f"{time}-{number}.png")
    prepare(source(folder / "images", "folder", Division(0.2, 0.2)), folder / "prepared", [Variant()], 2)
    data = ("--data", "null", "--data.path", folder / "prepared", "--data.size", 16, "--ema.decay", 0.5)
    length = ("--train.duration", "10ba", "--train.global_batch", 12, "--log.tensorboard", "false")
    words = ("train", "cifar10-resnet18", "--name", "colors", "--strategy", "fsdp", *data, *MODEL, *length, *PLAIN)
    run_ranks(folder, 2, *words)
    return folder


def test_files_are_the_same_on_one_and_two_ranks(trained: Path, here, tmp_path: Path) -> None:
    run = trained / "runs" / "colors"
    words = ("evaluate", run, "--details", "--slice-by", "day|night", "--evaluate.tta", "flip", *PLAIN)
    outputs = [here(*words, "--out", "on-1").stdout, run_ranks(tmp_path, 2, *words, "--out", "on-2").stdout]
    assert contents(tmp_path / "on-1") == contents(tmp_path / "on-2")
    details = read_details(tmp_path / "on-1")
    record = details.record
    assert [record[name] for name in ("weights", "tta", "precision")] == ["ema", "flip", "fp32"]
    assert [row["slice"] for row in record["slices"]["rows"]] == ["day", "night"]
    _, metrics = evaluate_path(run, "best", [*map(str, PLAIN), "--evaluate.tta", "flip"])
    assert record["overall"]["correct"] == metrics["correct"]
    assert record["overall"]["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    columns = details.predictions()
    assert (columns["predicted"] == columns["label"]).sum() == metrics["correct"]
    assert columns["index"].tolist() == list(range(18))
    for text in (
        "95% CI",
        "balanced accuracy",
        "expected calibration error",
        "likely label errors",
        "by day|night",
        "on-",
    ):
        assert all(text in output for output in outputs), outputs
    assert all("top-5" not in output for output in outputs)  # with three classes
    shown = details.thumbnail(record["images"][0]["index"])
    assert shown
    assert record["images"][0]["path"].endswith(".png")


def test_details_are_written_to_the_run_and_reported(trained: Path, tmp_path: Path, one_thread, monkeypatch) -> None:
    monkeypatch.chdir(trained)
    monkeypatch.setenv("PACELINE_THREADS", "1")
    overrides = {"precision": "fp32", "device": "cpu", "evaluate.per_rank_batch": 32}
    run = Run("runs/colors")
    assert run.evaluations == []
    for split in ("val", "test"):
        metrics = evaluate("runs/colors", overrides, split=split, details=True, in_process=True)
        assert metrics["details"] == f"runs/colors/evaluations/prepared-{split}"
    assert [each.title for each in run.evaluations] == [
        "prepared, test split, original",
        "prepared, val split, original",
    ]
    other = shutil.copytree("images", tmp_path / "prepared")
    metrics = evaluate("runs/colors", overrides, data=other, split="", details=True, in_process=True)
    # a folder without splits is not the validation split
    assert metrics["details"] == "runs/colors/evaluations/prepared"
    assert metrics["samples"] == 90
    assert [each.title for each in run.evaluations][2:] == ["prepared, all images"]
    assert not run.evaluations[2].record["data"]["own"]
    # images under the same name and split, but others: beside the first ones
    (tmp_path / "split" / "prepared").mkdir(parents=True)
    test = shutil.copytree("images", tmp_path / "split" / "prepared" / "test").parent
    metrics = evaluate("runs/colors", overrides, data=test, details=True, in_process=True)
    assert metrics["details"].startswith("runs/colors/evaluations/prepared-test-")
    assert read_details(Path(metrics["details"])).title == "prepared, test split"
    with raises("conflicting-options"):
        evaluate("runs/colors", {"data.path": "images"}, data="images", in_process=True)
    with raises("missing-option"):
        evaluate("runs/colors", overrides, slice_by="day", in_process=True)
    assert main(["report", "runs/colors", "--out", str(tmp_path / "report.html")]) == 0
    text = (tmp_path / "report.html").read_text()
    assert text.count('"title":"prepared, ') == 4
    assert "data:image/webp" in text


def test_details_agree_with_scikit_learn_and_the_model(trained: Path, tmp_path: Path, one_thread) -> None:
    """From the images on: labels by path, logits of the model that users load, figures of scikit-learn."""
    sk = pytest.importorskip("sklearn.metrics")
    pq = pytest.importorskip("pyarrow.parquet")
    run, overrides = trained / "runs" / "colors", ["--precision", "fp32", "--device", "cpu", "--evaluate.tta", "none"]
    data = ["--data.path", str(trained / "images")]
    evaluate_path(run, "best", [*overrides, *data], "", DetailsSpec(out=tmp_path / "there"))
    record, table = read_details(tmp_path / "there").record, pq.read_table(tmp_path / "there/predictions.parquet")
    rows = table.to_pylist()
    names = [entry["name"] for entry in record["classes"]]
    model = Run(run).load_model()
    batch = torch.stack([model.preprocess(Image.open(trained / "images" / row["path"])) for row in rows])
    with torch.no_grad():
        logits = model(batch)
    labels = [names.index(row["path"].partition("/")[0]) for row in rows]
    predicted = logits.argmax(1).tolist()
    assert [row["label"] for row in rows] == labels
    assert [row["predicted"] for row in rows] == predicted
    p = logits.double().softmax(1).numpy()
    np.testing.assert_allclose([row["confidence"] for row in rows], p.max(1), atol=1e-4)
    precision, recall, f1, support = sk.precision_recall_fscore_support(labels, predicted, zero_division=np.nan)
    for name, values in (("precision", precision), ("recall", recall), ("f1", f1), ("support", support)):
        found = [np.nan if row[name] is None else row[name] for row in record["per_class"]]
        np.testing.assert_allclose(found, values)
    cells = read_details(tmp_path / "there").confusion()
    np.testing.assert_array_equal(dense(cells, 3), sk.confusion_matrix(labels, predicted))
    assert record["overall"]["loss"] == pytest.approx(sk.log_loss(labels, p), abs=1e-4)
    right, sure = np.array(labels) == predicted, p.max(1)
    inside = [(np.ceil(sure * 15) == number + 1) for number in range(15)]
    ece = sum(abs(right[each].sum() - sure[each].sum()) for each in inside) / len(rows)
    assert record["calibration"]["ece"] == pytest.approx(ece, abs=1e-4)


def test_images_that_the_model_was_trained_on_are_marked(trained: Path, tmp_path: Path, here) -> None:
    ignored = shutil.ignore_patterns("evaluations")
    run = shutil.copytree(trained / "runs" / "colors", tmp_path / "colors", ignore=ignored)
    files = tmp_path / "files"  # the same images as a folder with splits, and a run on them
    for split in ("train", "val"):
        shutil.copytree(trained / "images", files / split)
    data = ("--data", "null", "--data.path", "files", "--data.size", 16, "--train.duration", "2ba")
    words = ("--train.global_batch", 12, "--log.tensorboard", "false", *MODEL, *PLAIN)
    assert here("train", "cifar10-resnet18", "--name", "on-files", *data, *words).returncode == 0
    prepared = ("--data", trained / "prepared")
    for model, more, folder, expected in (
        (run, ("--split", "train"), "prepared-train", True),
        (run, (*prepared, "--split", "train"), "prepared-train", True),
        (run, (*prepared, "--split", "val"), "prepared-val", False),
        (run, ("--data", "files", "--split", "train"), "files-train", False),
        (tmp_path / "runs" / "on-files", ("--split", "train"), "files-train", True),
        (tmp_path / "runs" / "on-files", ("--data", files, "--split", "val"), "files-val", False),
    ):
        answer = here("evaluate", model, "--details", *more, *PLAIN)
        details = read_details(model / "evaluations" / folder)
        assert details.record["data"]["trained_on"] == expected, answer.stderr
        assert (TRAINED_ON in answer.stdout) == (TRAINED_ON in answer.stderr) == expected
    assert [each.path.name for each in Run(run).evaluations] == ["prepared-val", "files-train", "prepared-train"]
    assert Run("runs/on-files").evaluations[0].record["data"]["own"]


def _list(folder: Path) -> Path:
    files = sorted((folder / "images").rglob("*.png"))
    rows = [f"images/{file.parent.name}/{file.name},{file.parent.name},{len(file.stem)}" for file in files]
    (folder / "list.csv").write_text("\n".join(["path,label,length", *rows]))
    return folder / "list.csv"


def test_columns_and_corrupt_images(trained: Path, tmp_path: Path, here) -> None:
    shutil.copytree(trained / "images", tmp_path / "images")
    listed = _list(tmp_path)
    broken = tmp_path / "images" / "class-1" / "day-0.png"
    broken.write_bytes(broken.read_bytes()[:60])
    run = trained / "runs" / "colors"
    words = ("evaluate", run, "--data", listed, "--details", "--slice-by", "length", *PLAIN)
    answer = here(*words, "--out", "there", "--data.max_corrupt", 0.1)
    assert "left out as corrupt: 1" in answer.stdout, answer.stderr
    record: dict[str, Any] = json.loads((tmp_path / "there" / "details.json").read_text())
    assert record["data"]["corrupt"] == [{"index": 30, "path": "images/class-1/day-0.png"}]
    assert record["data"]["num_corrupt"] == 1
    assert [row["slice"] for row in record["slices"]["rows"]] == ["5", "6", "7", "8"]
    assert sum(row["samples"] for row in record["slices"]["rows"]) == 89
    # the same column for prepared images
    (tmp_path / "more.csv").write_text("path,cloud\nclass-0/day-18.png,yes\nclass-0/night-13.png,no\nother.png,no\n")
    words = ("evaluate", run, "--details", "--slice-by", "cloud", "--slice-file", "more.csv", "--out", "x", *PLAIN)
    assert "images without a slice: 16" in here(*words).stdout
    rows = json.loads((tmp_path / "x" / "details.json").read_text())["slices"]["rows"]
    assert [(row["slice"], row["samples"]) for row in rows] == [("no", 1), ("yes", 1), (None, 16)]
    for code, more in (
        ("slice-not-found", ("--slice-by", "noon")),
        ("slice-column-missing", ("--slice-by", "rain", "--slice-file", "more.csv")),
        ("list-unreadable", ("--slice-by", "rain", "--slice-file", "none.csv")),
        ("data-not-found", ("--data", "elsewhere")),
        ("unknown-split", ("--data", "images", "--split", "test")),
    ):
        assert f"[{code}]" in complaint(here("evaluate", run, "--details", *more, *PLAIN))


def test_data_in_memory_and_checkpoints_outside_of_runs(tmp_path: Path, here) -> None:
    words = (
        "--train.duration",
        "4ba",
        "--train.global_batch",
        32,
        "--log.tensorboard",
        "false",
        *MODEL[2:],
        *PLAIN[:4],
    )
    assert here("train", "digits", *words).returncode == 0
    answer = here("evaluate", "runs/digits", "--details", *PLAIN[:4])
    assert "runs/digits/evaluations/digits-val" in answer.stdout, answer.stderr
    details = read_details(tmp_path / "runs" / "digits" / "evaluations" / "digits-val")
    image = details.record["images"][0]
    assert image["path"] == ""
    assert details.thumbnail(image["index"])
    assert "[slice-without-paths]" in complaint(here("evaluate", "runs/digits", "--details", "--slice-by", "x"))
    shutil.copytree(next((tmp_path / "runs" / "digits" / "checkpoints").iterdir()), tmp_path / "alone")
    assert "[missing-option]" in complaint(here("evaluate", "alone", "--details", *PLAIN[:4]))
    assert here("evaluate", "alone", "--details", "--out", "there", *PLAIN[:4]).returncode == 0


def test_details_replace_only_details(trained: Path, tmp_path: Path, here) -> None:
    words = ("evaluate", trained / "runs" / "colors", "--details", "--out", "mine", *PLAIN)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "predictions.csv").write_text("of `paceline predict`")
    assert "[output-has-other-data]" in complaint(here(*words))
    assert [path.name for path in mine.iterdir()] == ["predictions.csv"]
    (mine / "predictions.csv").unlink()
    assert here(*words).returncode == 0
    (mine / "details.json").unlink()  # as after an interruption
    assert here(*words).returncode == 0
    (mine / "notes.txt").touch()
    assert "notes.txt" in complaint(here(*words))
    assert read_details(mine)
