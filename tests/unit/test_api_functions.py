"""The functions of the Python API that do not train."""

from pathlib import Path

import pytest
from conftest import raises
from made_runs import make_run

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
    assert recipes["digits"].about.measured.seeds
    assert recipes["cifar10-airbench94"].about.published


def test_launches_are_planned_without_starting_them(tmp_path: Path) -> None:
    steps = pl.launch.dry_run("ssh", "digits", {"optim.lr": 0.1}, hosts=["a", "b"])
    assert "# a: files" in steps
    assert pl.launch.jobs() == []
    assert "kind: ConfigMap" in pl.launch.manifest("digits", "kubernetes", image="paceline:1")
    with raises("unknown-backend"):
        pl.launch.dry_run("mars", "digits")
    with raises("unknown-option"):
        pl.launch.dry_run("ssh", "digits", hosts=["a"], spot=True)
    assert "# gpu2: files" in pl.launch.dry_run("ssh", "digits", hosts="gpu1,gpu2")
    assert pl.launch.dry_run("local", "digits") == pl.launch.dry_run("local", "digits", nodes=2)
    assert "--nodes=1" in pl.launch.dry_run("slurm", "digits")
    for hosts in ([], "", ",", 5, [1]):
        with raises("missing-hosts"):
            pl.launch.ssh("digits", hosts)
    for nodes in (0, "2", 1.5):
        with raises("invalid-nodes"):
            pl.launch.local("digits", nodes)
    with raises("missing-option"):
        pl.launch.dry_run("ec2", "digits")
    with raises("unknown-engine"):
        pl.launch.manifest("digits", "nomad")


def test_wrong_sources_of_data_are_refused(tmp_path: Path) -> None:
    with raises("missing-source"):
        pl.prepare_imagenet("out", train="train.tar")
    with raises("output-inside-source"):
        pl.prepare(tmp_path, tmp_path / "out")
    with raises("invalid-quality"):
        pl.prepare("photos", "out", quality=101)
    with raises("data-not-prepared"):
        pl.PreparedData(tmp_path)


def test_arguments_of_the_wrong_type_are_refused(tmp_path: Path) -> None:
    wrong = [
        lambda: pl.train("digits", runs=None),
        lambda: pl.train("digits", name=5),
        lambda: pl.train("digits", name="../outside", in_process=True),
        lambda: pl.train("digits", name="../outside"),
        lambda: pl.train("digits", {"name": "../outside"}, in_process=True),
        lambda: pl.train("digits", results=3),
        lambda: pl.train("digits", procs=0),
        lambda: pl.train("digits", procs="2"),
        lambda: pl.train(None),
        lambda: pl.resume(None),
        lambda: pl.evaluate(5),
        lambda: pl.Run(None),
        lambda: pl.compare(None),
        lambda: pl.list_runs(None),
        lambda: pl.plan("digits", nodes=0),
        lambda: pl.plan("digits", nodes="2"),
        lambda: pl.plan("digits", gpus_per_node=True),
        lambda: pl.plan("digits", scale_batch="x"),
    ]
    for number, call in enumerate(wrong):
        with raises("invalid-argument"):
            call()
            pytest.fail(f"call {number} is not refused")
    assert list(tmp_path.iterdir()) == []


def test_compare_takes_runs_or_a_list_of_them(tmp_path: Path) -> None:
    one, two = make_run(tmp_path, "one"), make_run(tmp_path, "two")
    assert [run.name for run in pl.compare([one, two]).runs] == [run.name for run in pl.compare(one, two).runs]
    with raises("missing-run"):
        pl.compare([])


def test_curves_and_checkpoints_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    run = pl.Run(make_run(tmp_path, "one"))
    assert run.curve("top1")
    for arguments in (("topp1",), ("top1", "evl"), ("top1", "eval", "minutes")):
        with raises("invalid-argument") as caught:
            run.curve(*arguments)
        assert "top1" in str(caught.value) or "epoch" in str(caught.value) or "eval" in str(caught.value)
    for checkpoint in ("first", 3):
        with raises("unknown-checkpoint"):
            run.load_model(checkpoint)


def test_plans_use_registered_schedules_of_imported_modules(tmp_path: Path, monkeypatch) -> None:
    module = tmp_path / "extensions" / "planned_schedule.py"
    module.parent.mkdir()
    module.write_text(
        "import paceline as pl\n\n"
        "@pl.register_schedule('planned-root')\n"
        "def root(step, total_steps):\n    return (1 - step / total_steps) ** 0.5\n"
    )
    monkeypatch.syspath_prepend(str(module.parent))
    (tmp_path / "mine.yaml").write_text(
        "base: digits\nname: mine\nimports: [planned_schedule]\noptim: {schedule: null}\n"
    )
    plan = pl.plan("mine.yaml", {"optim.schedule.name": "planned-root"})
    assert plan.lr_at(0) == pytest.approx(plan.recipe.optim.lr)
    assert plan.lr_at(plan.timeline.total // 2) == pytest.approx(plan.recipe.optim.lr * 0.5**0.5, rel=0.05)
