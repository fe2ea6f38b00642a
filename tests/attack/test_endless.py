"""Small inputs that would take for ever, or fill the memory, if they were expanded."""

import pickle

import pytest
import torch

from paceline.config import yamls
from paceline.data.prepare import cifar
from paceline.optim.template import is_count


def test_counters_are_compared_not_searched_for(survived) -> None:
    for value in (0.5, 1e12, -1.0, float("nan"), float("inf")):
        assert not is_count(torch.tensor(value), 10**11)
    assert is_count(torch.tensor(1e6), 10**12)
    survived("inputs that would take for ever", 6)


def test_labels_that_are_nested_tuples(survived) -> None:
    nested: object = (0,) * 10
    for _ in range(60):
        nested = (nested,) * 10
    content = pickle.dumps({b"data": torch.zeros(1, 3072, dtype=torch.uint8).numpy(), b"labels": nested}, protocol=2)
    assert len(content) < 10_000
    with pytest.raises((ValueError, KeyError)):
        cifar._pickled(cifar.CIFAR10, content)
    survived("inputs that would take for ever", 1)


def test_an_alias_bomb_in_a_fetched_recipe(survived) -> None:
    bomb = "a: &a [x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(yamls.yaml.YAMLError):
        yamls.parse(bomb)
    survived("inputs that would take for ever", 1)
