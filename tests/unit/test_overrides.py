"""Overrides of recipes: from Python and on the command line, of groups and of option dictionaries."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import raises
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.data import Augment
from paceline.config.io import dump_recipe, load_recipe
from paceline.config.overrides import words_of
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1e22", 1e22), ("1.5e5", 1.5e5), ("-2E+3", -2e3), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf)],
)
def test_floats_need_no_dot(tmp_path: Path, text: str, value: float) -> None:
    assert load_recipe("digits", ["--model.options", f"{{w: {text}}}"]).model.options == {"w": value}
    (tmp_path / "mine.yaml").write_text(f"base: digits\nname: mine\nmodel: {{options: {{w: {text}}}}}\n")
    recipe = load_recipe(str(tmp_path / "mine.yaml"))
    assert recipe.model.options["w"] == value


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    words = words_of({"model.options": {"a": "1e-5", "b": "1:30.5", "c": "007", "d": ".5"}})
    recipe = load_recipe("digits", words)
    assert list(recipe.model.options.values()) == ["1e-5", "1:30.5", "007", ".5"]
    (tmp_path / "copy.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "copy.yaml")) == recipe


@pytest.mark.parametrize(
    "text", ["/data/set #2", "-x", "--", "-x y", "123", "a: b", "null", "1e5", "[a", "", "é😀\x7f\n "]
)
def test_overrides_in_python_are_not_parsed(text: str) -> None:
    words = words_of({"data.path": text, "data.name": "folder", "data.augment": None})
    assert load_recipe("digits", words).data.path == text
    assert not words[1].startswith("-")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    )
)
def test_overrides_in_python_arrive_unchanged(value: object) -> None:
    assert load_recipe("digits", words_of({"model.options": {"value": value}})).model.options == {"value": value}


def test_values_of_other_types_are_converted_or_refused() -> None:
    given = {
        "optim.lr": np.float32(0.5),
        "optim.momentum": np.float64(0.25),
        "train.global_batch": np.int64(64),
        "optim.nesterov": np.bool_(False),
        "data.mean": (torch.tensor(0.5),),
        "data.std": [np.float64(0.5)],
        "model.options": {"path": Path("a/b"), "sizes": (1, 2)},
    }
    recipe = load_recipe("digits", words_of(given))
    assert (recipe.optim.lr, recipe.optim.momentum, recipe.optim.nesterov) == (0.5, 0.25, False)
    assert (recipe.train.global_batch, recipe.data.mean, recipe.data.std) == (64, (0.5,), (0.5,))
    assert recipe.model.options == {"path": "a/b", "sizes": [1, 2]}
    for value, kind in ((np.ones(2), "ndarray"), (object(), "object"), ({1}, "set")):
        with raises("invalid-override") as caught:
            words_of({"model.options": {"width": value}})
        assert "model.options.width" in str(caught.value)
        assert kind in str(caught.value)
    for wrong in (["--optim.lr"], "optim.lr", {5: 1}, {"": 1}, {"-x": 1}):
        with raises("invalid-override"):
            words_of(wrong)


def test_an_override_of_a_group_keeps_its_other_fields() -> None:
    digits = load_recipe("digits")
    given = "{lr: 0.3, schedule: {warmup: 2ep}, options: {a: 1}}"
    expected = dataclasses.replace(
        digits.optim, lr=0.3, schedule=dataclasses.replace(digits.optim.schedule, warmup="2ep"), options={"a": 1}
    )
    assert load_recipe("digits", ["--optim", given]).optim == expected
    assert load_recipe("digits", ["--model", "{options: {widths: [8]}}"]).model.options == {"widths": [8]}
    with pytest.raises(ConfigError, match="field-is-group"):
        load_recipe("digits", ["--optim", "3"])


@pytest.mark.parametrize("path", ["./photos", "photos"])
def test_a_path_for_data_replaces_the_dataset(path: str) -> None:
    data = load_recipe("cifar10-resnet18", ["--data", path, "--data.augment.translate", "0"]).data
    assert (data.name, data.path, data.augment.flip) == ("", path, "random")
    with pytest.raises(ConfigError, match="field-is-group"):
        load_recipe("digits", ["--data", "cifar10"])


@pytest.mark.parametrize("word", ["*", "[", "{a: 1, a: 2}"])
def test_words_that_are_not_yaml_are_refused_with_a_fix(word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("digits", ["--model.freeze", word])
    (problem,) = caught.value.problems
    assert problem.code == "invalid-value"
    fix = str(caught.value).rpartition("YAML. ")[2]
    assert fix.startswith("Quote it twice: \"['*']\"" if word == "*" else "Check its quotes")


def test_null_removes_what_is_inherited(tmp_path: Path) -> None:
    (tmp_path / "none.yaml").write_text("base: digits\nname: none\nmodel: {options: null}\ndata: {augment: null}\n")
    recipe = load_recipe(str(tmp_path / "none.yaml"))
    assert (recipe.model.options, recipe.data.augment) == ({}, Augment())
    (tmp_path / "again.yaml").write_text("base: none.yaml\nname: again\nmodel: {options: {widths: [8]}}\n")
    assert load_recipe(str(tmp_path / "again.yaml")).model.options == {"widths": [8]}
    words = ["--model.options", "null", "--model.options.norm", "group", "--data.augment", "null"]
    changed = load_recipe("digits", words)
    assert (changed.model.options, changed.data.augment) == ({"norm": "group"}, Augment())
    with pytest.raises(ConfigError, match="invalid-value"):
        load_recipe("digits", ["--optim.lr", "null"])
