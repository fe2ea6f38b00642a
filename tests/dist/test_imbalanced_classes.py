"""Balanced sampling and class weights train the same model on other ranks and after a resume."""

import os
import signal
from pathlib import Path

import pytest
from conftest import HANG
from processes import run_ranks, start, wait_for_step

from paceline.track.records import RunFolder

# long enough that the signal arrives during training; without batch norm, whose statistics differ between ranks
_WORDS = (
    *("--train.duration", "200ba", "--train.global_batch", "48", "--precision", "fp32"),
    *("--model.options.widths", "[8, 16]", "--data.sampler", "balanced", "--train.class_weights", "{3: 5.0, 8: 0.5}"),
    *("--checkpoint.every", "1000ba", "--evaluate.every", "100ba", "--log.every", "1ba", "--log.tensorboard", "false"),
)


def test_a_run_stopped_on_2_ranks_and_resumed_on_1_has_the_losses_of_1_rank(tmp_path: Path) -> None:
    answer = run_ranks(tmp_path, 1, "train", "digits", *_WORDS, "--name", "alone")
    assert "imbalance ratio 1.16, balanced sampler, class weights 0.37 to 3.7" in answer.stderr
    process = start(tmp_path, "train", "digits", *_WORDS, "--procs", 2, "--name", "moved")
    wait_for_step(process, tmp_path / "runs" / "moved", 3)
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert RunFolder(tmp_path / "runs" / "moved").read_summary()["step"] < 200
    run_ranks(tmp_path, 1, "train", "--resume", "runs/moved")
    alone, moved = (
        {
            record["step"]: record["loss"]
            for record in RunFolder(tmp_path / "runs" / name).records()
            if record["kind"] == "train"
        }
        for name in ("alone", "moved")
    )
    assert list(moved) == list(alone)
    assert list(moved.values()) == pytest.approx(list(alone.values()), abs=2e-3)
