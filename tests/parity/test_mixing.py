"""Mixup, cutmix and thresholded targets are those of timm and torchvision, and the warmup of A3 is timm's.

Batches have two images: each is the partner of the other, in whatever way partners are chosen.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from paceline.config.optim import Optim, Schedule
from paceline.config.recipe import Recipe, Train
from paceline.config.timeline import Timeline
from paceline.data.load.batch import Batch
from paceline.engine import objective as objective_module
from paceline.engine.objective import Objective
from paceline.optim.schedules import LrPlan, lr_at
from paceline.system.torchvision_compat import allow_torchvision

allow_torchvision()

from timm.data.mixup import Mixup  # noqa: E402
from timm.loss import BinaryCrossEntropy  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

CLASSES = 5
SHAPE = (3, 24, 31)


class _Recorder:
    """A numpy generator that remembers what it returned."""

    def __init__(self, generator: np.random.Generator):
        self._generator, self.choice, self.weight, self.places = generator, 0.0, 0.0, list[int]()

    def random(self) -> float:
        self.choice = self._generator.random()
        return self.choice

    def beta(self, *alphas: float) -> float:
        assert alphas[0] == alphas[1]
        self.alpha, self.weight = alphas[0], self._generator.beta(*alphas)
        return self.weight

    def integers(self, high: int) -> int:
        self.places.append(int(self._generator.integers(high)))
        return self.places[-1]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[_Recorder]:
    made: list[_Recorder] = []
    construct = np.random.default_rng

    def default_rng(seed: int) -> _Recorder:
        made.append(_Recorder(construct(seed)))
        return made[-1]

    monkeypatch.setattr(objective_module.np.random, "default_rng", default_rng)
    return made


def _batch() -> Batch:
    images = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.tensor([1, 3]), torch.arange(2))


@pytest.mark.parametrize(
    ("mixup", "cutmix", "smoothing"), [(0.2, 1.0, 0.1), (0.8, 0.0, 0.0), (0.0, 1.0, 0.1), (0.1, 1.0, 0.0)]
)
def test_images_and_targets_are_mixed_as_by_timm(
    mixup: float, cutmix: float, smoothing: float, recorders: list[_Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Objective(Train(mixup=mixup, cutmix=cutmix, label_smoothing=smoothing), CLASSES, seed=4)
    theirs = Mixup(mixup, cutmix, label_smoothing=smoothing, num_classes=CLASSES)
    batch, cut = _batch(), 0
    for step in range(200):
        images, targets = ours.prepare(batch, step)
        drawn = recorders[-1]
        assert drawn.alpha == (cutmix if drawn.places else mixup)
        numbers, places = iter([0.0, drawn.choice]), iter(drawn.places)
        with monkeypatch.context() as patched:
            patched.setattr(np.random, "rand", lambda *_, numbers=numbers: next(numbers))
            patched.setattr(np.random, "beta", lambda *_, drawn=drawn: drawn.weight)
            patched.setattr(np.random, "randint", lambda *_, places=places, **__: next(places))
            expected_images, expected_targets = theirs(batch.images.clone(), batch.labels)
        torch.testing.assert_close(images, expected_images, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(targets, expected_targets, rtol=1e-5, atol=1e-5)
        cut += bool(drawn.places)
    assert 70 < cut < 130 if mixup and cutmix else cut == 200 * bool(cutmix)


def test_images_and_targets_are_mixed_as_by_torchvision(
    recorders: list[_Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for a pasted rectangle with an odd side, which is one pixel shorter in torchvision."""
    smoothing, equal = 0.1, 0
    ours = Objective(Train(mixup=0.2, cutmix=1.0, label_smoothing=smoothing), CLASSES, seed=4)
    batch, (height, width) = _batch(), SHAPE[1:]
    for step in range(300):
        images, targets = ours.prepare(batch, step)
        drawn = recorders[-1]
        theirs: Any = (v2.CutMix if drawn.places else v2.MixUp)(num_classes=CLASSES)
        theirs._dist = _Fixed(drawn.weight)
        places = iter(drawn.places[::-1])  # torchvision draws the column first
        with monkeypatch.context() as patched:
            patched.setattr(torch, "randint", lambda *_, places=places, **__: torch.tensor([next(places)]))
            expected_images, expected_targets = theirs(batch.images, batch.labels)
        expected_targets = expected_targets * (1 - smoothing) + smoothing / CLASSES  # as nn.CrossEntropyLoss does
        sides = [int(side * math.sqrt(1 - drawn.weight)) for side in (height, width)]
        if drawn.places and any(side % 2 for side in sides):
            differ = (images != expected_images).any(1)
            assert differ.any(1).sum(1).max() <= width
            assert differ.sum() <= 2 * (height + width)
            continue
        torch.testing.assert_close(images, expected_images, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(targets, expected_targets, rtol=1e-5, atol=1e-5)
        equal += bool(drawn.places)
    assert equal > 20


class _Fixed:
    def __init__(self, value: float):
        self._value = value

    def sample(self, _: Any) -> float:
        return self._value


# ---- binary cross-entropy ----


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.0, 0.0), (0.1, 1.0), (4.0, 0.0)])
def test_thresholded_binary_cross_entropy_is_that_of_timm(
    mixup: float, cutmix: float, smoothing: float, threshold: float
) -> None:
    """The loss and its gradient, with and without mixing."""
    train = Train(loss="bce", mixup=mixup, cutmix=cutmix, label_smoothing=smoothing, bce_target_threshold=threshold)
    ours, reference = Objective(train, CLASSES, seed=1), BinaryCrossEntropy(smoothing, threshold or None)
    logits = torch.randn(2, CLASSES, generator=torch.Generator().manual_seed(7)) * 3
    both = 0
    for step in range(40):
        _, targets = ours.prepare(_batch(), step)
        theirs = targets if mixup or cutmix else _batch().labels  # timm smooths labels itself
        found, expected = (logits.clone().requires_grad_() for _ in range(2))
        (loss := ours.loss(found, targets)).backward()
        (wanted := reference(expected, theirs)).backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad)
        both += int((targets > max(threshold, 0.1)).sum() > 2)
    assert bool(both) == (bool(mixup) and threshold < 0.5)  # images that count as two classes


