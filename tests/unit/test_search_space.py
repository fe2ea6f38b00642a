"""The search space of a sweep: ranges, choices, and spaces that are refused before training."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import raises
from made_runs import make_run

import paceline as pl
from paceline.config.io import dump_recipe, load_recipe
from paceline.config.space import Choice, Range, check_space, grid_of, override_words, parse_space, points, space_words
from paceline.errors import ConfigError
from paceline.search.spec import make_spec, parse_budget
from paceline.search.study import SharedStudy
from paceline.search.trial import TrialRun


@pytest.mark.parametrize(
    ("setting", "expected", "text"),
    [
        ("optim.lr=log:0.01..1", Range("optim.lr", 0.01, 1.0, log=True), "log:0.01..1"),
        ("optim.lr=0..1", Range("optim.lr", 0.0, 1.0), "0..1"),
        ("optim.lr=1e-4..1e-2", Range("optim.lr", 1e-4, 1e-2), "0.0001..0.01"),
        ("optim.lr=0.1..0.55:0.1", Range("optim.lr", 0.1, 0.5, 0.1), "0.1..0.5:0.1"),
        ("train.global-batch=64..512:64", Range("train.global_batch", 64, 512, 64, integer=True), "64..512:64"),
        ("seed=1..5", Range("seed", 1, 5, 1, integer=True), "1..5"),
        ("seed=log:1..64", Range("seed", 1, 64, log=True, integer=True), "log:1..64"),
        ("model.options.depth=2..4", Range("model.options.depth", 2, 4, 1, integer=True), "2..4"),
        ("train.global_batch=256,512", Choice("train.global_batch", ("256", "512")), "256,512"),
        ("train.duration=1ep, 2ep", Choice("train.duration", ("1ep", "2ep")), "1ep,2ep"),
        ("ema.decay=0,0.9", Choice("ema.decay", ("0", "0.9")), "0,0.9"),
        ("optim.betas=[0.9, 0.99],[0.8, 0.9]", Choice("optim.betas", ("[0.9, 0.99]", "[0.8, 0.9]")), None),
    ],
)
def test_a_setting_is_a_range_or_a_choice(setting: str, expected: Range | Choice, text: str | None) -> None:
    (found,) = parse_space([setting])
    assert found == expected
    again = parse_space([f"{found.field}={found.text}"])[0]
    assert again == found
    assert text in (None, found.text)


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("optim.lr=1..1", "empty-range"),
        ("optim.lr=2..1", "empty-range"),
        ("optim.lr=0..1:2", "empty-range"),
        ("optim.lr=0.5", "empty-range"),
        ("optim.lr=log:0..1", "log-range-not-positive"),
        ("optim.lr=log:-1..1", "log-range-not-positive"),
        ("optim.lr=log:1..2:0.1", "invalid-search-space"),
        ("optim.lr=log:1,2", "invalid-search-space"),
        ("optim.lr=1..x", "invalid-search-space"),
        ("optim.lr=0.1,0.1", "invalid-search-space"),
        ("optim.lr=[1", "invalid-search-space"),
        ("train.global_batch=1e2..2e2", "invalid-search-space"),
        ("train.global_batch=64..128:0.5", "invalid-search-space"),
        ("optim.lr=", "invalid-search-space"),
        ("optim.lr", "invalid-search-space"),
        ("=1,2", "invalid-search-space"),
    ],
)
def test_bad_settings_are_refused(setting: str, code: str) -> None:
    with raises(code):
        parse_space([setting])


def test_a_space_needs_different_fields() -> None:
    with raises("field-swept-twice"):
        parse_space(["optim.lr=1,2", "optim.lr=3,4"])
    with raises("missing-search-space"):
        parse_space([])


def test_values_of_python_are_the_same_space() -> None:
    space = {"optim.lr": "log:0.01..1", "train.global_batch": [256, 512], "optim.name": ("sgd", "adamw")}
    assert [dimension.text for dimension in parse_space(space_words(space))] == ["log:0.01..1", "256,512", "sgd,adamw"]
    assert parse_space(space_words({"x": ["a,b", "c"]}))[0].extremes == ("a,b", "c")
    with raises("invalid-search-space"):
        space_words({"optim.lr": 0.1})


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("optim.lrr=1..2", "unknown-field"),
        ("optim.lr=-1..1", "invalid-value"),
        ("precision=fp32,fp23", "invalid-value"),
        ("train.global_batch=0..64", "invalid-value"),
    ],
)
def test_values_that_the_recipe_refuses_are_found_before_training(setting: str, code: str) -> None:
    with raises("invalid-recipe", ConfigError) as caught:
        check_space(load_recipe("digits"), parse_space([setting]))
    assert [problem.code for problem in caught.value.problems] == [code]


def test_checks_of_the_whole_sweep(tmp_path) -> None:
    recipe = load_recipe("digits")
    with raises("conflicting-options"):
        make_spec(recipe, ["optim.lr=1,2"], tmp_path, given=["optim.lr"])
    with raises("batch-not-divisible"):
        make_spec(recipe, ["train.global_batch=96,97"], tmp_path, procs=2)
    for duration in ("5ep", "4ep"):
        with raises("pruner-needs-evaluations"):  # evaluate.every is 5ep
            make_spec(load_recipe("digits", ["--train.duration", duration]), ["seed=0,1"], tmp_path, pruner="median")
    assert make_spec(recipe, ["seed=0,1"], tmp_path, pruner="median").pruner == "median"
    spec = make_spec(recipe, ["optim.lr=1,2", "seed=0..2"], tmp_path, sampler="grid", trials=50, budget="1.5h")
    assert (spec.trials, spec.metric, spec.budget) == (6, "top1", 5400)


def test_grids() -> None:
    grid = grid_of(parse_space(["optim.lr=0.1..0.3:0.1", "optim.name=sgd,adamw"]))
    assert grid == {"optim.lr": [0.1, 0.2, 0.3], "optim.name": ["sgd", "adamw"]}
    assert len(list(points(grid))) == 6
    with raises("grid-needs-steps"):
        grid_of(parse_space(["optim.lr=0.1..0.3"]))
    with raises("grid-too-large"):
        grid_of(parse_space(["optim.lr=0.001..1:0.001", "seed=0..999"]))


def test_words_of_values_load(tmp_path) -> None:
    spec = make_spec(load_recipe("digits"), ["optim.lr=log:1e-5..1", "train.global_batch=64..128:64"], tmp_path)
    words = spec.words_of({"optim.lr": 2e-5, "train.global_batch": 128})
    recipe = load_recipe("digits", override_words(words))
    assert (recipe.optim.lr, recipe.train.global_batch) == (2e-5, 128)


def test_a_trial_continues_its_own_run_only(tmp_path) -> None:
    space = ["optim.groups=[{match: '*.bias', lr_factor: 2}],[]", "ema=null,{decay: 0.9}", "optim.lr='1e-3',2"]
    spec = make_spec(load_recipe("digits"), space, tmp_path)
    first, second = ({dimension.field: dimension.values[number] for dimension in spec.space} for number in (0, 1))
    folder = make_run(tmp_path, "trial-0000", *override_words(first))
    trial = TrialRun(spec, 0, first, {}, lambda *_: False, {})
    trial._refuse_other_run()
    assert len(trial._end("failed", "x" * 20_000).reason) < 10_000
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("digits", override_words(second))))
    with raises("trial-folder-differs"):
        trial._refuse_other_run()


def test_trials_train_the_recipe_of_the_sweep(tmp_path) -> None:
    spec = make_spec(load_recipe("digits"), ["optim.lr=1,2"], tmp_path / "sweep")
    SharedStudy(spec)
    spec.base.write_text("name: edited\n")
    SharedStudy(spec)
    assert spec.base.read_text() == spec.base_text
    (spec.folder / "sweep.json").write_text(json.dumps(spec.identity | {"space": [1]}))
    with raises("storage-corrupt"):
        SharedStudy(spec)


def test_a_sweep_that_another_worker_made_meanwhile_is_kept(tmp_path, monkeypatch) -> None:
    mine, other = (make_spec(load_recipe("digits"), [space], tmp_path / "a") for space in ("optim.lr=1,2", "seed=1,2"))

    @contextmanager
    def late(_study: SharedStudy) -> Iterator[None]:
        monkeypatch.undo()
        SharedStudy(other)
        yield

    monkeypatch.setattr(SharedStudy, "_locked", late)
    with raises("study-differs"):
        SharedStudy(mine)
    assert (tmp_path / "a" / "study.journal").exists()


@pytest.mark.parametrize(
    ("space", "more"),
    [
        (["optim.lr=1,2"], {}),
        *(({"optim.lr": [1, 2]}, more) for more in ({"seed": 1.5}, {"budget": 3}, {"storage": None}, {"trials": 0})),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, space: object, more: dict[str, object]) -> None:
    with raises("invalid-argument"):
        pl.sweep("digits", space, runs=tmp_path, **more)


def test_optuna_is_an_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with raises("missing-package") as caught:
        SharedStudy(make_spec(load_recipe("digits"), ["optim.lr=1,2"], tmp_path / "sweep"))
    assert caught.value.fields["package"] == "optuna"
    assert not (tmp_path / "sweep").exists()


def test_budgets() -> None:
    assert [parse_budget(text) for text in ("90s", "30min", "2h", "1d")] == [90, 1800, 7200, 86400]
    for text in ("2", "2x", "-1h", "0h", "h"):
        with raises("invalid-budget"):
            parse_budget(text)
