"""Predictions: the same logits as an evaluation, all inputs and outputs, and images that cannot be read (CPU, fp32)."""

import csv
import io
import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HANG, command, complaint, environment, raises
from sample_images import jpeg
from trained_model import COLORS, CPU, colored, train_model

import paceline as pl
from paceline.data import arrays
from paceline.data.unlabeled import find_images, read_names
from paceline.distributed.world import World
from paceline.engine.evaluation import evaluate as evaluating
from paceline.engine.evaluation.saved import evaluate_path
from paceline.inference import classifier as using
from paceline.inference import predictions
from paceline.inference.open_model import Usage
from paceline.inference.predictions import PredictionJob, predict_images

SPLITS = ("train", "val")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    train_model(path)
    return path


@pytest.fixture
def logits(monkeypatch) -> Iterator[list[torch.Tensor]]:
    """All logits that are computed."""
    seen: list[torch.Tensor] = []

    def record(*arguments: object) -> torch.Tensor:
        seen.append(compute(*arguments))
        return seen[-1]

    compute = evaluating.predict
    monkeypatch.setattr(evaluating, "predict", record)
    monkeypatch.setattr(using, "predict", record)
    return seen


def _predicted(folder: Path, *inputs: object, out: Path, **more: object) -> list[dict[str, str]]:
    usage = Usage(precision="fp32")
    job = PredictionJob(folder / "runs" / "colors", tuple(map(str, inputs)), out=out, device="cpu", usage=usage, **more)
    predict_images(job)
    return list(csv.DictReader(out.open()))


@pytest.mark.parametrize("rectangular", [False, True])
@pytest.mark.parametrize("data", ["prepared", "images"])
def test_logits_are_those_of_an_evaluation(folder: Path, tmp_path, one_thread, logits, data: str, rectangular) -> None:
    run, overrides = folder / "runs" / "colors", [*CPU]
    if rectangular:
        (folder / "wide").mkdir(exist_ok=True)
        if not (folder / "wide" / "runs").exists():
            fields = {"evaluate.rectangular": True, "data.interpolation": "bicubic"}
            train_model(folder / "wide", **fields)
        folder, run = folder / "wide", folder / "wide" / "runs" / "colors"
        logits.clear()
    evaluate_path(run, "best", [*overrides, "--data.path", str(folder / data)])
    expected = logits[:]
    logits.clear()
    inputs = [folder / "prepared"] if data == "prepared" else [folder / "images" / "val"]
    rows = _predicted(folder, *inputs, out=tmp_path / "out.csv", split="val" if data == "prepared" else "")
    assert len(expected) == len(logits) == 7  # batches of 4, with the run's test-time augmentation
    assert all(torch.equal(one, other) for one, other in zip(expected, logits, strict=True))
    names = [row["path"].removeprefix(f"{folder}/images/") for row in rows]
    assert names == [f"val/{color}/{number}.jpg" for color in COLORS for number in range(9)]
    right = sum(row["class_1"] == name.split("/")[1] for row, name in zip(rows, names, strict=True))
    assert right == evaluate_path(run, "best", overrides)[1]["correct"] > 15


def test_files_have_the_pixels_of_prepared_data(folder: Path, tmp_path: Path, one_thread, logits) -> None:
    _predicted(folder, folder / "prepared", out=tmp_path / "a.csv", split="val")
    prepared = logits[:]
    logits.clear()
    _predicted(folder, folder / "images" / "val", out=tmp_path / "b.csv")
    assert all(torch.equal(one, other) for one, other in zip(prepared, logits, strict=True))


