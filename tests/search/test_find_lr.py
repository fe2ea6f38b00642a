"""`paceline find-lr` with real trainings: losses on 1 and 2 processes, early end, errors and suggestion."""

import json
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import complaint

import paceline as pl
from paceline.track.records import RunFolder

Paceline = Callable[..., subprocess.CompletedProcess[str]]
FP32 = ("--precision", "fp32", "--device", "cpu")
SMALL = ("--model.options", "{widths: [16, 32], norm: group}")


def _find(paceline: Paceline, tmp_path: Path, *words: object) -> Any:
    answer = paceline("find-lr", "digits", *FP32, *words)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads((tmp_path / "runs" / "find-lr-digits" / "find-lr.json").read_text())


def _losses(found: Any) -> list[float]:
    return [point["loss"] for point in found["points"]]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_have_the_losses_of_one(paceline: Paceline, tmp_path: Path, strategy: str) -> None:
    """Over several epochs, with groups of parameters and a momentum schedule; with DDP also Lookahead."""
    words: tuple[object, ...] = (
        *SMALL,
        *("--steps", 40, "--min-lr", 1e-3, "--max-lr", 0.5),
        *("--optim.groups", "[{match: '*.bias', lr_factor: 2, train_until: 20ba}]"),
        *("--optim.momentum_schedule", "{name: one-cycle}"),
    )
    if strategy == "ddp":
        words += ("--ema", "{decay: 0.9, every: 5, lookahead: true}")
    one = _find(paceline, tmp_path, *words)
    two = _find(paceline, tmp_path, *words, "--procs", 2, "--strategy", strategy)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert len(_losses(one)) == 40
    assert _losses(two) == pytest.approx(_losses(one), abs=1e-4)
    assert _losses(two)[:20] == pytest.approx(_losses(one)[:20], abs=1e-5)
    assert two["suggested"] == pytest.approx(one["suggested"])
    factors = [after["lr"] / before["lr"] for before, after in pairwise(one["points"])]
    assert factors == pytest.approx([500 ** (1 / 39)] * 39)


def test_divergence_ends_the_test_on_all_ranks(paceline: Paceline, tmp_path: Path) -> None:
    found = _find(paceline, tmp_path, *SMALL, "--max-lr", 1e12, "--steps", 60, "--procs", 2)
    assert found["diverged"]
    assert 20 < len(_losses(found)) < 60


def test_training_with_the_suggestion_is_better_than_far_from_it(paceline: Paceline, tmp_path: Path) -> None:
    found = _find(paceline, tmp_path, *SMALL)
    losses = [point["smoothed"] for point in found["points"]]
    at = next(number for number, point in enumerate(found["points"]) if point["lr"] == found["suggested"])
    assert losses[at + 1] < losses[at] < losses[at - 1]
    assert found["suggested"] < found["minimum"]
    assert not list(tmp_path.glob("runs/*/checkpoints"))
    top1 = {}
    for factor in (0.01, 1, 100):
        name = f"times-{factor}"
        words = (*FP32, *SMALL, "--name", name, "--train.duration", "4ep", "--optim.lr", factor * found["optim_lr"])
        paceline("train", "digits", *words)  # with a learning rate that is far too high the loss may become infinite
        top1[factor] = (RunFolder(tmp_path / "runs" / name).read_summary().get("final") or {}).get("top1", 0.0)
    assert top1[1] > top1[0.01] + 0.1
    assert top1[1] > top1[100] + 0.1
    assert "find-lr" not in paceline("runs").stdout


def test_the_factor_of_a_schedule_is_taken_into_account(paceline: Paceline, tmp_path: Path) -> None:
    """The suggestion is for the highest learning rate of the run, here four times optim.lr."""
    schedule = "{name: piecewise, points: [{at: 0ep, factor: 0}, {at: 5ep, factor: 4}, {at: 20ep, factor: 0}]}"
    found = _find(paceline, tmp_path, *SMALL, "--min-lr", 1e-3, "--max-lr", 1, "--optim.schedule", schedule)
    assert found["optim_lr"] == pytest.approx(found["suggested"] / 4)
    phases = "[{epochs: [0, 5], lr: [0, 0.1]}, {epochs: [5, 20], lr: [0.1, 0]}]"
    answer = paceline("find-lr", "digits", *FP32, *SMALL, "--min-lr", 1e-3, "--max-lr", 1, "--phases", phases)
    assert answer.returncode == 0, answer.stderr
    assert "phases.N.lr" in answer.stdout
    assert "paceline train" not in answer.stdout


def test_errors_of_the_training(paceline: Paceline, tmp_path: Path) -> None:
    gone = ("--data.name", "folder", "--data.path", "gone", "--data.augment.translate", 0)
    for words, code in (
        (gone, "data-not-found"),
        (("--max-lr", 1e-5), "no-suggested-lr"),
        (("--train.global_batch", 5000), "batch-too-large"),
        (("--optim.groups", "[{match: nothing}]"), "param-group-unmatched"),
        (("--model.options", "{widths: none}"), "invalid-model-options"),
    ):
        assert f"[{code}]" in complaint(paceline("find-lr", "digits", *FP32, *SMALL, *words)), words
    (tmp_path / "nets.py").write_text(
        "import torch\nfrom torch import nn\nimport paceline as pl\n\n\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n        super().__init__()\n        self.head = nn.Linear(64, classes)\n\n"
        "    def forward(self, images):\n"
        "        return self.head(images.flatten(1)) * (float('nan') if self.training else 1)\n\n\n"
        "@pl.register_model('broken')\ndef broken(num_classes, in_chans):\n    return Net(num_classes)\n"
    )
    words = ("--import", "nets", "--model.name", "broken", "--model.options", "{}")
    for procs in (1, 2):
        answer = paceline("find-lr", "digits", *FP32, *words, "--procs", procs)
        assert "[first-loss-not-finite]" in complaint(answer)


def test_the_python_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps: list[int] = []
    overrides = {"model.options": {"widths": [16, 32], "norm": "group"}, "precision": "fp32", "device": "cpu"}
    found = pl.find_lr(
        "digits", overrides, min_lr=1e-3, max_lr=1.0, steps=40, on_step=lambda step, lr, loss: steps.append(step)
    )
    assert steps == list(range(1, 41))
    assert found.suggested
    assert 1e-3 < found.suggested < found.minimum <= 1.0
    assert "<svg" in found._repr_html_()
