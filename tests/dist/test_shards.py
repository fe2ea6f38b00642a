"""Training from prepared images is as exact as training from memory."""

from pathlib import Path

import psutil
import pytest
from conftest import PRECISIONS
from processes import ranks, run_ranks, start, wait_for_step
from sample_images import tree

from paceline.checkpoint import store
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.track.records import RunFolder

WORDS = ("--data.name", "shards", "--data.size", "24", "--data.augment", "{flip: random, translate: 0}", "--data.path")
MORE = (
    *("--model.options", "{widths: [8, 16], norm: group}", "--train.global_batch", "16", "--train.duration", "40ba"),
    *("--checkpoint.every", "10ba", "--evaluate.every", "20ba", "--log.every", "1ba", "--log.tensorboard", "false"),
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(source(tree(folder / "in", classes=4, images=20), "folder"), folder / "out", [Variant()], 2)
    return folder / "out"


def _train(folder: Path, procs: int, prepared: Path, *more: object) -> None:
    run_ranks(folder, procs, "train", "digits", *WORDS, prepared, *MORE, *more)


@PRECISIONS
def test_result_does_not_depend_on_ranks_or_a_kill(
    tmp_path: Path, prepared: Path, precision: str, distance: float
) -> None:
    _train(tmp_path, 1, prepared, "--name", "one", "--precision", precision)
    _train(tmp_path, 2, prepared, "--name", "two", "--precision", precision)
    losses = {
        name: [record["loss"] for record in RunFolder(tmp_path / "runs" / name).records() if record["kind"] == "train"]
        for name in ("one", "two")
    }
    assert len(losses["one"]) == 40
    assert max(abs(one - two) for one, two in zip(losses["one"], losses["two"], strict=True)) < distance
    final = {name: RunFolder(tmp_path / "runs" / name).read_summary()["final"] for name in ("one", "two")}
    assert final["one"]["samples"] == final["two"]["samples"] == 80
    if precision == "fp32":
        assert final["one"]["correct"] == final["two"]["correct"]

    words = ("train", "digits", *WORDS, prepared, *MORE, "--name", "killed", "--procs", 2, "--precision", precision)
    process = start(tmp_path, *words)
    run = tmp_path / "runs" / "killed"
    wait_for_step(process, run, 13)
    for victim in [*ranks(process), psutil.Process(process.pid)]:
        victim.kill()
    process.communicate()
    assert not RunFolder(run).finished
    run_ranks(tmp_path, 2, *words)
    weights = [
        (next(store.committed(tmp_path / "runs" / name / "checkpoints")) / "model.safetensors").read_bytes()
        for name in ("two", "killed")
    ]
    assert weights[0] == weights[1]
