"""The functions of the Python API that do not train."""

from pathlib import Path

import pytest
from conftest import raises

import paceline as pl


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


def test_every_public_name_can_be_imported_and_has_a_docstring() -> None:
    assert [name for name in pl.__all__ if not getattr(pl, name).__doc__] == []
    assert [name for name in pl.launch.__all__ if not getattr(pl.launch, name).__doc__] == []
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = pl.trian


def test_plan_has_steps_learning_rates_and_estimates() -> None:
    plan = pl.plan("imagenet-rn18-2ep", nodes=2, gpus_per_node=4, train_images=1_281_167)
    assert plan.ranks == 8
    assert plan.timeline.total == sum(phase.end - phase.begin for phase in plan.timeline.phases)
    assert plan.lr_curve()[0] == (0.0, plan.lr_at(0))
    one, two, *_ = plan.estimates(1000, bandwidth=10, price=3.0)
    assert (one.nodes, two.nodes) == (1, 2)
    assert one.communication == 0 < two.communication
    assert one.seconds / 2 < two.seconds < one.seconds
    assert one.cost == pytest.approx(one.seconds / 3600 * 3.0)
    with raises("invalid-overlap"):
        plan.estimates(1000, overlap=1.5)


def test_recipes_are_listed_with_their_figures() -> None:
    recipes = {recipe.name: recipe for recipe in pl.list_recipes()}
    assert "digits" in recipes
    assert recipes["digits"].about.measured


def test_launches_are_planned_without_starting_them(tmp_path: Path) -> None:
    steps = pl.launch.dry_run("ssh", "digits", {"optim.lr": 0.1}, hosts=["a", "b"])
    assert "# a: files" in steps
    assert pl.launch.jobs() == []
    assert "kind: ConfigMap" in pl.launch.manifest("digits", "kubernetes", image="paceline:1")
    with raises("unknown-backend"):
        pl.launch.dry_run("mars", "digits")
    with raises("unknown-option"):
        pl.launch.dry_run("ssh", "digits", hosts=["a"], spot=True)
    with raises("unknown-engine"):
        pl.launch.manifest("digits", "nomad")


def test_wrong_sources_of_data_are_refused(tmp_path: Path) -> None:
    with raises("missing-source"):
        pl.prepare_imagenet("out", train="train.tar")
    with raises("output-inside-source"):
        pl.prepare_folder(tmp_path, tmp_path / "out")
    with raises("invalid-quality"):
        pl.prepare_folder("photos", "out", quality=101)
    with raises("data-not-prepared"):
        pl.PreparedData(tmp_path)
