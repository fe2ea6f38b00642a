"""The test split (CPU, fp32): the best checkpoint is measured on it once, after training, on any number of ranks."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import run_ranks

from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.splits import Division
from paceline.engine.evaluation.saved import evaluate_path
from paceline.track.records import RunFolder

MODEL = ("--model", "null", "--model.name", "airbench", "--model.options", "{widths: [8, 16], norm: group}")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four colors, which are learned within some steps."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for label, color in enumerate(([200, 50, 50], [50, 200, 50], [50, 50, 200], [200, 200, 50])):
        (folder / "images" / f"class-{label}").mkdir(parents=True)
        for number in range(20):
            pixels = rng.normal(color, 60, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "images" / f"class-{label}" / f"{number}.png")
    prepare(source(folder / "images", "folder", Division(0.2, 0.2)), folder / "prepared", [Variant()], 2)
    return folder / "prepared"


def _words(images: Path, *more: object) -> tuple[object, ...]:
    data = ("--data", "null", "--data.path", images, "--data.size", 16, "--precision", "fp32", "--device", "cpu")
    length = ("--train.duration", "24ba", "--train.global_batch", 12, "--evaluate.every", "4ba")
    return ("train", "cifar10-resnet18", *data, *MODEL, *length, "--log.tensorboard", "false", *more)


@pytest.mark.parametrize(
    ("procs", "more"), [(1, ("--early_stop", "{patience: 1}")), (2, ("--ema.decay", 0.5)), (2, ("--strategy", "fsdp"))]
)
def test_the_best_checkpoint_is_tested_after_training(images, one_thread, tmp_path: Path, procs: int, more) -> None:
    # what is learned in 16 steps is destroyed in the last ones
    points = "[{at: 0ba, factor: 1.0}, {at: 16ba, factor: 1.0}, {at: 16ba, factor: 300.0}]"
    schedule = ("--optim.lr", 0.02, "--optim.schedule", f"{{name: piecewise, points: {points}}}")
    words = (*_words(images, *schedule, *more), "--checkpoint.best", "loss")
    log = run_ranks(tmp_path, procs, *words).stderr
    assert ", 16 validation and 16 test images, 4 classes" in log
    (path,) = (tmp_path / "runs").iterdir()
    run = RunFolder(path)
    (tested,) = (record for record in run.records() if record["kind"] == "test")
    best = min((record for record in run.records() if record["kind"] == "eval"), key=lambda record: record["loss"])
    assert tested["step"] == best["step"] < 24
    assert f"test of step {best['step']}: top-1 " in log
    assert run.read_summary()["test"] == tested
    assert run.read_summary()["step"] == (best["step"] + 4 if "--early_stop" in more else 24)
    assert tested["loss"] < 1
    for split, record in (("test", tested), ("val", best)):
        label, metrics = evaluate_path(path, "best", ["--device", "cpu"], split)
        assert f"({split} split" in label
        assert metrics["samples"] == record["samples"] == 16
        assert metrics["loss"] == pytest.approx(record["loss"], abs=1e-6)
