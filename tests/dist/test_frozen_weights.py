"""Frozen weights under all strategies: the same losses, nothing of them is sent, and a run moves between strategies."""

from pathlib import Path

import torch
from processes import run_ranks
from safetensors.torch import load_file

from paceline.track.records import RunFolder

WORDS = (
    *("train", "digits", "--train.global_batch", 16, "--optim.lr", 0.02),
    *("--optim.schedule", "{name: constant, warmup: 0ep}", "--ema.decay", 0.9, "--checkpoint.every", "100ba"),
    *("--model.options", "{widths: [8, 16], norm: batch}", "--model.sync_batchnorm", True),
    *("--log.every", "1ba", "--log.tensorboard", "false", "--evaluate.every", "25ba", "--precision", "fp32"),
    *("--model.freeze", "blocks.0.*"),
)


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "checkpoints").glob("step-*12")) / "model.safetensors")


def test_a_run_with_frozen_blocks_moves_between_strategies(tmp_path: Path) -> None:
    run_ranks(tmp_path, 1, *WORDS, "--name", "stayed", "--train.duration", "12ba")
    run_ranks(tmp_path, 2, *WORDS, "--name", "moved", "--train.duration", "4ba")  # in shared memory
    moves = (("--strategy", "fsdp"), ("--strategy", "ddp", "--grad_sync.transport", "network"))
    for number, words in enumerate(moves, start=2):
        run_ranks(tmp_path, 2, "train", "--resume", "runs/moved", *words, "--train.duration", f"{4 * number}ba")
    stayed, moved = (tmp_path / "runs" / name for name in ("stayed", "moved"))
    losses = list(zip(_losses(stayed), _losses(moved), strict=True))
    assert len(losses) == 12
    assert max(abs(a - b) for a, b in losses) < 1e-5
    ours, theirs = _weights(stayed), _weights(moved)
    frozen = [name for name in ours if name.startswith("blocks.0.")]
    assert any(name.endswith("running_mean") for name in frozen)
    assert all(torch.equal(ours[name], theirs[name]) for name in frozen)
    assert not any(ours[name].any() for name in frozen if name.endswith("running_mean"))  # as at the start
