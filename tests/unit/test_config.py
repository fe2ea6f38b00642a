import dataclasses
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.batch import layouts
from paceline.config.duration import parse
from paceline.config.io import dump_recipe, fields, fingerprint, load_recipe, split_overrides
from paceline.config.recipe import Recipe, Train
from paceline.config.timeline import Timeline
from paceline.errors import ConfigError, UserError


@pytest.mark.parametrize(("text", "steps"), [("10ep", 1000), ("0.5ep", 50), ("500ba", 500), ("9.9ep", 990), ("0ba", 0)])
def test_durations_become_steps(text: str, steps: int) -> None:
    recipe = Recipe("any", train=Train(global_batch=10))
    assert Timeline.of(recipe, 1000).steps(text) == steps


@pytest.mark.parametrize("text", ["10", "ep", "10 ep", "-1ep", "1e3ba", "10epochs", ""])
def test_durations_without_a_unit_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number and a unit"):
        parse(text)


def test_every_mistake_is_reported_at_once_with_path_value_and_cure(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("name: bad\noptim: {lrr: 0.1, momentum: 1.5}\ntrain: {duration: 10}\nprecission: bf16\nmodle: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_recipe(str(path), ["--data.name", "digit", "--train.global-batch", "many", "--evaluate.every"])
    text = str(caught.value)
    assert "8 problems" in text
    assert "optim.lrr=0.1: no such field; did you mean optim.lr?" in text
    assert "precission='bf16': no such field; did you mean precision?" in text
    assert "optim.momentum=1.5" in text
    assert "modle={}: no such field; did you mean model?" in text
    assert 'train.duration=10: write a number and a unit: "10ep" (epochs), "500ba" (steps)\n' in text
    assert "data.name='digit': should be '', 'digits', 'cifar10', 'synthetic'" in text
    assert "train.global_batch='many'" in text
    assert "--evaluate.every: value missing" in text


def test_mistakes_between_fields_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(
            "digits", ["--train.grad_accumulation", "3", "--data.mean", "[0.5]", "--optim.schedule.name", "piecewise"]
        )
    assert len(caught.value.problems) == 3
    assert "try 126 or 129" in str(caught.value)


def test_seconds_are_refused_where_a_schedule_needs_its_end() -> None:
    with pytest.raises(ConfigError, match="the schedule must know its end"):
        load_recipe("digits", ["--train.duration", "90s"])
    assert load_recipe("digits", ["--checkpoint.every", "90s"]).checkpoint.every == "90s"


def test_numbers_are_read_as_people_mean_them(tmp_path: Path) -> None:
    assert load_recipe("digits", ["--train.global_batch", "010"]).train.global_batch == 10
    with pytest.raises(ConfigError, match=r"train.global_batch='1:30'"):
        load_recipe("digits", ["--train.global_batch", "1:30"])


def test_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    text = "name: a\ndata: {name: digits}\noptim: &base {lr: 0.5}\nmodel: {options: {<<: *base, widths: [8]}}\n"
    path.write_text(text)
    assert load_recipe(str(path)).model.options == {"lr": 0.5, "widths": [8]}


def test_a_mistake_in_the_yaml_is_shown_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text("name: a\noptim:\n  lr: 0.1\n momentum: 3\n")
    with pytest.raises(ConfigError, match=r"line 4, column 2: .*\n +momentum: 3\n +\^"):
        load_recipe(str(path))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("name: a\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="'seed' is given twice"):
        load_recipe(str(path))


def test_unknown_recipes_get_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean 'digits'"):
        load_recipe("digit")
    with pytest.raises(UserError, match="no such file"):
        load_recipe("nowhere/recipe.yaml")


@pytest.mark.parametrize("content", ["", "- a\n- b\n", "{unclosed", "\x00"])
def test_files_that_are_no_recipe_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError):
        load_recipe(str(path))


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
def test_override_words_split_and_join(pairs: list[tuple[str, list[int]]]) -> None:
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


def test_the_fingerprint_is_of_the_experiment_not_of_its_story() -> None:
    digits = load_recipe("digits")
    assert fingerprint(load_recipe("digits", ["--about.measured", "much"])) == fingerprint(digits)
    assert fingerprint(load_recipe("digits", ["--seed", "1"])) != fingerprint(digits)


def test_every_field_has_a_help_sentence() -> None:
    assert all(row.help.endswith(".") for row in fields())
    assert {row.path for row in fields()} >= {"seed", "optim.schedule.warmup", "data.synthetic.classes"}


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 4096))
def test_the_batch_is_shared_out_exactly_or_refused(ranks: int, accumulation: int, batch: int) -> None:
    recipe = Recipe("any", train=Train(global_batch=batch, grad_accumulation=accumulation))
    if batch % (ranks * accumulation):
        with pytest.raises(UserError, match=f"train.global_batch={batch} is not a multiple of {ranks} ranks"):
            layouts(recipe, ranks)
    else:
        layout = layouts(recipe, ranks)[batch]
        assert layout.per_rank_batch * ranks * accumulation == batch
        assert str(layout).endswith(f"= global batch {batch}")


_LAUGHS = "a: &a [x]\n" + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 20)}]\n" for a, b in pairwise("abcdefghi"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (_LAUGHS, "with its aliases written out"),
        ("name: &a [*a]\n", "refers to nothing before it"),
        ("name: " + "[" * 10_000, "nested more than 50 levels deep"),
        ('name: a\nseed: !!int ""\n', "not readable as YAML"),
        ("name: a\nseed: " + "9" * 5000, "not readable as YAML"),
        ("name: a\n" + "".join(f"k{number}: 1\n" for number in range(5000)), "and more; is this a recipe?"),
    ],
)
def test_recipes_that_would_hang_or_crash_their_reader_are_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "hostile.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_recipe(str(path))


def test_recipes_that_are_not_files_or_too_large_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(UserError, match=r"fifo\.yaml is not a regular file"):
        load_recipe(str(tmp_path / "fifo.yaml"))
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(10**11)
    with pytest.raises(OSError, match="too large to be read"):
        load_recipe(str(tmp_path / "large.yaml"))


def test_recipes_that_build_on_one_another_in_a_circle_are_refused(tmp_path: Path) -> None:
    """However the path is spelled."""
    (tmp_path / "a.yaml").write_text(f"base: ../{tmp_path.name}/a.yaml\nname: a\n")
    with pytest.raises(ConfigError, match="goes round in a circle"):
        load_recipe(str(tmp_path / "a.yaml"))
