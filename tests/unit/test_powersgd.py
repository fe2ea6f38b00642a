"""PowerSGD on a single rank: what it sends, and the error that it keeps."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.distributed import powersgd as module
from paceline.distributed.powersgd import PowerSgd, by_reflections
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


def _scaler(scale: float) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))  # initializes the scale
    return scaler


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
    scaler = _scaler(2.0**20)
    with powersgd.following(scaler):
        scaler.update(2.0**19)
    for _ in range(3):
        first, second = _sent(powersgd, good, good)
    assert (first - good).norm() < 1e-3 * good.norm()
    assert (second - good).norm() < 1e-3 * good.norm()


def test_the_error_is_rescaled_with_the_loss_scale(powersgd: PowerSgd) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(32, 48)
    (sent,) = _sent(powersgd, matrix)
    error = matrix - sent
    scaler = _scaler(1.0)
    with powersgd.following(scaler):
        scaler.update(4.0)
    (rest,) = _sent(powersgd, torch.zeros(32, 48))
    assert rest.norm() <= 4 * error.norm()
    assert rest.norm() > error.norm()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 2, 16])
def test_reflections_give_orthonormal_bases_of_a_whole_batch(rank: int, scale: float) -> None:
    """Padded with zero rows, with dependent columns, and of zeros."""
    torch.manual_seed(0)
    stack = torch.randn(4, 48, rank)
    stack[1, 20:] = 0
    stack[2, :, -1] = stack[2, :, 0]
    stack[3] = 0
    bases = by_reflections(scale * stack)
    assert torch.allclose(bases.mT @ bases, torch.eye(rank), atol=1e-5)
    assert torch.allclose(bases @ (bases.mT @ stack), stack, atol=1e-4)
    assert not bases[1, 20:].any()


def test_reflections_send_the_same_gradients_as_qr(powersgd: PowerSgd, monkeypatch) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(32, 48), torch.randn(24, 64), torch.randn(5)]
    other = PowerSgd(World(), rank=2, start_step=2)
    for _ in range(2):
        other.average(None, Bucket(torch.zeros(32, 48)))
    for _ in range(5):
        expected = _sent(powersgd, *gradients)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_orthonormal", by_reflections)
            found = _sent(other, *gradients)
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected, strict=True))