def test_formats_agree(folder: Path, tmp_path: Path, here) -> None:
    run, images = folder / "runs" / "colors", folder / "images" / "val"
    for name in ("p.csv", "p.jsonl", "p.parquet"):
        answer = here("predict", run, images, "--out", tmp_path / name, "--top", 2, *CPU)
        assert (answer.returncode, answer.stdout) == (0, f"{tmp_path / name}: 27 images\n"), answer.stderr
    table = list(csv.reader((tmp_path / "p.csv").open()))
    assert table[0] == ["path", "class_1", "id_1", "probability_1", "class_2", "id_2", "probability_2"]
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    rows = [[line["path"], *(value for each in line["top"] for value in _values(each))] for line in lines]
    assert [[str(cell) for cell in row] for row in rows] == table[1:]
    from pyarrow import parquet

    assert [list(row.values()) for row in parquet.read_table(tmp_path / "p.parquet").to_pylist()] == rows
    printed = here("predict", run, images, "--top", 2, *CPU).stdout.splitlines()
    file, name, _, value, other, _, second = rows[0]
    assert printed[0] == f"{file}: {name} {value:.2%}, {other} {second:.2%}"
    assert len(printed) == 27
    assert not list(tmp_path.glob(".p.*"))


def _values(each: dict[str, object]) -> tuple[object, ...]:
    return each["name"], each["id"], each["probability"]


def test_images_that_cannot_be_read_are_listed_and_skipped(folder: Path, tmp_path: Path, here) -> None:
    good = jpeg(colored("red", 1))
    contents = {"a.jpg": good, "b.jpg": b"", "c.jpg": b"no image", "d.jpg": good[:-40], "e.png": good}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    answer = here("predict", folder / "runs" / "colors", tmp_path, "--batch", 2, *CPU)
    assert answer.returncode == 0
    assert [line.partition(":")[0] for line in answer.stdout.splitlines()] == [f"{tmp_path}/a.jpg", f"{tmp_path}/e.png"]
    for name, reason in {"b.jpg": "empty", "c.jpg": "not an image", "d.jpg": "truncated"}.items():
        assert any(f"{tmp_path}/{name}: " in line and reason in line for line in answer.stderr.splitlines()), (
            answer.stderr
        )
    assert "skipped 3 of 5 images" in answer.stderr
    answer = here("predict", folder / "runs" / "colors", tmp_path / "b.jpg", tmp_path / "c.jpg", "--out", "o.csv", *CPU)
    assert "[no-image-readable]" in complaint(answer)
    assert not list(tmp_path.glob("*o.csv*"))


def test_names_are_read_from_standard_input(folder: Path, tmp_path: Path, here, monkeypatch) -> None:
    names = [f"{folder}/images/val/red/{number}.jpg" for number in (3, 1, 2)]
    text = "\n".join([names[0], f"{tmp_path}/missing.jpg", *names[1:]])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    answer = here("predict", folder / "runs" / "colors", "-", *CPU)
    assert [line.partition(": ")[0] for line in answer.stdout.splitlines()] == names
    assert f"{tmp_path}/missing.jpg: cannot be read (No such file or directory)" in answer.stderr
    assert "skipped 1 of 4 images" in answer.stderr
    assert read_names(b"a b\r\nc\n\n") == ["a b", "c"]
    assert read_names(b"a\nb\0c\0") == ["a\nb", "c"]


def test_closed_standard_streams(folder: Path, tmp_path: Path) -> None:
    words = shlex.join(map(str, command("predict", folder / "runs" / "colors", folder / "images" / "val", "-", *CPU)))
    options = {"cwd": tmp_path, "env": environment(), "stderr": subprocess.PIPE, "text": True, "timeout": HANG}
    answer = subprocess.run(["sh", "-c", f"{words} --out o.csv <&- >&-"], **options)
    assert answer.returncode == 0, answer.stderr
    assert len((tmp_path / "o.csv").read_text().splitlines()) == 28
    assert subprocess.run(["sh", "-c", f"{words} <&- >&-"], **options).returncode == 0


