"""Small versions of the shipped recipes train end to end like plain loops written from their sources."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from plain_images import Folder
from plain_models import by_timm_name, load
from plain_phases import VitPlateau
from plain_sources import Source
from proxies import CIFAR, IMAGENET, Curve, Proxy, distances, longer, prepare, shrink, train, train_plainly
from recorded_run import Recorded, Step, record
from sample_images import jpeg, sample_image
from torch import nn
from torch.nn import functional as F

from paceline.config.io import load_recipe
from paceline.engine.model import create_model

CLASSES, TRAIN, VAL = 4, 24, 6
PLATEAU = {"patience": 0, "threshold": 0.2}
pytestmark = pytest.mark.usefixtures("one_thread", "one_engine_thread")
EACH = pytest.mark.parametrize("proxy", IMAGENET, ids=lambda proxy: proxy.recipe)


@pytest.fixture
def one_engine_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine sum in the same order as the plain loop; otherwise rounding changes the sign before a ReLU."""
    monkeypatch.setenv("PACELINE_THREADS", "1")


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of many sizes and aspect ratios; the color of a class is a weak hint."""
    root, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, images in (("train", TRAIN), ("val", VAL)):
        for label, number in itertools.product(range(CLASSES), range(images)):
            width, height = (int(side) for side in rng.integers(90, 170, 2))
            noise = np.asarray(sample_image(width, height, 1000 * label + number + 500 * (split == "val")))
            hint = 40 * np.array([label % 2, label // 2, 0]) - 20
            image = Image.fromarray((noise + hint).clip(0, 255).astype(np.uint8))
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:03d}.JPEG").write_bytes(jpeg(image))
    return root


@pytest.fixture(scope="session")
def prepared(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tree, tmp_path_factory.mktemp("prepared") / "imagenet", sides=4)


@EACH
def test_the_network_is_that_of_the_source(proxy: Proxy) -> None:
    """The distribution of the initial weights, and outputs and gradients in double precision."""
    torch.manual_seed(0)
    plain = proxy.net(CLASSES)
    ours = create_model(shrink(proxy, {}).model, 0, CLASSES, 3)
    for name, own in by_timm_name(plain).items():
        own, found = own.double(), ours.state_dict()[name].double()
        if own.numel() == 1 or own.std() == 0:
            assert torch.equal(found, own), name
        else:
            assert found.std() / own.std() == pytest.approx(1, abs=6 / own.numel() ** 0.5), name
    for parameter in ours.parameters():  # gammas of zero would hide whole branches
        nn.init.normal_(parameter, std=0.3)
    load(plain, ours.state_dict())
    images = torch.randn(4, 3, 40, 40, dtype=torch.float64)
    outputs = [net.double().train()(images) for net in (plain, ours)]
    torch.testing.assert_close(outputs[0], outputs[1])
    for output in outputs:
        F.cross_entropy(output, torch.arange(4)).backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@EACH
def test_an_imagenet_recipe_trains_as_its_source(proxy: Proxy, tree: Path, prepared: Path, tmp_path: Path) -> None:
    """Sizes of batches and images, schedule, optimizer, loss, mixing, averaged weights, and every evaluation."""
    recorded, folder = record(shrink(proxy, {"data.path": str(prepared)}), tmp_path), Folder(tree)
    source = proxy.source(recorded.initial_net(), proxy.scale, CLASSES)

    def validate(epoch: int) -> float:
        return folder.validate(source.evaluated, source.validation(epoch))[0]

    _repeat(source, recorded, CLASSES * TRAIN, validate)


@pytest.mark.parametrize("proxy", CIFAR, ids=lambda proxy: proxy.recipe)
def test_a_cifar10_recipe_trains_as_its_source(proxy: Proxy, tmp_path: Path) -> None:
    """Also the plateau: its threshold is higher than in the recipe, because a plateau needs longer training."""
    images = {"train_samples": 64, "val_samples": CLASSES * VAL, "classes": CLASSES, "size": 32}
    changed: dict[str, Any] = {"data.name": "synthetic", "data.synthetic": images}
    if proxy.source is VitPlateau:
        changed |= {f"optim.schedule.{name}": value for name, value in PLATEAU.items()}
    recorded = record(shrink(proxy, changed), tmp_path)
    source = proxy.source(recorded.initial_net(), proxy.scale, CLASSES)
    for name, value in PLATEAU.items() if isinstance(source, VitPlateau) else ():
        assert getattr(source.scheduler, name) == getattr(load_recipe(proxy.recipe).optim.schedule, name)
        setattr(source.scheduler, name, value)
    _repeat(source, recorded, images["train_samples"])
    assert len({lr for _, lr in recorded.run.points("lr", "train", "step")}) > 1


def _repeat(source: Source, recorded: Recorded, images: int, validate: Callable[[int], float] | None = None) -> None:
    """Take every step of a run with the plain loop, from the same weights.

    From its own weights, the rounding of a sum would change the sign of a ReLU's input at times, and from then on the
    losses of two equal loops.
    """
    evaluations, differences, number = iter(recorded.evaluations), list[tuple[float, str]](), 0
    for epoch in range(source.epochs):
        reading = source.reading(epoch)
        per_epoch = images // reading.batch
        for index in range(per_epoch):
            step, before, after = recorded.steps[number], recorded.states[number], recorded.states[number + 1]
            assert step.images.shape == (reading.batch, 3, reading.size, reading.size)
            _assert_mixed(step, source)
            source.net.load_state_dict(before)
            loss = source.step(epoch, index, per_epoch, step.mixed, step.targets)
            assert recorded.losses[number] == pytest.approx(loss, rel=1e-4)
            differences.append(max(_differences(source.net, before, after)))
            number += 1
        found = next(evaluations)
        assert found["samples"] == CLASSES * VAL
        shapes = _assert_same_evaluation(found, source, recorded)
        if validate:
            how = source.validation(epoch)
            assert {min(shape) for shape in shapes} == {how.size}
            assert any(height != width for height, width in shapes) == bool(how.rectangular)
            assert found["loss"] == pytest.approx(validate(epoch), rel=0.02)
        source.after_epoch(found["loss"])
    assert number == len(recorded.steps) == len(recorded.losses)
    assert next(evaluations, None) is None
    assert max(differences) < (1e-3, "")
    final, initial = recorded.run.load_model("last").state_dict(), recorded.states[0]
    for name, expected in source.evaluated.state_dict().items():
        if expected.is_floating_point():
            moved = (expected - initial[name]).norm()
            assert (final[name] - expected).norm() <= 1e-2 * moved, name


def _differences(
    net: nn.Module, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> Iterator[tuple[float, str]]:
    """Yield the difference between the updates of every tensor, as a fraction of the update, without rounding."""
    for name, value in net.state_dict().items():
        if value.is_floating_point():
            moved = (after[name] - before[name]).norm() + 1e-6 * before[name].norm() + 1e-9
            yield float((value - after[name]).norm() / moved), name


def _assert_mixed(step: Step, source: Source) -> None:
    """Images and targets are those of mixup or cutmix, with one weight for all."""
    mixing = step.mixing()
    torch.testing.assert_close(mixing.images(step.images), step.mixed, rtol=0, atol=1e-4)
    if step.targets.ndim == 1:
        assert mixing.weight == 1
        assert torch.equal(step.targets, step.labels)
    else:
        for rows, found in zip(mixing.targets(step.labels, CLASSES), step.targets, strict=True):
            assert any(torch.allclose(row, found, rtol=0, atol=1e-4) for row in source.targets(rows))


def _assert_same_evaluation(found: dict[str, Any], source: Source, recorded: Recorded) -> set[tuple[int, int]]:
    """Compare the metrics of an evaluation with those of the plain loop's network; return the sizes of its batches."""
    losses, correct, flip = 0.0, 0, recorded.recipe.evaluate.tta == "flip"
    net, shapes = source.evaluated.eval(), set()
    for batch in recorded.setup.evaluator(found["step"]):
        images = batch.images
        with torch.no_grad():
            logits = (net(images) + net(images.flip(-1))) / 2 if flip else net(images)
        shapes.add((images.shape[2], images.shape[3]))
        losses += F.cross_entropy(logits, batch.labels, reduction="sum").item()
        correct += int((logits.argmax(1) == batch.labels).sum())
    assert found["loss"] == pytest.approx(losses / found["samples"], rel=1e-3)
    assert abs(found["correct"] - correct) <= 1
    return shapes


@pytest.mark.parametrize(("name", "factor"), [("imagenet-rn50-torchvision-v1", 5), ("imagenet-rn50-imagenet18-1", 1)])
def test_loss_curves_agree_within_noise(name: str, factor: int, tree: Path, prepared: Path, tmp_path: Path) -> None:
    """With their own initial weights, order, crops and flips. A different learning rate is detected."""
    (proxy,) = [longer(proxy, factor) for proxy in IMAGENET if proxy.recipe == name]
    folder, seeds = Folder(tree), range(5)
    ours = [train(shrink(proxy, {"data.path": str(prepared)}, seed), tmp_path) for seed in seeds]
    plain = [train_plainly(proxy, folder, seed) for seed in seeds]
    slower = replace(proxy, scale=replace(proxy.scale, rates=30.0))
    other = [train_plainly(slower, folder, seed) for seed in seeds]
    assert not _differ(ours, plain)
    assert _differ(ours, other)


def _differ(ours: list[Curve], others: list[Curve]) -> bool:
    """Return whether losses differ by more than chance; few seeds can be closer to each other than their noise is."""
    return any(abs(difference) > 5 * error + 0.02 for difference, error in distances(ours, others).values())
