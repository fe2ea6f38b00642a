"""The moving average of weights."""

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from paceline.config.optim import Ema
from paceline.optim.ema import AveragedModel, decay_at


def test_ema_averages_weights_and_copies_counters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(model, Ema(decay=0.9, every=2))
    before = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
        model[1].num_batches_tracked.fill_(7)
    average.update(model, step=1)
    assert torch.equal(average.model[0].weight, before)
    average.update(model, step=200)
    assert torch.allclose(average.model[0].weight, before + 0.1)
    assert average.model[1].num_batches_tracked == 7


def test_ema_is_that_of_the_script_of_torchvision() -> None:
    """AveragedModel whose counter is reset during the warmup of the learning rate, so that it copies the weights."""
    model = nn.Linear(3, 2)
    reference = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    average = AveragedModel(model, Ema(decay=0.9, every=2, decay_schedule="constant", start="6ba"), total=20, start=6)
    for step in range(1, 21):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3, generator=torch.Generator().manual_seed(step)))
        average.update(model, step)
        if step % 2 == 0:
            reference.update_parameters(model)
            if step <= 6:
                reference.n_averaged.fill_(0)
        if step > 1:
            torch.testing.assert_close(average.model.weight, reference.module.weight)


@pytest.mark.parametrize("every", [1, 5])
def test_decay_over_time(every: int) -> None:
    warmup, constant, cubic = (Ema(0.9, every, schedule) for schedule in ("warmup", "constant", "cubic"))
    assert [decay_at(every * u, warmup, 1000) for u in (1, 10, 200)] == pytest.approx([2 / 11, 11 / 20, 0.9])
    assert decay_at(every, constant, 1000) == 0.9
    assert [decay_at(step, cubic, 1000) for step in (500, 1000)] == pytest.approx([0.9 / 8, 0.9])


def test_lookahead_copies_the_average_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(model, Ema(decay=0.5, every=2, decay_schedule="constant", lookahead=True))
    before = model[0].weight.detach().clone()
    for step in (1, 2):
        with torch.no_grad():
            model[0].weight.add_(1.0)
            model[1].running_mean.add_(2.0)
            model[1].num_batches_tracked.add_(1)
        average.update(model, step)
    for each in (model, average.model):
        torch.testing.assert_close(each[0].weight.detach(), before + 1)
        assert each[1].running_mean.tolist() == [2.0, 2.0]
        assert each[1].num_batches_tracked == 2


class Reassigning(nn.Module):
    """Shares a weight between layers, replaces a buffer in every step and has one that checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def step(self) -> None:
        self.seen, self.cache = self.seen + 1, self.cache + 1
        with torch.no_grad():
            self.first.weight += 1


def test_ema_follows_buffers_that_are_replaced_and_counts_shared_weights_once() -> None:
    model = Reassigning()
    average = AveragedModel(model, Ema(decay=0.5))
    begin = model.first.weight.detach().clone()
    for step in range(1000, 1003):  # after the warmup of the decay
        model.step()
        average.update(model, step)
    assert average.model.seen.item() == 0.5 * 3 + 0.25 * 2 + 0.125
    assert torch.allclose(average.model.first.weight, begin + 0.5 * 3 + 0.25 * 2 + 0.125)
    assert average.model.first.weight is average.model.second.weight
    assert average.model.cache.item() == 0


class _Copying(nn.Linear):
    def state_dict(self, *arguments, **options):
        return {name: tensor.clone() for name, tensor in super().state_dict(*arguments, **options).items()}


def test_ema_averages_models_whose_state_is_a_copy() -> None:
    model = _Copying(2, 2)
    average = AveragedModel(model, Ema(decay=0.5))
    begin = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    average.update(model, 1000)
    assert torch.allclose(average.model.weight, begin + 0.5)


def test_ema_is_updated_without_reading_the_state_in_every_step(monkeypatch) -> None:
    """Also after weights were loaded, which are copied into the same tensors."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = AveragedModel(model, Ema(decay=0.5))
    average.update(model, 1000)
    average.model.load_state_dict({key: torch.ones_like(value) for key, value in model.state_dict().items()})
    model.load_state_dict({key: torch.full_like(value, 3) for key, value in model.state_dict().items()})
    read, calls = nn.Module.state_dict, []
    monkeypatch.setattr(nn.Module, "state_dict", lambda *a, **k: calls.append(a) or read(*a, **k))
    average.update(model, 1001)
    assert not calls
    assert {value.mean().item() for key, value in read(average.model).items() if "num" not in key} == {2.0}
