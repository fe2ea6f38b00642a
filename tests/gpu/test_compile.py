"""torch.compile and activation checkpointing under all strategies: the same experiment. On the CPU, fp32."""

from pathlib import Path

import pytest
from processes import run_ranks
from safetensors import safe_open

from paceline.track.records import RunFolder

WAYS = {"single": 1, "ddp": 2, "fsdp": 2}
PHASES = "[{epochs: [0, 1]}, {epochs: [1, 2], global_batch: 128}]"
WORDS = (
    *("train", "digits", "--precision", "fp32", "--device", "cpu", "--log.every", "1ba", "--log.tensorboard", "false"),
    *("--model.options", "{widths: [8, 16], norm: batch}", "--model.sync_batchnorm", "true", "--ema.decay", "0.9"),
    *("--train.global_batch", 240, "--phases", PHASES, "--train.duration", "9ba", "--evaluate.per_rank_batch", 100),
    *("--checkpoint.every", "7ba", "--evaluate.every", "7ba", "--optim.lr", 0.02),
    *("--optim.schedule", "{name: constant, warmup: 0ep}"),
)


def without_inductor(_rank: int) -> None:
    """Compile with torch's own kernels: inductor takes a minute on a slow machine, and one test has it."""
    from paceline.engine import compiled

    compiled.BACKEND = "aot_eager"


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in RunFolder(run).records() if record["kind"] == "train"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    run_ranks(folder, 1, *WORDS)
    return losses(folder / "runs" / "digits")


@pytest.mark.parametrize("strategy", WAYS)
def test_compiled_training_computes_the_same_losses(strategy: str, plain: list[float], tmp_path: Path) -> None:
    """Two batch sizes are compiled, each in its first steps; evaluation and the average of weights are not compiled."""
    run_ranks(tmp_path, WAYS[strategy], *WORDS, "--strategy", strategy, "--compile", "true", before=without_inductor)
    folder = RunFolder(tmp_path / "runs" / "digits")
    assert max(abs(a - b) for a, b in zip(plain, losses(folder.path), strict=True)) < 1e-5
    records = [record for record in folder.records() if record["kind"] == "train"]
    compiled = {record["step"] for record in records if "compile_seconds" in record}
    assert compiled <= {1, 2, 6, 7}
    assert {1, 6} <= compiled
    summary = folder.read_summary()
    assert summary["recompilations"] == 0
    assert summary["compile_seconds"] == pytest.approx(sum(record.get("compile_seconds", 0) for record in records))
    for part in ("model", "ema"):
        with safe_open(next(folder.checkpoints.glob(f"step-00000009/{part}*.safetensors")), "pt") as weights:
            assert "head.weight" in weights.keys()  # noqa: SIM118 (not a dictionary)
            assert not [name for name in weights.keys() if "_orig_mod" in name]  # noqa: SIM118


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_recomputed_activations_give_the_same_losses(
    strategy: str, kind: str, plain: list[float], tmp_path: Path
) -> None:
    """DDP expects the same graph in every step; batch norm communicates again when it is recomputed."""
    more = ("--strategy", strategy, "--model.activation_checkpointing", kind)
    run_ranks(tmp_path, WAYS[strategy], *WORDS, *more)
    found = losses(tmp_path / "runs" / "digits")
    assert max(abs(a - b) for a, b in zip(plain, found, strict=True)) < 1e-5


def test_compiled_and_recomputed_together_under_fsdp(plain: list[float], tmp_path: Path) -> None:
    more = ("--strategy", "fsdp", "--model.activation_checkpointing", "selective", "--compile", "true")
    run_ranks(tmp_path, 2, *WORDS, *more, before=without_inductor)
    found = losses(tmp_path / "runs" / "digits")
    assert max(abs(a - b) for a, b in zip(plain, found, strict=True)) < 1e-5


def test_compiled_run_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """With inductor, in one process."""
    small = ("--model.options", "{widths: [4, 8], norm: group}", "--model.sync_batchnorm", "false", "--phases", "[]")
    words = (*WORDS, *small, "--compile", "true", "--checkpoint.every", "3ba")
    run_ranks(tmp_path, 1, *words, "--name", "whole", "--train.duration", "6ba")
    run_ranks(tmp_path, 1, *words, "--name", "stopped", "--train.duration", "3ba")
    run_ranks(tmp_path, 1, "train", "--resume", "runs/stopped", "--train.duration", "6ba")
    whole, resumed = (tmp_path / "runs" / name for name in ("whole", "stopped"))
    assert len(losses(whole)) == 6
    assert losses(whole) == losses(resumed)
