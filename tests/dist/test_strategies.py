"""Single, DDP and FSDP are ways to compute the same experiment, and hand it to each other in the middle."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import command, environment
from processes import start, wait_for_step
from safetensors import safe_open

from paceline.launch.batch_finder import attempt
from paceline.track.records import RunFolder

NET = ("--train.global_batch", 16, "--optim.lr", 0.02, "--optim.schedule", "{name: cosine, warmup: 5ba}")
QUIET = ("--log.every", "1ba", "--log.tensorboard", "false", "--evaluate.every", "25ba", "--precision", "fp32")
WAYS = {"single": (), "ddp": ("--procs", 2), "fsdp": ("--procs", 2)}


def _words(norm: str, *more: object) -> tuple[object, ...]:
    model = ("--model.options", f"{{widths: [8, 16], norm: {norm}}}", "--model.sync_norm", norm == "batch")
    return ("train", "digits", *NET, *QUIET, *model, "--train.duration", "50ba", *more)


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


def _train(folder: Path, norm: str, strategy: str) -> list[float]:
    words = _words(norm, "--strategy", strategy, "--name", f"{norm}-{strategy}", *WAYS[strategy])
    subprocess.run(command(*words), cwd=folder, env=environment(), check=True)
    run = folder / "runs" / f"{norm}-{strategy}"
    assert RunFolder(run).read_summary()["final"]["samples"] == 360
    return _losses(run)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    return _train(tmp_path_factory.mktemp("alone"), "group", "single")


def test_sharded_training_computes_the_same_losses(alone: list[float], tmp_path: Path) -> None:
    """fp32, the same global batch, 50 steps."""
    sharded = _train(tmp_path, "group", "fsdp")
    assert len(alone) == 50
    assert max(abs(a - b) for a, b in zip(alone, sharded, strict=True)) < 1e-5


def test_batch_norm_over_all_ranks_computes_the_same_losses_under_all_strategies(tmp_path: Path) -> None:
    losses = {strategy: _train(tmp_path, "batch", strategy) for strategy in WAYS}
    for strategy in ("ddp", "fsdp"):
        assert max(abs(a - b) for a, b in zip(losses["single"], losses[strategy], strict=True)) < 1e-5


def test_a_run_moves_from_one_strategy_to_the_next(alone: list[float], tmp_path: Path) -> None:
    """Stopped twice, it goes on as DDP and then as FSDP, weights, momentum and averages with it."""
    moving = tmp_path / "runs" / "moving"
    process = start(tmp_path, *_words("group", "--name", "moving", "--ema.decay", 0.9, "--checkpoint.every", "100ba"))
    for step, (strategy, procs) in zip((12, 30), (("ddp", 2), ("fsdp", 2)), strict=True):
        wait_for_step(process, moving, step)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        process = start(tmp_path, "train", "--resume", moving, "--strategy", strategy, "--procs", procs)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert max(abs(a - b) for a, b in zip(alone, _losses(moving), strict=True)) < 1e-5
    exported = tmp_path / "weights.safetensors"
    subprocess.run(command("export", moving, "--to", exported), cwd=tmp_path, env=environment(), check=True)
    with safe_open(exported, "pt") as weights:
        assert "head.weight" in weights.keys()  # noqa: SIM118: not a dictionary


def test_an_overflow_is_skipped_on_all_ranks_and_the_scale_is_kept(tmp_path: Path) -> None:
    words = _words("group", "--procs", 2, "--name", "half", "--precision", "fp16", "--train.loss_scale", 2.0**40)
    answer = subprocess.run(
        command(*words, "--train.duration", "40ba"), cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert answer.returncode == 0, answer.stderr
    assert "fp16 overflowed" in answer.stderr
    records = [record for record in RunFolder(tmp_path / "runs" / "half").records() if record["kind"] == "train"]
    scales = [record["loss_scale"] for record in records]
    assert scales[0] < 2.0**40
    assert scales[-1] == scales[-10] < 2.0**30  # it came down and stayed
    assert records[-1]["loss"] < records[0]["loss"]
    state = json.loads(next((tmp_path / "runs" / "half" / "checkpoints").glob("step-*/state.json")).read_text())
    assert str(scales[-1]) in json.dumps(state["parts"]["progress"])


def test_one_rank_without_memory_ends_a_trial_for_all(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{name: tiny, data: {name: cifar10}, model: {name: airbench, options: {norm: group}}}")
    plenty, little = 64 << 30, 3 << 30
    assert attempt(recipe, 2, 1, [plenty, plenty], 4).fits
    trial = attempt(recipe, 2, 1, [plenty, little], 2048)
    assert (trial.fits, trial.reason) == (False, "out of memory")
