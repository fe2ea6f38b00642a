"""Every shipped recipe loads, says where it comes from, round-trips and runs."""

from pathlib import Path

import pytest

from paceline.config.io import dump_recipe, load_recipe, shipped
from paceline.track.records import RunFolder

NAMES = list(shipped())


@pytest.mark.parametrize("name", NAMES)
def test_it_loads_and_round_trips(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.about.source
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_two_tiny_steps(name: str, here, tmp_path: Path) -> None:
    """On generated images of the data's shape, from random weights: nothing is downloaded."""
    shape = {"cifar10": (3, 32), "digits": (1, 8)}[load_recipe(name).data.name]
    words = [
        "--data.name",
        "synthetic",
        "--data.synthetic",
        f"{{train_samples: 8, val_samples: 5, channels: {shape[0]}, size: {shape[1]}}}",
    ]
    words += [
        "--train.global_batch",
        "4",
        "--train.accumulation",
        "1",
        "--train.duration",
        "2ba",
        "--model.weights",
        "random",
    ]
    answer = here("train", name, *words)
    assert answer.returncode == 0, answer.stderr
    summary = RunFolder(tmp_path / "runs" / name).read_summary()
    assert (summary["status"], summary["step"], summary["final"]["samples"]) == ("finished", 2, 5)


def test_the_list_shows_all_of_them(paceline) -> None:
    answer = paceline("recipes", env={"COLUMNS": "200", "PATH": "/usr/bin"})
    assert answer.returncode == 0, answer.stderr
    assert all(name in answer.stdout for name in NAMES)
    assert "published" in answer.stdout


def test_help_shows_the_recipe_s_own_values(paceline) -> None:
    answer = paceline("train", "digits", "--help", env={"COLUMNS": "200", "PATH": "/usr/bin"})
    assert answer.returncode == 0, answer.stderr
    line = next(line for line in answer.stdout.splitlines() if line.startswith(" --train.global_batch"))
    assert "128" in line
    assert "Images per optimizer step over all ranks together" in line
