"""Model cards: which figures they show, and what they say about them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import raises

import paceline as pl
from paceline.checkpoint import store

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


def test_card_has_the_figures_of_this_checkpoint_only(trained: Path) -> None:
    head = "class,id,name,support,predicted,correct,recall,recall_low,recall_high\n"
    for folder, step, name in (("photos-val", 4, "a|b"), ("photos-test", 3, "other"), ("broken", None, "odd")):
        place = trained / "evaluations" / folder
        place.mkdir(parents=True)
        (place / "classes.csv").write_text(f"{head}0,x,{name},40,38,30,0.75,0.6,0.86\n1,y,empty,0,0,0,,,\n")
        (place / "details.json").write_text(json.dumps({"step": step, "weights": "ema"}) if step else "{")
    pl.export(trained, "card.md", checkpoint="last")
    text = Path("card.md").read_text()
    pl.export(trained, "raw.md", checkpoint="last", raw=True)
    assert "## Accuracy per class" not in Path("raw.md").read_text()
    assert "| a\\|b | 40 | 75.0 % (60.0 to 86.0) |" in text
    assert "| empty | 0 | - |" in text
    assert "other" not in text.partition("## Limits")[0]
    assert "odd" not in text.partition("## Limits")[0]
    metrics = pl.Run(trained).last
    error = 200 * (metrics["top1"] * (1 - metrics["top1"]) / metrics["samples"]) ** 0.5
    assert f"| {100 * metrics['top1']:.2f} ± {error:.2f} % |" in text
    assert "license:" not in text


def test_only_the_best_checkpoint_was_chosen_on_the_val_split(trained: Path) -> None:
    best, both = store.best(trained / "checkpoints", "top1"), list(store.committed(trained / "checkpoints"))
    assert best
    assert len(both) == 2
    shutil.copytree(best.folder, "alone")
    for place in (*both, Path("alone")):
        pl.export(place, "card.md", force=True)
        text = Path("card.md").read_text()
        assert "| val |" in text
        assert ("chosen on the val split" in text) == ("optimistic for new images" in text) == (place == best.folder)


def test_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    Path("run").mkdir()
    Path("run/recipe.yaml").write_text("name: x\n")
    with raises("no-checkpoint"):
        pl.export("run", "model.onnx")
