import dataclasses
import errno
import os
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import raises
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from paceline.config.batch import layouts
from paceline.config.duration import parse
from paceline.config.io import dump_recipe, fields, fingerprint, load_recipe, split_overrides
from paceline.config.recipe import Recipe, Train
from paceline.config.timeline import Timeline
from paceline.errors import ConfigError


def _problem(code: str, *overrides: str, source: object = "digits") -> str:
    """The message of the only problem, which must have this code."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(source), overrides)
    assert [problem.code for problem in caught.value.problems] == [code], caught.value
    return caught.value.problems[0].message


@pytest.mark.parametrize(("text", "steps"), [("10ep", 1000), ("0.5ep", 50), ("500ba", 500), ("9.9ep", 990), ("0ba", 0)])
def test_durations_become_steps(text: str, steps: int) -> None:
    recipe = Recipe("any", train=Train(global_batch=10))
    assert Timeline.of(recipe, 1000).steps(text) == steps


@pytest.mark.parametrize("text", ["10", "ep", "10 ep", "-1ep", "1e3ba", "10epochs", ""])
def test_durations_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(PydanticCustomError) as caught:
        parse(text)
    assert caught.value.type == "invalid-duration"


def test_all_problems_are_reported_at_once_with_path_value_and_fix(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: bad\noptim: {lrr: 0.1, momentum: 1.5}\ntrain: {duration: 10}\nprecission: bf16\nmodle: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path), ["--train.global-batch", "many", "--evaluate.every"])
    expected = [
        ("unknown-field", "optim.lrr=0.1", "optim.lr?"),
        ("unknown-field", "precission='bf16'", "precision?"),
        ("invalid-value", "optim.momentum=1.5", "less than 1"),
        ("unknown-field", "modle={}", "model?"),
        ("invalid-duration", "train.duration=10", '"10ep"'),
        ("invalid-value", "train.global_batch='many'", "integer"),
        ("missing-value", "--evaluate.every", "--evaluate.every VALUE"),
    ]
    found = {problem.message.partition(": ")[0]: problem for problem in caught.value.problems}
    assert len(caught.value.problems) == len(found) == len(expected)
    for code, typed, fix in expected:
        assert found[typed].code == code
        assert fix in found[typed].message
    assert caught.value.report.count("[unknown-field]") == 3


def test_problems_between_fields_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(
            "digits", ["--train.grad_accumulation", "3", "--data.mean", "[0.5]", "--optim.schedule.name", "piecewise"]
        )
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {"batch-not-divisible", "mean-std-mismatch", "schedule-points-missing"}
    assert "126 or 129" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        ("--data.augment.magnitude_std 0.5", "augment-field-unused", "data.augment.magnitude_std=0.5"),
        ("--data.augment.increasing true", "augment-field-unused", "timm-randaugment"),
        ("--data.augment.op_probability 1", "augment-field-unused", "op_probability=1"),
        ("--data.augment.random_erasing_mode pixel", "augment-field-unused", "without data.augment.random_erasing"),
        ("--data.augment.policy randaugment", "augment-needs-files", "Set it to none"),
        ("--data.augment.random_interpolation true", "augment-needs-files", "Set it to false"),
        ("--data.augment.color_jitter 0.4", "augment-needs-files", "Set it to 0"),
        (
            "--data.name imagenet --data.augment '{policy: timm-randaugment, magnitude: 18}'",
            "magnitude-too-large",
            "18",
        ),
        ("--train.bce_target_threshold 0.2", "bce-threshold-unused", "train.loss=cross-entropy"),
        ("--optim.schedule '{name: linear, warmup_prefix: false}'", "schedule-field-unused", "warmup_prefix"),
        ("--data.augment.policy timm", "invalid-value", "timm-randaugment"),
        ("--data.augment.op_probability 1.5", "invalid-value", "1.5"),
        ("--train.bce_target_threshold 1", "invalid-value", "bce_target_threshold"),
    ],
)
def test_augmentation_that_has_no_effect_or_is_out_of_range_is_refused(words: str, code: str, part: str) -> None:
    base = ["--optim.schedule", "{name: cosine, points: []}"] if "--optim" not in words else []
    with pytest.raises(ConfigError) as caught:
        load_recipe("cifar10-resnet18", [*base, *shlex.split(words)])
    found = {problem.code: problem.message for problem in caught.value.problems}
    assert part in found[code]


def test_points_of_a_base_recipe_can_be_removed() -> None:
    words = ("--optim.schedule.name", "plateau")
    assert "[]" in _problem("schedule-points-unused", *words, source="finetune-full")
    assert load_recipe("finetune-full", [*words, "--optim.schedule.points", "[]"]).optim.schedule.points == ()


def test_seconds_are_refused_where_a_schedule_needs_its_end() -> None:
    assert "train.duration='90s'" in _problem("seconds-not-allowed", "--train.duration", "90s")
    assert load_recipe("digits", ["--checkpoint.every", "90s"]).checkpoint.every == "90s"


def test_numbers_are_read_as_people_mean_them(tmp_path: Path) -> None:
    assert load_recipe("digits", ["--train.global_batch", "010"]).train.global_batch == 10
    assert "train.global_batch='1:30'" in _problem("invalid-value", "--train.global_batch", "1:30")


def test_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    text = (
        "name: a\ndata: {name: digits}\noptim: &base {lr: 0.5}\nmodel: {options: {<<: *base, lr: 0.25, widths: [8]}}\n"
    )
    path.write_text(text)
    assert load_recipe(str(path)).model.options == {"lr": 0.25, "widths": [8]}


def test_a_yaml_error_shows_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("name: a\noptim:\n  lr: 0.1\n momentum: 3\n")
    assert re.search(r"line 4, column 2: .*\n +momentum: 3\n +\^", _problem("invalid-yaml", source=path))


def test_a_duplicate_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("name: a\nseed: 1\nseed: 2\n")
    message = _problem("yaml-duplicate-key", source=path)
    assert "'seed'" in message
    assert "line 3" in message


def test_unknown_recipes_get_a_suggestion() -> None:
    with raises("recipe-not-found") as caught:
        load_recipe("digit")
    assert "'digits'" in str(caught.value)
    with raises("recipe-not-found") as caught:
        load_recipe("nowhere/recipe.yaml")
    assert "nowhere/recipe.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "not-a-recipe"), ("- a\n- b\n", "not-a-recipe"), ("{unclosed", "invalid-yaml"), ("\x00", "invalid-yaml")],
)
def test_files_that_are_not_recipes_are_refused(tmp_path: Path, content: str, code: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    _problem(code, source=path)


def test_overrides_reach_nested_fields_and_lists() -> None:
    recipe = load_recipe(
        "digits", ["--optim.lr=1e-3", "--model.options.widths", "8", "16", "--data.augment.flip", "random"]
    )
    assert recipe.optim.lr == 1e-3
    assert recipe.model.options["widths"] == [8, 16]
    assert recipe.data.augment.flip == "random"
    points = '[{at: "0ep", factor: 1.0}, {at: "2ep", factor: 0.5}]'
    words = ["--optim.schedule", f"{{name: piecewise, points: {points}}}", "--optim.schedule.points.1.factor", "0.25"]
    assert load_recipe("digits", words).optim.schedule.points[1].factor == 0.25


@given(
    st.lists(st.tuples(st.from_regex(r"[a-z]+(\.[a-z]+)*", fullmatch=True), st.lists(st.integers(0, 99), min_size=1)))
)
def test_override_words_are_split_into_keys_and_values(pairs: list[tuple[str, list[int]]]) -> None:
    words = [word for key, values in pairs for word in (f"--{key}", *map(str, values))]
    assert list(split_overrides(words)) == [(key, [str(value) for value in values]) for key, values in pairs]


@given(
    seed=st.integers(0, 2**31 - 1),
    lr=st.floats(1e-9, 1e3),
    duration=st.from_regex(r"[1-9][0-9]{0,3}(ep|ba)", fullmatch=True),
    batch=st.integers(1, 10**6),
)
def test_dump_and_load_give_an_equal_recipe(tmp_path_factory, seed, lr, duration, batch) -> None:
    digits = load_recipe("digits")
    recipe = dataclasses.replace(
        digits,
        seed=seed,
        optim=dataclasses.replace(digits.optim, lr=lr),
        train=Train(duration=duration, global_batch=batch),
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe


def test_the_fingerprint_ignores_about() -> None:
    digits = load_recipe("digits")
    assert fingerprint(load_recipe("digits", ["--about.published", "much"])) == fingerprint(digits)
    assert fingerprint(load_recipe("digits", ["--seed", "1"])) != fingerprint(digits)


def test_every_field_has_a_help_text() -> None:
    assert all(row.help.endswith(".") for row in fields())
    assert {row.path for row in fields()} >= {"seed", "optim.schedule.warmup", "data.synthetic.classes"}


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4096))
def test_a_batch_is_divided_exactly_or_refused(ranks: int, accumulation: int, batch: int) -> None:
    recipe = Recipe("any", train=Train(global_batch=batch, grad_accumulation=accumulation))
    if batch % (ranks * accumulation):
        with raises("batch-not-divisible") as caught:
            layouts(recipe, ranks)
        assert caught.value.fields["field"] == "train.global_batch"
        assert (caught.value.fields["batch"], caught.value.fields["ranks"]) == (batch, ranks)
    else:
        layout = layouts(recipe, ranks)[batch]
        assert layout.per_rank_batch * ranks * accumulation == batch
        assert str(layout).endswith(f"= global batch {batch}")


_LAUGHS = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 20)}]\n" for a, b in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (_LAUGHS, "yaml-too-large"),
        ("name: &a [*a]\n", "yaml-undefined-alias"),
        ("name: " + "[" * 10_000, "yaml-too-deep"),
        ('name: a\nseed: !!int ""\n', "invalid-yaml"),
        ("name: a\nseed: " + "9" * 5000, "invalid-yaml"),
    ],
)
def test_untrusted_recipes_cannot_hang_or_crash_the_reader(tmp_path: Path, content: str, code: str) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(content)
    _problem(code, source=path)


def test_the_number_of_reported_problems_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text("name: a\n" + "".join(f"k{number}: 1\n" for number in range(5000)))
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path))
    assert caught.value.problems[-1].code == "too-many-problems"
    assert len(caught.value.problems) == 51


def test_recipes_that_are_not_regular_files_or_too_large_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    with raises("recipe-not-a-file") as caught:
        load_recipe(str(tmp_path / "fifo.yaml"))
    assert "fifo.yaml" in str(caught.value)
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(10**11)
    with pytest.raises(OSError, match=r"large\.yaml") as too_large:
        load_recipe(str(tmp_path / "large.yaml"))
    assert too_large.value.errno == errno.EFBIG


def test_a_cycle_of_bases_is_refused(tmp_path: Path) -> None:
    """However the path is written."""
    (tmp_path / "a.yaml").write_text(f"base: ../{tmp_path.name}/a.yaml\nname: a\n")
    assert "a.yaml -> " in _problem("base-cycle", source=tmp_path / "a.yaml")
