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
)
FROZEN = ("--model.freeze", "blocks.0.*")
# frozen during the part of each strategy, and before that of the next one
TEMPORARY = (
    "--optim.groups",
    "[{match: blocks.0.convs.*, train_until: 2ba}, {match: whiten.bias, train_until: 6ba}, "
    "{match: blocks.1.convs.0.*, train_until: 10ba}]",
)


def _losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(next((run / "checkpoints").glob("step-*12")) / "model.safetensors")


def _moved(tmp_path: Path, words: tuple[str, ...]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train in one process, and in two with three strategies in turn; return the weights after the same losses."""
    run_ranks(tmp_path, 1, *WORDS, *words, "--name", "stayed", "--train.duration", "12ba")
    run_ranks(tmp_path, 2, *WORDS, *words, "--name", "moved", "--train.duration", "4ba")  # in shared memory
    moves = (("--strategy", "fsdp"), ("--strategy", "ddp", "--grad_sync.transport", "network"))
    for number, more in enumerate(moves, start=2):
        run_ranks(tmp_path, 2, "train", "--resume", "runs/moved", *more, "--train.duration", f"{4 * number}ba")
    stayed, moved = (tmp_path / "runs" / name for name in ("stayed", "moved"))
    losses = list(zip(_losses(stayed), _losses(moved), strict=True))
    assert len(losses) == 12
    assert max(abs(a - b) for a, b in losses) < 1e-5
    return _weights(stayed), _weights(moved)


def test_a_run_with_frozen_blocks_moves_between_strategies(tmp_path: Path) -> None:
    ours, theirs = _moved(tmp_path, FROZEN)
    frozen = [name for name in ours if name.startswith("blocks.0.")]
    assert any(name.endswith("running_mean") for name in frozen)
    assert all(torch.equal(ours[name], theirs[name]) for name in frozen)
    assert not any(ours[name].any() for name in frozen if name.endswith("running_mean"))  # as at the start


def test_weights_that_are_trained_until_a_step_are_frozen_under_all_strategies(tmp_path: Path) -> None:
    ours, theirs = _moved(tmp_path, TEMPORARY)
    for name, weight in ours.items():
        torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=1e-5, msg=name)
    for step, name in ((2, "blocks.0.convs.0.weight"), (6, "whiten.bias"), (10, "blocks.1.convs.0.weight")):
        words = (*WORDS, *TEMPORARY, "--name", f"until-{step}", "--train.duration", f"{step}ba")
        run_ranks(tmp_path, 1, *words)
        stopped = load_file(
            next((tmp_path / "runs" / f"until-{step}" / "checkpoints").glob("step-*")) / "model.safetensors"
        )
        assert torch.equal(stopped[name], ours[name]), name
        assert not torch.equal(stopped["head.weight"], ours["head.weight"])
