"""PowerSGD on a single rank: what it sends, and the error that it keeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.distributed.powersgd import PowerSgd
from paceline.distributed.world import World


class Bucket:
    """Stands in for DDP's GradBucket: several gradients in one buffer."""

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
    """Stands in for GradScaler, with the loss scale before and after an update."""

    def __init__(self, before: float, after: float):
        self._scales = iter((before, after))

    def get_scale(self) -> float:
        return next(self._scales)


@pytest.fixture
def powersgd(tmp_path: Path) -> Iterator[PowerSgd]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    powersgd = PowerSgd(World(), rank=2, start_step=2)
    for _ in range(2):  # uncompressed steps
        powersgd.average(None, Bucket(torch.zeros(32, 48)))
    yield powersgd
    dist.destroy_process_group()


def _sent(powersgd: PowerSgd, *gradients: torch.Tensor) -> list[torch.Tensor]:
    bucket = Bucket(*gradients)
    powersgd.average(None, bucket)
    return [gradient.clone() for gradient in bucket.gradients()]


def test_the_error_of_a_step_is_sent_with_the_next_ones(powersgd: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix, vector = torch.randn(32, 48), torch.randn(5)
    sums = torch.zeros(32, 48)
    for _ in range(400):
        approximation, uncompressed = _sent(powersgd, matrix, vector)
        assert torch.linalg.matrix_rank(approximation) <= 2
        assert torch.equal(uncompressed, vector)  # too small to compress
        sums += approximation
    assert (sums / 400 - matrix).norm() < 0.1 * matrix.norm()


def test_a_low_rank_matrix_is_sent_exactly(powersgd: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 1) @ torch.randn(1, 48)
    for _ in range(3):
        (sent,) = _sent(powersgd, matrix)
    assert (sent - matrix).norm() < 1e-4 * matrix.norm()


def test_an_overflowed_step_leaves_no_error(powersgd: PowerSgd) -> None:
    torch.manual_seed(0)
    good = torch.randn(32, 1) @ torch.randn(1, 48)
    bad = torch.full((32, 48), torch.inf)
    sent = _sent(powersgd, 2.0**20 * good + torch.randn(32, 48), bad)
    assert not sent[1].isfinite().any()
    with powersgd.following(Scaler(2.0**20, 2.0**19)):
        pass
    for _ in range(3):
        first, second = _sent(powersgd, good, good)
    assert (first - good).norm() < 1e-3 * good.norm()
    assert (second - good).norm() < 1e-3 * good.norm()


def test_the_error_is_rescaled_with_the_loss_scale(powersgd: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 48)
    (sent,) = _sent(powersgd, matrix)
    error = matrix - sent
    with powersgd.following(Scaler(1.0, 4.0)):
        pass
    (rest,) = _sent(powersgd, torch.zeros(32, 48))
    assert rest.norm() <= 4 * error.norm()
    assert rest.norm() > error.norm()
