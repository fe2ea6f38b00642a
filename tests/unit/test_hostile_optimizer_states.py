"""Untrusted states of optimizers that are not built in: an error or harmless, never an exception of the optimizer."""

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_net import config, net, train
from torch import nn

from paceline.checkpoint.state import HostCopies
from paceline.config.optim import Optim
from paceline.distributed.mesh import ShardId
from paceline.errors import UserError
from paceline.optim.factory import construct
from paceline.optim.groups import groups
from paceline.optim.state import load_state, state_dict

NAMES = ("adam", "nadam", "nadamlegacy", "lion", "laprop", "madgrad", "adopt", "rmsproptf", "lars", "adan", "adagrad")
FACTORED = ("muon", "adafactor", "adafactorbv", "clamb", "lookahead_adam")

pytestmark = pytest.mark.usefixtures("one_thread")


def _full(value: Any, number: float) -> Any:
    return torch.full_like(value, number) if isinstance(value, torch.Tensor) else number


CHANGES: dict[str, Callable[[Any], Any]] = {
    "NaN": lambda value: _full(value, math.nan),
    "infinity": lambda value: _full(value, math.inf),
    "negative": lambda value: _full(value, -1),
    "huge": lambda value: _full(value, 1e30),
    "an enormous integer": lambda value: 10**400,
    "two": lambda value: _full(value, 2),
    "zero": lambda value: _full(value, 0),
    "larger": lambda value: value.new_zeros(1000) if isinstance(value, torch.Tensor) else [value] * 9,
    "other type": lambda value: value.to(torch.float16) if isinstance(value, torch.Tensor) else str(value),
    "bytes": lambda value: value.to(torch.uint8) if isinstance(value, torch.Tensor) else not value,
    "null": lambda value: None,
    "list": lambda value: [1, 2],
    "tensor": lambda value: torch.zeros(3),
}


def _hostile(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield copies of a state with one value changed, removed or added each."""

    def copies(path: tuple[Any, ...], name: Any, values: list[Any]) -> Iterator[dict[str, Any]]:
        for value in values:
            other = copy.deepcopy(state)
            node: Any = other
            for key in path:
                node = node[key]
            if value is ...:
                del node[name]
            else:
                node[name] = value
            yield other

    for number in (0, max(state["state"])):
        for name, value in state["state"][number].items():
            yield from copies(("state", number), name, [..., *(change(value) for change in CHANGES.values())])
        for name in ("more", 5):
            yield from copies(("state", number), name, [torch.zeros(7), torch.ones(5), [1], {"a": 1}, "x", math.inf])
    for name, value in state["param_groups"][0].items():
        if isinstance(value, int | float | torch.Tensor):
            yield from copies(("param_groups", 0), name, [change(value) for change in CHANGES.values()])
    yield from copies(("state",), 99, [{"step": 1}])
    yield from copies(("param_groups", 0), "params", [..., [], "x"])
    yield from copies((), "param_groups", [state["param_groups"][1:]])


def _new(settings: Optim) -> torch.optim.Optimizer:
    """An optimizer of a filter and a bias."""
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((18, 17, 3, 3), (5,))]
    return construct([{"params": [weight], "weight_decay": 0.1, "scale": 1.0} for weight in weights], settings)


def _step(optimizer: torch.optim.Optimizer, times: int = 1) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("name", [*NAMES, *FACTORED])
def test_hostile_states_are_refused_or_harmless(name: str) -> None:
    settings = config(name)
    optimizer = _new(settings)
    _step(optimizer, 7)
    codes = []
    for state in _hostile(HostCopies().take(state_dict(optimizer), ShardId())):
        victim = _new(settings)
        try:
            load_state(victim, settings, state, 7, "checkpoint")
        except UserError as error:
            codes.append(error.code)
        else:
            _step(victim)
    assert len(codes) > 30
    assert set(codes) == {"checkpoint-optimizer-mismatch"}


@pytest.mark.parametrize("name", ["adagrad", "adam", "muon"])
def test_parameters_without_state_start_anew(name: str, caplog) -> None:
    """As those of layers that were not used. Adagrad creates its state before the first step."""
    settings, model = config(name), net()
    optimizer = construct(groups(model, settings), settings)
    train(model, optimizer, 0)
    state = HostCopies().take(state_dict(optimizer), ShardId())
    del state["state"][0]
    state["state"][1] = {}
    new = construct(groups(model, settings), settings)
    load_state(new, settings, state, 1, "checkpoint")
    train(model, new, 1)
    assert len(new.state_dict()["state"]) == len(state["state"]) + 1
