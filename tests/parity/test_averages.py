"""Moving averages, Lookahead and optimizers equal those of timm, torch and torchvision's scripts at every step."""

from copy import deepcopy

import pytest
import torch
from timm.optim import Lookahead, create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel as TorchAverage

from paceline.config.optim import Ema, Optim
from paceline.optim.ema import AveragedModel
from paceline.optim.groups import create, set_lr

STEPS = 40


def _model(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(6) if norm else nn.GroupNorm(2, 6)
    return nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), middle, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))


def _backward(model: nn.Module, step: int) -> None:
    """Leave the gradients of one batch in the model."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(8, 3, 8, 8, generator=generator)
    labels = torch.randint(4, (8,), generator=generator)
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("start", [1, 7, 20])
def test_the_average_is_that_of_timm(start: int) -> None:
    """ModelEmaV3, which copies the weights until the first update after `update_after_step`."""
    model = _model()
    ours = AveragedModel(model, Ema(0.9, decay_schedule="constant", start=f"{start}ba"), STEPS, start)
    theirs = ModelEmaV3(model, decay=0.9, update_after_step=start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        _backward(model, step)
        optimizer.step()
        ours.update(model, step)
        theirs.update(model, step)
        _assert_same(ours.model, theirs.module)


class _OfScript(TorchAverage):
    """The average of torchvision's training script: of parameters and buffers."""

    def __init__(self, model: nn.Module, decay: float):
        def average(old: torch.Tensor, new: torch.Tensor, _count: object) -> torch.Tensor:
            return decay * old + (1 - decay) * new

        super().__init__(model, avg_fn=average, use_buffers=True)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("warmup", [0, 12])
def test_the_average_is_that_of_torchvision(every: int, warmup: int) -> None:
    """It is updated in every n-th step, and its count is reset during the warmup of the learning rate."""
    model = _model()
    config = Ema(0.9, every, "constant", start=f"{warmup}ba")
    ours, theirs = AveragedModel(model, config, STEPS, warmup), _OfScript(model, 0.9)
    theirs.n_averaged.fill_(int(not warmup))  # without a warmup the script begins with a copy, Paceline with an update
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        _backward(model, step)
        optimizer.step()
        ours.update(model, step)
        if step % every:
            continue
        theirs.update_parameters(model)
        if step <= warmup:
            theirs.n_averaged.fill_(0)
        if step > warmup:
            for name, value in theirs.module.state_dict().items():
                if value.is_floating_point():
                    torch.testing.assert_close(ours.model.state_dict()[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_the_warmup_of_the_decay_is_that_of_tensorflow() -> None:
    """ExponentialMovingAverage with num_updates: min(decay, (1 + updates) / (10 + updates)), here on one weight."""
    model = nn.Linear(1, 1, bias=False)
    ours = AveragedModel(model, Ema(0.9, every=2), STEPS)
    expected = model.weight.item()
    for step in range(1, 2 * 120 + 1):
        with torch.no_grad():
            model.weight.fill_(float(step))
        ours.update(model, step)
        if step % 2 == 0:
            decay = min(0.9, (1 + step // 2) / (10 + step // 2))
            expected = decay * expected + (1 - decay) * step
        assert ours.model.weight.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("alpha", "every"), [(0.5, 6), (0.2, 5)])
def test_lookahead_is_that_of_timm(alpha: float, every: int) -> None:
    """Weights after every step. timm copies its slow weights at the first synchronization, done here before step 1."""
    model = _model(norm=False)
    other = deepcopy(model)
    config = Ema(1 - alpha, every, "constant", lookahead=True)
    average = AveragedModel(model, config, STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = Lookahead(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), alpha=alpha, k=every)
    for parameter in other.parameters():
        parameter.grad = torch.zeros_like(parameter)
    theirs.sync_lookahead()
    for step in range(1, STEPS + 1):
        for each, stepped in ((model, optimizer), (other, theirs)):
            _backward(each, step)
            stepped.step()
        average.update(model, step)
        _assert_same(model, other)


OPTIMIZERS = [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": False}),
    ("adamw", {}),
    ("adamw", {"betas": (0.8, 0.95), "eps": 1e-6}),
    ("lamb", {"eps": 1e-6}),
    ("lion", {}),
    ("rmsproptf", {"momentum": 0.9}),
    ("lars", {"momentum": 0.9}),
]


@pytest.mark.parametrize(("name", "fields"), OPTIMIZERS)
def test_optimizers_step_as_those_of_timms_factory(name: str, fields: dict[str, object]) -> None:
    """With weight decay on filters and matrices only, and a learning rate that changes in every step."""
    model = _model()
    other = deepcopy(model)
    lr, decay = 0.05 if "momentum" in fields else 0.005, 0.05
    ours = create(model, Optim(name=name, lr=lr, weight_decay=decay, **fields))  # type: ignore[arg-type]
    given = {"momentum": 0.9} | fields
    kind = "momentum" if given.pop("nesterov", True) is False else name
    if name == "lamb":
        given["betas"] = (0.9, 0.999)
    if name not in ("sgd", "rmsproptf", "lars"):
        del given["momentum"]
    theirs = create_optimizer_v2(other, opt=kind, lr=lr, weight_decay=decay, **given)
    rates = [lr * (1 - step / STEPS) for step in range(STEPS)]
    for step, rate in enumerate(rates):
        set_lr(ours, rate)
        for group in theirs.param_groups:
            group["lr"] = rate
        for each, optimizer in ((model, ours), (other, theirs)):
            _backward(each, step)
            optimizer.step()
        for (parameter, found), expected in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5, msg=parameter)  # fused kernels round