def test_targets_are_hard_only_above_the_threshold() -> None:
    targets = torch.tensor([[0.85, 0.15, 0.0], [0.75, 0.25, 0.0], [0.8, 0.2, 0.0]])
    expected = torch.tensor([[1.0, 0, 0], [1, 1, 0], [1, 0, 0]])
    logits = torch.tensor([[1.0, -2.0, 0.5]]).expand(3, 3)
    loss = Objective(Train(loss="bce", bce_target_threshold=0.2), 3, seed=0).loss(logits, targets)
    assert loss.item() == pytest.approx(F.binary_cross_entropy_with_logits(logits, expected).item())


# ---- schedule ----


@pytest.mark.parametrize("prefix", [True, False])
def test_cosine_with_warmup_is_that_of_timm(prefix: bool) -> None:
    """timm's script steps the schedule per epoch, by default without warmup prefix."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=8e-3)
    decay = 15 if prefix else 20
    reference = CosineLRScheduler(
        optimizer, t_initial=decay, lr_min=1e-6, warmup_t=5, warmup_lr_init=1e-4, warmup_prefix=prefix
    )
    schedule = Schedule(interval="epoch", warmup="5ep", warmup_prefix=prefix, start_factor=0.0125, end_factor=1.25e-4)
    optim = Optim(lr=8e-3, schedule=schedule)
    plan = LrPlan.of(optim, Timeline.of(Recipe("any", optim=optim, train=Train(duration="20ep", global_batch=10)), 100))
    for epoch in range(20):
        reference.step(epoch)
        for step in (10 * epoch, 10 * epoch + 9):
            assert lr_at(step, plan) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
