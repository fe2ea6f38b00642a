"""PowerSGD on a lone rank: what it sends, and what it remembers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.distributed.powersgd import PowerSgd
from paceline.distributed.world import World


class Bucket:
    """As DDP hands it over: two matrices and a vector in one buffer."""

    def __init__(self, *gradients: torch.Tensor):
        self._gradients = gradients
        self._buffer = torch.cat([gradient.flatten() for gradient in gradients])

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([gradient.numel() for gradient in self._gradients])
        return [part.view_as(gradient) for part, gradient in zip(parts, self._gradients, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return list(self._gradients)


class Scaler:
    """The loss scale before and after an update."""

    def __init__(self, before: float, after: float):
        self._scales = iter((before, after))

    def get_scale(self) -> float:
        return next(self._scales)


@pytest.fixture
def exchange(tmp_path: Path) -> Iterator[PowerSgd]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    exchange = PowerSgd(World(), rank=2, after=2)
    for _ in range(2):  # whole gradients
        exchange.average(None, Bucket(torch.zeros(32, 48)))
    yield exchange
    dist.destroy_process_group()


def _sent(exchange: PowerSgd, *gradients: torch.Tensor) -> list[torch.Tensor]:
    bucket = Bucket(*gradients)
    exchange.average(None, bucket)
    return [gradient.clone() for gradient in bucket.gradients()]


def test_what_a_step_misses_comes_with_the_next_ones(exchange: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix, vector = torch.randn(32, 48), torch.randn(5)
    sums = torch.zeros(32, 48)
    for _ in range(400):
        approximation, whole = _sent(exchange, matrix, vector)
        assert torch.linalg.matrix_rank(approximation) <= 2
        assert torch.equal(whole, vector)  # too small to be worth it
        sums += approximation
    assert (sums / 400 - matrix).norm() < 0.1 * matrix.norm()


def test_a_matrix_of_low_rank_is_sent_as_it_is(exchange: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 1) @ torch.randn(1, 48)
    for _ in range(3):
        (sent,) = _sent(exchange, matrix)
    assert (sent - matrix).norm() < 1e-4 * matrix.norm()


def test_a_step_that_overflowed_leaves_nothing_behind(exchange: PowerSgd) -> None:
    torch.manual_seed(0)
    good = torch.randn(32, 1) @ torch.randn(1, 48)
    bad = torch.full((32, 48), torch.inf)
    sent = _sent(exchange, 2.0**20 * good + torch.randn(32, 48), bad)
    assert not sent[1].isfinite().any()
    with exchange.following(Scaler(2.0**20, 2.0**19)):
        pass
    for _ in range(3):
        first, second = _sent(exchange, good, good)
    assert (first - good).norm() < 1e-3 * good.norm()
    assert (second - good).norm() < 1e-3 * good.norm()


def test_what_was_missed_follows_a_larger_loss_scale(exchange: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 48)
    (sent,) = _sent(exchange, matrix)
    missed = matrix - sent
    with exchange.following(Scaler(1.0, 4.0)):
        pass
    (rest,) = _sent(exchange, torch.zeros(32, 48))
    assert rest.norm() <= 4 * missed.norm()
    assert rest.norm() > missed.norm()
