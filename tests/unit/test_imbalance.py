"""Balanced sampling and class weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import one_epoch, raises
from hypothesis import given
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

from paceline.config.data import Data
from paceline.config.io import dump_recipe, load_recipe, recipe_from_tree
from paceline.config.recipe import Recipe, Train
from paceline.data.classes import Class
from paceline.data.load.in_memory import ResidentLoader
from paceline.data.load.order import Plan, balanced_order
from paceline.data.sets import load
from paceline.engine.class_weights import class_weights
from paceline.engine.objective import Objective

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=80)
TREE = {"name": "any", "data": {"name": "digits"}}


@given(labels=LABELS, seed=st.integers(0, 2**31 - 1), epochs=st.integers(1, 7))
def test_every_class_and_every_image_of_a_class_is_drawn_equally_often(labels, seed, epochs) -> None:
    tensor, num = torch.tensor(labels), len(labels)
    present = tensor.unique()
    total = torch.zeros(num, dtype=torch.int64)
    for epoch in range(epochs):
        keys = balanced_order(seed, epoch, tensor)
        assert len(keys) == num
        assert len(keys.unique()) == num
        per_class = tensor[keys % num].bincount(minlength=7)[present]
        assert per_class.max() - per_class.min() <= 1
        total += (keys % num).bincount(minlength=num)
        classes = torch.zeros(7, dtype=torch.int64).index_add_(0, tensor, total)[present]
        assert classes.max() - classes.min() <= 1
        for label in present:
            images = total[tensor == label]
            assert images.max() - images.min() <= 1


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    labels = torch.tensor([0] * 90 + [1] * 10)
    assert torch.equal(balanced_order(1, 2, labels), balanced_order(1, 2, labels))
    orders = {tuple(balanced_order(seed, epoch, labels).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    # rounds differ in their order, too: the first ten images of class 1 are drawn in every epoch in another order
    rounds = {tuple(key for key in balanced_order(0, epoch, labels).tolist() if 90 <= key < 100) for epoch in range(5)}
    assert len(rounds) == 5
    draws = torch.cat([balanced_order(seed, 0, labels) % 100 for seed in range(400)])
    drawn = draws[draws < 90].bincount(minlength=90)  # 50 of 90 images per epoch, without preference
    assert ((drawn - 400 * 50 / 90) ** 2 / (400 * 50 / 90 * 40 / 90)).sum() < 160  # 89 degrees of freedom


def _loader(ranks: int, rank: int, accumulation: int = 1) -> ResidentLoader:
    data = Data(name="digits", sampler="balanced")
    images = load(data)
    recipe = Recipe("any", seed=3, data=data, train=Train(global_batch=48, grad_accumulation=accumulation))
    plan = Plan.of(recipe, len(images.train), ranks, rank, images.train.labels)
    return ResidentLoader(data, images, plan, torch.device("cpu"))


def test_batches_are_the_same_on_any_number_of_ranks_and_after_a_resume() -> None:
    alone = one_epoch(_loader(1, 0), 1)
    for ranks, accumulation in ((2, 1), (2, 3), (4, 1)):
        parts = [one_epoch(_loader(ranks, rank, accumulation), 1, first_step=0) for rank in range(ranks)]
        for (whole,), *micro in zip(alone, *parts, strict=True):
            assert torch.equal(torch.cat([batch.ids for rank in micro for batch in rank]), whole.ids)
    rest = one_epoch(_loader(1, 0), 1, first_step=7)
    assert [batch.ids.tolist() for (batch,) in rest] == [batch.ids.tolist() for (batch,) in alone[7:]]


# ---- class weights ----

CLASSES = [Class("n1", "cat"), Class("n2", "dog"), Class("n3", "crane"), Class("n4", "crane")]
COUNTED = torch.tensor([0] * 6 + [1] * 3 + [2])


def _weights(value: object, labels: torch.Tensor | None = COUNTED, sampler: str = "shuffle") -> torch.Tensor | None:
    tree = TREE | {"train": {"class_weights": value}, "data": {"name": "digits", "sampler": sampler}}
    return class_weights(recipe_from_tree(tree, "test"), CLASSES, labels)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    weights = _weights("balanced")
    theirs = compute_class_weight("balanced", classes=np.arange(3), y=COUNTED.numpy())
    assert weights is not None
    assert weights[:3].tolist() == pytest.approx(theirs)
    assert weights[3] == 1  # it has no images


def test_given_weights_are_scaled_to_a_mean_of_one_over_the_images_as_drawn() -> None:
    weights = _weights({"dog": 4, "n3": 2.0})
    assert weights is not None
    assert weights[COUNTED].mean() == pytest.approx(1)
    assert (weights / weights[0]).tolist() == pytest.approx([1, 4, 2, 1])
    drawn = _weights({"dog": 4}, sampler="balanced")
    assert drawn is not None
    assert drawn[:3].mean() == pytest.approx(1)
    assert _weights("none") is None
    assert _weights({}) is None


@pytest.mark.parametrize(("name", "words"), [("cta", "cat"), ("crane", "n3, n4"), ("zebra", "cat, dog")])
def test_unknown_and_ambiguous_classes_are_errors(name, words) -> None:
    with raises("unknown-class") as caught:
        _weights({name: 2.0})
    assert words in str(caught.value)


def test_labels_must_be_known() -> None:
    with raises("labels-unknown"):
        _weights("balanced", None)
    with raises("labels-unknown"):
        Plan.of(Recipe("any", data=Data(name="digits", sampler="balanced"), train=Train(global_batch=2)), 10)


@pytest.mark.parametrize("value", ["even", 3, {"cat": 0}, {"cat": -1}, {"cat": True}, {"cat": "2"}, {"cat": np.inf}])
def test_invalid_weights_are_errors_of_the_recipe(value) -> None:
    with raises("invalid-recipe") as caught:
        _weights(value)
    assert [problem.code for problem in caught.value.problems] == ["invalid-value"]


def test_recipes_are_written_and_read_again(tmp_path) -> None:
    for value in ("balanced", {"0": 2.0, "1": 0.5}):
        recipe = recipe_from_tree(TREE | {"train": {"class_weights": value}}, "test")
        (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(str(tmp_path / "recipe.yaml")) == recipe
        assert recipe.train.class_weights == value
    assert load_recipe("digits", ["--train.class_weights.0", "2"]).train.class_weights == {"0": 2.0}


@pytest.mark.parametrize(
    ("code", "data", "train"),
    [
        ("balanced-twice", {"sampler": "balanced"}, {"class_weights": "balanced"}),
        ("sampler-and-aug-repeats", {"sampler": "balanced", "aug_repeats": 3}, {}),
    ],
)
def test_contradicting_settings_are_errors(code, data, train) -> None:
    with raises("invalid-recipe") as caught:
        recipe_from_tree(TREE | {"data": {"name": "digits", **data}, "train": train}, "test")
    assert [problem.code for problem in caught.value.problems] == [code]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixing", [{}, {"mixup": 0.4}])
@pytest.mark.parametrize("loss", ["cross-entropy", "bce"])
def test_the_loss_of_a_batch_is_the_mean_over_its_parts(loss, mixing, smoothing) -> None:
    """So it is the same on any number of ranks and accumulation steps; torch's weighted mean is not."""
    weights = torch.tensor([0.2, 1.0, 3.0])
    logits, labels = (
        torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 0, 0, 1, 2, 2, 1, 0]),
    )
    config = Train(loss=loss, label_smoothing=smoothing, **mixing)
    objective = Objective(config, 3, 0, weights)
    targets = labels
    if loss == "bce" or mixing:
        targets = F.one_hot(labels, 3).float() * (1 - smoothing) + smoothing / 3
    whole = objective.loss(logits, targets)
    parts = [objective.loss(logits[part], targets[part]) for part in (slice(0, 4), slice(4, 8))]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)
    if loss == "cross-entropy" and not mixing:
        theirs = F.cross_entropy(logits, labels, weights, label_smoothing=smoothing) * weights[labels].sum() / 8
        torch.testing.assert_close(whole, theirs)
        both = F.one_hot(labels, 3).float() * (1 - smoothing) + smoothing / 3
        torch.testing.assert_close(whole, F.cross_entropy(logits, both, weights))
    if loss == "bce" and not smoothing:
        each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
        torch.testing.assert_close(whole, (each * weights[labels]).mean())
    plain = Objective(config, 3, 0).loss(logits, targets)
    torch.testing.assert_close(Objective(config, 3, 0, torch.ones(3)).loss(logits, targets), plain)
    assert not torch.isclose(plain, whole)


def test_registered_losses_do_not_take_class_weights() -> None:
    recipe = recipe_from_tree(TREE | {"train": {"class_weights": {"0": 2.0}}}, "test")
    from paceline.config.problems import problems

    named = replace(recipe, imports=("some",), train=replace(recipe.train, loss="my-loss"))
    assert "class-weights-unused" in [problem.code for problem in problems(named)]