def test_inputs_are_found_in_order(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder / "images" / "val")
    (folder / "images" / "val" / "red" / "notes.txt").touch()
    names = lambda *words, **more: [name for part in find_images(words, **more) for name in part.names]  # noqa: E731
    assert names("red/3.jpg", "blue")[:3] == ["red/3.jpg", "blue/0.jpg", "blue/1.jpg"]
    assert len(names(".")) == len(names("**/*.jpg")) == len(names("*")) == 27
    assert names("r*d/[12].jpg", "green/0.jpg") == ["red/1.jpg", "red/2.jpg", "green/0.jpg"]
    assert len(names(str(folder / "prepared"))) == 48 + 27
    assert len(names(str(folder / "prepared"), default_variants=("", "max-400-q90"))) == 48 + 27
    mixed = names("red/3.jpg", str(folder / "prepared" / "original" / "val"), "red/4.jpg", listed=["x.jpg"])
    assert [mixed[0], mixed[1], *mixed[-2:]] == ["red/3.jpg", "val/blue/0.jpg", "red/4.jpg", "x.jpg"]
    for code, words, more in (
        ("input-not-found", ["nowhere.jpg"], {}),
        ("no-images", ["*.gif"], {}),
        ("no-images", [str(tmp_path)], {}),
        ("unknown-split", [str(folder / "prepared")], {"split": "test"}),
        ("option-not-applicable", ["red"], {"split": "test"}),
        ("option-not-applicable", ["red"], {"variant": "max-400-q90"}),
        ("unknown-variant", [str(folder / "prepared")], {"variant": "max-400-q90"}),
    ):
        with raises(code):
            find_images(words, **more)


def test_arrays_are_read_as_in_evaluation(folder: Path, tmp_path: Path, one_thread) -> None:
    images = np.stack([np.asarray(colored("red", number, (16, 16))) for number in range(6)])
    pairs = {split: (images, np.zeros(6, np.uint8)) for split in SPLITS}
    (tmp_path / "arrays").mkdir()
    arrays.write(tmp_path / "arrays", "cifar10", list(COLORS), pairs, {})
    rows = _predicted(folder, tmp_path / "arrays", out=tmp_path / "o.csv")
    assert [row["path"] for row in rows] == [f"{split}/{number}" for split in SPLITS for number in range(6)]
    classify = pl.load_classifier(folder / "runs" / "colors", device="cpu", precision="fp32")
    expected = classify.classify_pixels(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), top=1)
    found = [float(row["probability_1"]) for row in rows[6:]]
    assert found == pytest.approx([each.probability for (each,) in expected], abs=1e-6)


def test_wrong_options_are_refused(folder: Path, tmp_path: Path, here) -> None:
    run, image = folder / "runs" / "colors", folder / "images" / "val" / "red" / "1.jpg"
    for code, words in {
        "wrong-suffix": (run, image, "--out", "o.txt"),
        "output-folder-not-found": (run, image, "--out", "nowhere/o.csv"),
        "output-is-a-folder": (run, image, "--out", tmp_path.parent / f"{tmp_path.name}"),
        "missing-input": (run,),
        "not-a-run-or-checkpoint": (tmp_path, image),
        "export-not-found": ("nowhere.onnx", image),
        "conflicting-options": (run, "-", "--files-from", image),
    }.items():
        if code == "output-is-a-folder":
            (tmp_path / "o.csv").mkdir()
            words = (run, image, "--out", "o.csv")
        assert f"[{code}]" in complaint(here("predict", *words, *CPU)), code
    names = tmp_path / "names.csv"
    names.write_text(f"{image}\n")
    words = ("--files-from", names, "--out", f"{tmp_path}/./names.csv")
    assert "[output-is-an-input]" in complaint(here("predict", run, *words, *CPU))
    assert names.read_text() == f"{image}\n"
    assert "Did you mean --top?" in here("predict", run, image, "--topp", 3).stderr


