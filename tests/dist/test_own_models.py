"""Registered models with unusual weights and buffers are trained, resumed and used; errors in them name the line."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import environment
from safetensors.torch import load_file

from paceline.engine.evaluation.saved import evaluate_path
from paceline.engine.trained_model import load_model
from paceline.track.records import RunFolder

PACKAGE = Path(__file__).parents[1] / "extension"
MODEL = ("--import", "shapes.models", "--model.name", "odd-net", "--model.options", "{}", "--precision", "fp32")
Paceline = Callable[..., subprocess.CompletedProcess[str]]
FAILING = ("--import", "shapes.models", "--model.name", "failing-net", "--log.tensorboard", "false")


@pytest.fixture
def package(monkeypatch) -> dict[str, str]:
    """The environment in which the package is installed."""
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH", "")])))
    return environment()


@pytest.mark.usefixtures("one_thread")
def test_buffers_of_any_kind_are_the_same_on_all_ranks_and_after_a_resume(
    paceline: Paceline, package, tmp_path: Path
) -> None:
    more = ("--train.duration", "6ba", "--train.global_batch", "48", "--ema.decay", "0.9", "--procs", "3")
    trained = paceline("train", "digits", *MODEL, *more, env=package)
    assert trained.returncode == 0, trained.stderr
    resumed = paceline("train", "--resume", "runs/digits", "--train.duration", "12ba", "--procs", "3", env=package)
    assert resumed.returncode == 0, resumed.stderr
    run = tmp_path / "runs" / "digits"
    for part in ("model", "ema"):
        weights = load_file(run / "checkpoints" / "step-00000012" / f"{part}.safetensors")
        assert weights["constant"].equal(torch.full((5,), 0.1))
        assert weights["calls"].tolist() == [12, 12, 12]
        assert weights["flags"].tolist() == [True, False]
        assert weights["level"].item() == -13
    _, metrics = evaluate_path(run, "last", [])
    assert metrics["loss"] == pytest.approx(RunFolder(run).read_summary()["final"]["loss"], abs=1e-6)
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(load_model(run, "last"))
    images = torch.rand(4, 1, 8, 8)
    assert models[0](images).equal(models[1](images))


@pytest.mark.parametrize(
    ("problem", "code", "parts"),
    [
        ("name", "extension-failed", ("NameError", "undefined", "models.py:")),
        ("shape", "extension-failed", ("RuntimeError", "8x8", "models.py:")),
        ("output", "extension-failed", ("shape (1, 3)", "(1, 10)")),
        ("tuple", "extension-failed", ("a tuple",)),
        ("exit", "extension-failed", ("SystemExit", "models.py:")),
        ("complex", "complex-model-unsupported", ("phase",)),
        ("sparse", "sparse-gradients-unsupported", ("positions", "sparse=False")),
    ],
)
def test_errors_of_a_model_name_it(here, monkeypatch, problem: str, code: str, parts: tuple[str, ...]) -> None:
    monkeypatch.syspath_prepend(PACKAGE)
    answer = here("train", "digits", *FAILING, "--model.options", f"{{problem: {problem}}}", "--train.duration", "5ba")
    assert answer.returncode == 1
    assert f"[{code}]" in answer.stderr
    if code == "extension-failed":
        assert "shapes.models.failing_net" in answer.stderr
    for part in parts:
        assert part in answer.stderr


def test_a_failure_of_another_rank_is_recorded(paceline: Paceline, package, tmp_path: Path) -> None:
    words = (*FAILING, "--model.options", "{problem: rank 1}", "--train.duration", "5ba", "--procs", "2")
    answer = paceline("train", "digits", *words, env=package)
    assert answer.returncode == 1
    assert "[extension-failed]" in answer.stderr
    summary = RunFolder(tmp_path / "runs" / "digits").read_summary()
    assert summary["status"] == "failed"
    assert "bad rank" in summary["message"]
