"""TF32 and cudnn.benchmark: set on GPUs, never on CPUs, and not tried for the shapes of evaluation."""

from collections.abc import Iterator

import pytest
import torch
from torch.backends import cudnn

from paceline.engine.kernels import any_shape, choose_kernels


@pytest.fixture(autouse=True)
def flags() -> Iterator[None]:
    kept = current()
    yield
    torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = kept


def current() -> tuple[bool, bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


def test_a_cpu_keeps_its_settings() -> None:
    before = current()
    choose_kernels(torch.device("cpu"), tf32=True)
    assert current() == before


@pytest.mark.parametrize("tf32", [True, False])
def test_matrix_products_and_convolutions_follow_the_recipe_on_gpus(tf32: bool) -> None:
    choose_kernels(torch.device("cuda"), tf32)
    assert current() == (tf32, tf32, True)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")  # other parts of torch can read it


def test_shapes_of_an_evaluation_are_not_benchmarked() -> None:
    """Rectangular batches have many shapes, each of which would be tried on its own."""
    choose_kernels(torch.device("cuda"), tf32=True)
    with any_shape():
        assert not cudnn.benchmark
    assert cudnn.benchmark
    with pytest.raises(ZeroDivisionError), any_shape():
        raise ZeroDivisionError
    assert cudnn.benchmark
