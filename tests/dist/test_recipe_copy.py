"""recipe.yaml and its copy in every checkpoint: a run is not resumed with a recipe that changed unintentionally."""

from pathlib import Path

import pytest
from conftest import TINY, complaint

from paceline.config.io import load_recipe
from paceline.track.records import RunFolder

LONGER = ("train", "--resume", "runs/digits", "--train.duration", "20ba")


@pytest.fixture
def run(here, tmp_path: Path) -> RunFolder:
    """A finished run of ten steps with a checkpoint."""
    answer = here("train", "digits", *TINY, "--train.duration", "10ba", "--optim.lr", "0.25")
    assert answer.returncode == 0, answer.stderr
    return RunFolder(tmp_path / "runs" / "digits")


def _replace(path: Path, old: str, new: str) -> None:
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def test_a_changed_recipe_is_refused_with_both_values_and_the_fix(here, run: RunFolder) -> None:
    _replace(run.recipe, "lr: 0.25", "lr: 0.75")
    _replace(run.recipe, "seed: 0", "seed: 4")
    kept = [path.read_bytes() for path in (run.recipe, run.environment, run.metrics, run.summary)]
    text = complaint(here(*LONGER))
    assert "[recipe-differs-from-checkpoint]" in text
    assert "optim.lr: 0.75 in recipe.yaml, 0.25 in the checkpoint" in text
    assert "seed: 4 in recipe.yaml, 0 in the checkpoint" in text
    assert "Delete runs/digits/recipe.yaml" in text
    assert [path.read_bytes() for path in (run.recipe, run.environment, run.metrics, run.summary)] == kept
    # an option makes the change intentional, except for the seed, which can never change
    text = complaint(here(*LONGER, "--optim.lr", 0.75, "--seed", 4))
    assert "seed cannot change" in text
    assert "[resume-changes-experiment]" in text
    answer = here(*LONGER, "--optim.lr", 0.75, "--seed", 0)
    assert answer.returncode == 0, answer.stderr
    assert load_recipe(str(run.recipe)).optim.lr == 0.75
    assert load_recipe(str(run.recipe)).seed == 0


@pytest.mark.parametrize("lost", ["deleted", "emptied"])
def test_a_lost_recipe_is_restored_from_the_checkpoint(here, run: RunFolder, lost: str) -> None:
    run.recipe.unlink()
    if lost == "emptied":
        run.recipe.touch()
    answer = here(*LONGER)
    assert answer.returncode == 0, answer.stderr
    assert "runs/digits/recipe.yaml is missing or empty" in answer.stderr
    assert "runs/digits/checkpoints/step-00000010" in answer.stderr
    assert "resuming from step 10" in answer.stderr
    assert load_recipe(str(run.recipe)).optim.lr == 0.25


@pytest.mark.parametrize("lost", ["deleted", "emptied", "changed"])
def test_the_same_command_resumes_an_interrupted_run_even_if_its_recipe_was_lost_or_changed(
    here, run: RunFolder, lost: str
) -> None:
    _replace(run.summary, '"finished"', '"interrupted"')
    if lost == "changed":
        _replace(run.recipe, "lr: 0.25", "lr: 0.75")
    else:
        run.recipe.unlink()
    if lost == "emptied":
        run.recipe.touch()
    answer = here("train", "digits", *TINY, "--train.duration", "10ba", "--optim.lr", "0.25")
    assert answer.returncode == 0, answer.stderr
    assert "resuming from step 10" in answer.stderr
    assert load_recipe(str(run.recipe)).optim.lr == 0.25
    assert [path.name for path in run.path.parent.iterdir()] == ["digits"]


def test_overrides_of_a_resume_that_was_killed_before_its_first_checkpoint_are_kept(here, run: RunFolder) -> None:
    """recipe.yaml is then newer than the newest checkpoint, but as the resume wrote it."""
    assert here(*LONGER, "--optim.lr", 0.75).returncode == 0
    for path in run.checkpoints.glob("step-00000020/COMMIT"):
        path.unlink()
    _replace(run.summary, '"finished"', '"running"')
    answer = here("train", "--resume", "runs/digits")
    assert answer.returncode == 0, answer.stderr
    assert "resuming from step 10" in answer.stderr
    assert load_recipe(str(run.recipe)).optim.lr == 0.75
    assert load_recipe(str(run.recipe)).train.duration == "20ba"


def test_reports_mention_a_changed_recipe(here, run: RunFolder) -> None:
    assert "recipe.yaml was changed" not in here("doctor", run.path).stdout
    _replace(run.recipe, "lr: 0.25", "lr: 0.75")
    assert "recipe.yaml was changed after the run" in here("doctor", run.path).stdout