def test_gray_models_use_luma(tmp_path: Path, one_thread) -> None:
    fields = {"model.options": {"widths": [8, 16]}, "train.global_batch": 48, "train.duration": "20ba"}
    fields |= {"log.tensorboard": False, "precision": "fp32", "device": "cpu", "evaluate.every": "20ba"}
    run = pl.train("digits", fields, runs=tmp_path / "runs", in_process=True)
    from PIL import Image

    from paceline.config.data import Data
    from paceline.data import sets

    digits = sets.load(Data(name="digits")).val
    images = [Image.fromarray(image.numpy().squeeze(2)) for image in digits.images[:60]]
    found = pl.load_classifier(run, device="cpu", precision="fp32")(images, top=1)
    right = sum(int(each.name) == label for (each,), label in zip(found, digits.labels.tolist(), strict=False))
    model = run.load_model()
    with torch.no_grad():
        logits = model(torch.stack([model.preprocess(image) for image in images]))
    assert [int(each.name) for (each,) in found] == logits.argmax(1).tolist()
    assert right > 20  # of 60, in ten classes


def test_api_predicts_in_processes(folder: Path, tmp_path: Path) -> None:
    images = [folder / "images" / "val" / color / "1.jpg" for color in COLORS]
    found = pl.predict(folder / "runs" / "colors", images, top=2, procs=1, device="cpu", precision="fp32")
    assert [each.path for each in found] == list(map(str, images))
    assert (found.skipped, len(found[0].top)) == (0, 2)
    frame = found.dataframe()
    assert list(frame["class_1"]) == [each.name for each in found]
    rows = list(csv.DictReader(found.write(tmp_path / "p.csv").open()))
    assert [float(row["probability_1"]) for row in rows] == [each.probability for each in found]
    with raises("invalid-argument"):
        pl.predict(folder / "runs" / "colors", images, tta="rotate")


def test_api_takes_any_names(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """Names that look like options, and separators of lines in Unicode."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-run").symlink_to(folder / "runs" / "colors")
    (tmp_path / "--top").mkdir()
    names = ["--trust", "-", "a\u2028b\u2029c\x85d\x0ce.jpg", "f\r\ng.jpg", "[1].jpg"]
    for name in (*names, "--top/0.jpg", "--top/1.jpg"):
        (tmp_path / name).write_bytes(jpeg(colored("red", 1)))
    found = pl.predict("-run", [*names, "--top", "-*"], top=1, procs=1, device="cpu", precision="fp32")
    assert [each.path for each in found] == [*names, "--top/0.jpg", "--top/1.jpg", "--top/0.jpg", "--top/1.jpg"]
    assert found.skipped == 0


def test_classifier_takes_files_bytes_and_images_of_pillow(folder: Path, one_thread) -> None:
    classify = pl.load_classifier(folder / "runs" / "colors", device="cpu", precision="fp32")
    assert classify.classes == tuple(COLORS)
    path = folder / "images" / "val" / "red" / "1.jpg"
    image = colored("red", 7)
    png = io.BytesIO()
    image.save(png, "png")
    by_name, by_bytes, by_image, by_png = classify([path, path.read_bytes(), image, png.getvalue()])
    assert by_name == by_bytes
    assert by_image == by_png
    assert sum(each.probability for each in by_name) == pytest.approx(1)
    assert classify([]) == []
    with raises("image-unreadable"):
        classify([b"no image"])


def test_ranks_wait_longer_while_inputs_are_found(folder: Path, tmp_path: Path, one_thread, monkeypatch) -> None:
    inside: list[bool] = []

    @contextmanager
    def long_timeout(_: World) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def find(*arguments: Any) -> list[Any]:
        seen.append(bool(inside))
        return find_images(*arguments)

    seen: list[bool] = []
    monkeypatch.setattr(World, "long_timeout", long_timeout)
    monkeypatch.setattr(predictions, "find_images", find)
    _predicted(folder, folder / "images" / "val" / "red", out=tmp_path / "out.csv")
    assert seen == [True]
