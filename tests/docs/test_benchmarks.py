"""Benchmarks of training run to the end, on small models and with few steps (CPU, one round; no figure is checked)."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, environment
from sample_images import jpeg, sample_image

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ("--size", "32", "--batch", "2", "--steps", "1", "--rounds", "1")


@pytest.mark.parametrize(
    ("script", "words", "row"),
    [
        ("loop.py", ("--steps", "3", "--rounds", "1", "--batch", "8"), "engine"),
        ("airbench.py", ("--steps", "2", "--rounds", "1", "--batch", "8"), "paceline"),
        ("ddp.py", SMALL, "2 ranks x 1 thread, stock DDP"),
        ("strategies.py", (*SMALL, "--precisions", "fp32"), "fp32, FSDP x2"),
        ("predict.py", ("--count", "16", "--rounds", "1"), "paceline, prepared"),
        ("checkpoint_memory.py", ("--model", "vit_tiny_patch16_224"), "load"),
    ],
)
def test_benchmark_runs(script: str, words: tuple[str, ...], row: str) -> None:
    command = [sys.executable, str(BENCHMARKS / script), *words]
    answer = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert answer.returncode == 0, answer.stderr
    assert any(line.strip().startswith(row) for line in answer.stdout.splitlines()), answer.stdout


def test_recipes_are_compared_on_images(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}.jpg").write_bytes(jpeg(sample_image(90 + number, 120, number)))
    words = ["--images", tmp_path, "--recipes", "imagenet-rn18-2ep-cosine", "--classes", "2", "--seeds", "2"]
    command = [sys.executable, BENCHMARKS / "recipes.py", *words]
    answer = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=HANG)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[-1].startswith("imagenet-rn18-2ep-cosine | 6 | ")
