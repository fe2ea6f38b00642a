"""Model cards: which figures they show, and what they say about them."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import raises
from made_details import make_details
from PIL import Image

import paceline as pl
from paceline.analysis.details.record import TRAINED_ON
from paceline.checkpoint import store
from paceline.exports import card

SHORT = {
    "device": "cpu",
    "precision": "fp32",
    "ema.decay": 0.5,
    "train.duration": "4ba",
    "evaluate.every": "2ba",
    "checkpoint.every": "2ba",
    "log.tensorboard": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with averaged weights and two checkpoints."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = pl.train("digits", SHORT, runs=tmp_path_factory.mktemp("card"), in_process=True)
    torch.set_num_threads(threads)
    return run.path


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.chdir(tmp_path)


def _evaluated(run: Path, names: list[str], step: int = 4, **more: Any) -> None:
    """Write the details of an evaluation of ten classes; the last one has no images."""
    labels = np.repeat(np.arange(9), 4)
    logits = np.eye(10, dtype=np.float32)[labels] * 3
    logits[0] = logits[4]
    make_details(run, labels, logits, class_names=names, step=step, **more)


def _card(run: Path, **more: Any) -> str:
    pl.export(run, "card.md", checkpoint="last", force=True, **more)
    return Path("card.md").read_text()


NAMES = ["a|b", *(f"class {number}" for number in range(1, 9)), "empty"]


def test_card_has_the_figures_of_this_checkpoint_only(trained: Path) -> None:
    run = shutil.copytree(trained, Path("run"))
    _evaluated(run, NAMES)
    _evaluated(run, ["other", *NAMES[1:]], step=3, split="test")
    (run / "evaluations" / "broken").mkdir()
    (run / "evaluations" / "broken" / "details.json").write_text("{")
    assert "## Accuracy per class" not in _card(run, raw=True)
    text = _card(run)
    assert "## Accuracy per class: made, val split" in text
    assert "| a\\|b | 4 | 75.0 % (30.1 to 95.4) |" in text
    assert "| empty | 0 | - |" in text
    assert "other |" not in text
    metrics = pl.Run(trained).last
    error = 200 * (metrics["top1"] * (1 - metrics["top1"]) / metrics["samples"]) ** 0.5
    assert f"| {100 * metrics['top1']:.2f} ± {error:.2f} % |" in text
    assert "license:" not in text


def test_card_says_what_was_evaluated(trained: Path) -> None:
    run = shutil.copytree(trained, Path("run"))
    assert "on these images only: digits, val split. It" in _card(run)
    assert "no result on a test split of digits" in _card(run)
    _evaluated(run, NAMES, own=False, split="all", name="street")
    _evaluated(run, NAMES, split="train", name="digits")
    text = _card(run)
    assert "on these images only: digits, val split; street, all images. It" in text
    assert "no result on a test split of digits" in text
    street, _, trained_on = text.partition("## Accuracy per class: digits, train split")
    assert (TRAINED_ON in street, TRAINED_ON in trained_on) == (False, True)
    assert "Dividing its logits" not in text
    _evaluated(run, NAMES, split="test", name="digits")
    _evaluated(run, NAMES, split="val", name="digits")
    text = _card(run)
    assert "on these images only: digits, val split; digits, test split; street, all images. It" in text
    assert "no result on a test split" not in text
    assert "Dividing its logits by" in text
    sections = [line.rpartition(": ")[2] for line in text.splitlines() if line.startswith("## Accuracy per class")]
    assert sections == ["digits, test split", "digits, val split", "street, all images", "digits, train split"]


def test_card_of_a_gray_model_says_how_to_convert_images(tmp_path: Path) -> None:
    small = {"model.name": "test_resnet", "model.options": {}, "train.duration": "2ba"}
    run = pl.train("digits", SHORT | small, runs=tmp_path / "runs", in_process=True).path
    pl.export(run, "FOLDER")
    text = _card(run)
    assert "preprocessing of its evaluation: gray, center crop" in text
    assert 'gray PIL image, image.convert("L"), to tensor' in text
    names: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0], names)
    image = names["transform"](Image.new("RGB", (50, 40)).convert("L"))
    assert names["model"](image[None]).shape == (1, 10)


def test_card_shows_top5_only_if_it_can_be_wrong() -> None:
    values = {"metrics": {"val": {"top1": 0.5, "top5": 1.0, "samples": 10}}, "precision": "fp32", "recipe": {}}
    assert "top-5" not in card._metrics(values | {"classes": [["x", "x"]] * 5}, is_best=False)
    assert "| top-1 | top-5 |" in card._metrics(values | {"classes": [["x", "x"]] * 6}, is_best=False)


def test_only_the_best_checkpoint_was_chosen_on_the_val_split(trained: Path) -> None:
    best, both = store.best(trained / "checkpoints", "top1"), list(store.committed(trained / "checkpoints"))
    assert best
    assert len(both) == 2
    shutil.copytree(best.folder, "alone")
    for place in (*both, Path("alone")):
        pl.export(place, "card.md", force=True)
        text = Path("card.md").read_text()
        assert "| val |" in text
        assert ("chosen on the val split" in text) == ("on val are optimistic" in text) == (place == best.folder)


def test_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text("name: x\n")
    with raises("no-checkpoint"):
        pl.export("run", "model.onnx")
