"""The data type of images under autocast: lower only where the model casts them anyway."""

import pytest
import torch
from torch import nn

from paceline.config.recipe import Train
from paceline.data.classes import Class
from paceline.data.load.batch import Batch
from paceline.distributed.world import World
from paceline.engine.evaluation.evaluate import evaluate, predict
from paceline.engine.input_dtype import input_dtype
from paceline.engine.objective import Objective
from paceline.engine.precision import autocast
from paceline.inference.classifier import Classifier, ModelMetadata

CPU = torch.device("cpu")
LOWER = pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])


def _convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


class _OwnStatistics(nn.Module):
    """Normalizes its input itself, as some registered models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _convolution()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.inner((images - 0.1234567) * 3.1415926)


class _Rounds(_OwnStatistics):
    """Computes in float32 first, although its logits do not show it."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.inner(images.round()).round()


class _Float32Only(_OwnStatistics):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if images.dtype != torch.float32:
            raise AssertionError("float32 only")
        return self.inner(images)


def _chosen(model: nn.Module, precision: str) -> torch.dtype:
    return input_dtype(model, precision, channels=3, size=(8, 8), world=World())


@LOWER
def test_a_model_that_starts_with_a_convolution_is_given_the_dtype_of_autocast(precision: str, dtype) -> None:
    model = _convolution()
    assert _chosen(model, precision) == dtype
    assert all(module.training for module in model.modules())
    images = torch.rand(4, 3, 8, 8)
    with torch.no_grad(), autocast(precision, CPU):
        assert torch.equal(model.eval()(images), model(images.to(dtype)))


@LOWER
@pytest.mark.parametrize("kind", [_OwnStatistics, _Float32Only, _Rounds])
def test_a_model_that_computes_in_float32_first_keeps_float32(kind, precision: str, dtype) -> None:
    assert _chosen(kind(), precision) == torch.float32


def test_fp32_needs_no_test() -> None:
    assert input_dtype(nn.Identity(), "fp32", 3, (8, 8), World()) == torch.float32


@LOWER
@pytest.mark.parametrize("options", [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}], ids=str)
def test_mixing_works_in_the_lower_precision(precision: str, dtype, options: dict[str, float]) -> None:
    images, labels = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 4
    objective = Objective(Train(global_batch=6, **options), num_classes=4, seed=0)
    for step in range(5):
        expected, targets = objective.prepare(Batch(images, labels, labels), step)
        mixed, same = objective.prepare(Batch(images.to(dtype), labels, labels), step)
        assert mixed.dtype == dtype
        assert torch.equal(targets, same)
        assert torch.allclose(mixed.float(), expected, atol=4 * torch.finfo(dtype).eps * images.abs().max().item())


@LOWER
@pytest.mark.parametrize("tta", ["none", "flip", "flip-translate"])
def test_evaluation_has_the_same_metrics_in_the_lower_precision(precision: str, dtype, tta: str) -> None:
    model, images, labels = _convolution(), torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    whole, lower = (
        evaluate(model, [Batch(given, labels, labels)], 4, World(), lambda: autocast(precision, CPU), tta)
        for given in (images, images.to(dtype))
    )
    assert whole == lower


@LOWER
def test_test_time_augmentation_averages_in_fp32(precision: str, dtype) -> None:
    """In evaluations and predictions: a mean that the lower precision cannot hold is kept."""
    fine = torch.finfo(dtype).eps

    def forward(images: torch.Tensor) -> torch.Tensor:
        return (1 + fine * images[:, 0, 0, :2]).to(dtype)  # the left pixels, which a flip exchanges

    images = torch.zeros(2, 3, 4, 4)
    images[:, :, :, 0] = 1.0
    expected = torch.tensor([1 + fine / 2, 1.0])
    assert torch.equal(predict(forward, images, "flip"), expected.repeat(2, 1))
    shifted = predict(forward, images, "flip-translate")
    assert shifted.dtype == torch.float32
    assert not torch.equal(shifted, shifted.to(dtype).float())
    metadata = ModelMetadata((Class("a", "a"), Class("b", "b")), 4, 1.0, (0.5,) * 3, (0.5,) * 3)
    classifier = Classifier("any", metadata, forward, CPU, precision, "flip")
    assert torch.equal(classifier.logits(images), expected.repeat(2, 1))
    kept: list[torch.Tensor] = []
    model, labels = nn.Module(), torch.zeros(2, dtype=torch.int64)
    model.forward = forward  # type: ignore[method-assign]
    batches = [Batch(images, labels, labels)]
    evaluate(
        *(model, batches, 2, World(), lambda: autocast(precision, CPU), "flip"),
        keep=lambda _batch, _labels, logits, _best: kept.append(logits),
    )
    assert torch.equal(kept[0], expected.repeat(2, 1))
