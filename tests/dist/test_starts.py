"""All ways to start ranks, and all precisions."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY, environment
from processes import run_ranks

from paceline.track.records import RunFolder


def _final(run: Path) -> dict:
    summary = RunFolder(run).read_summary()
    assert summary["status"] == "finished"
    return summary


def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "paceline", "train", "digits", *TINY]
    answer = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert _final(tmp_path / "runs" / "digits")["ranks"] == 2
    wrong = subprocess.run([*words, "--procs", "3"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "--procs 3" in wrong.stderr
    assert "[procs-mismatch]" in wrong.stderr


def test_weights_of_a_checkpoint_start_another_run(here, tmp_path: Path) -> None:
    assert here("train", "digits", *TINY, "--train.duration", "10ba").returncode == 0
    weights = tmp_path / "runs" / "digits" / "checkpoints" / "step-00000010" / "model.safetensors"
    answer = here("train", "digits", *TINY, "--train.duration", "10ba", "--name", "more", "--model.weights", weights)
    assert answer.returncode == 0, answer.stderr
    first, more = (RunFolder(tmp_path / "runs" / name).records()[0]["loss"] for name in ("digits", "more"))
    assert more < 0.9 * first


def test_a_run_resumes_and_is_used_without_the_file_of_its_initial_weights(here, tmp_path: Path) -> None:
    run, weights = tmp_path / "runs" / "digits", tmp_path / "initial.safetensors"
    assert here("train", "digits", *TINY, "--train.duration", "10ba", "--name", "first").returncode == 0
    checkpoint = tmp_path / "runs" / "first" / "checkpoints" / "step-00000010"
    weights.write_bytes((checkpoint / "model.safetensors").read_bytes())
    words = ("digits", *TINY, "--train.duration", "10ba", "--model.weights", weights)
    assert here("train", *words).returncode == 0
    weights.unlink()
    for command in (
        ("train", "--resume", run, "--train.duration", "20ba"),
        ("evaluate", run),
        ("export", run, "--to", tmp_path / "exported.safetensors"),
    ):
        answer = here(*command)
        assert answer.returncode == 0, answer.stderr
    assert _final(run)["step"] == 20
    assert "[weights-not-found]" in here("train", *words, "--name", "again").stderr


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_trains_on_the_cpu(here, tmp_path: Path, precision: str) -> None:
    words = (
        "--train.duration",
        "5ep",
        "--precision",
        precision,
        "--optim.clip_grad_norm",
        "5",
        "--model.options.widths",
        "[32, 64]",
    )
    answer = here("train", "digits", *words)
    assert answer.returncode == 0, answer.stderr
    summary = _final(tmp_path / "runs" / "digits")
    assert summary["precision"] == precision
    assert summary["final"]["top1"] > 0.6
    scales = [
        record.get("loss_scale") for record in RunFolder(tmp_path / "runs" / "digits").records() if "lr" in record
    ]
    assert all(scale >= 1 for scale in scales) if precision == "fp16" else set(scales) == {None}


def test_ema_is_evaluated_checkpointed_and_resumed(here, tmp_path: Path) -> None:
    """On two ranks with batch norm, whose statistics differ between ranks until they are averaged."""
    words = ("--ema.decay", "0.9", "--evaluate.tta", "flip", "--evaluate.per_rank_batch", 50)
    for duration in ("20ba", "40ba"):
        source = ("digits", *TINY) if duration == "20ba" else ("--resume", "runs/digits")
        run_ranks(tmp_path, 2, "train", *source, *words, "--train.duration", duration)
    final = _final(tmp_path / "runs" / "digits")["final"]
    answer = here("evaluate", "runs/digits", "--checkpoint", "last")
    assert f"({final['correct']} of 360)" in answer.stdout, answer.stdout + answer.stderr
    assert f"loss {final['loss']:.4f}" in answer.stdout
    assert (tmp_path / "runs" / "digits" / "checkpoints" / "step-00000040" / "ema.safetensors").exists()


def test_finished_run_is_not_changed_and_the_next_one_gets_a_number(here, tmp_path: Path) -> None:
    for name in ("digits", "digits-2"):
        answer = here("train", "digits", *TINY, "--train.duration", "5ba")
        assert answer.returncode == 0, answer.stderr
        assert _final(tmp_path / "runs" / name)["step"] == 5
    answer = here("train", "--resume", "runs/digits")
    assert answer.returncode == 1
    assert "is finished at step 5" in answer.stderr
    assert "[run-finished]" in answer.stderr
