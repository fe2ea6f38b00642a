"""data.interpolation: every way of reading images resizes with the same filter, and checkpoints record it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import raises
from PIL import Image
from sample_images import tree

from paceline.config.data import Augment, Data, Interpolation
from paceline.config.io import recipe_from_tree, to_tree
from paceline.config.recipe import Evaluate, Recipe, Train
from paceline.config.timeline import Timeline
from paceline.data.images import RESAMPLING, ImageFiles, ImageSplit
from paceline.data.listing import list_images
from paceline.data.load.in_memory import ResidentEvaluator, statistics
from paceline.data.load.loader import ImageEvaluator, ImageLoader
from paceline.data.load.order import Plan
from paceline.data.load.source import open_source
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.sets import load
from paceline.data.shards import Dataset
from paceline.engine.evaluation.saved import evaluation_recipe
from paceline.engine.trained_model import Preprocess

CPU = torch.device("cpu")
BOTH: tuple[Interpolation, ...] = ("bilinear", "bicubic")
PIXELS = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}


@pytest.fixture(scope="module")
def splits(tmp_path_factory) -> dict[str, ImageSplit]:
    folder = tmp_path_factory.mktemp("images")
    root = tree(folder / "in", images=4)
    prepare(source(root, "folder"), folder / "out", [Variant()], 1)
    files = ImageFiles(root, list_images(root).splits["val"])
    return {"shards": Dataset.open(folder / "out").split("val"), "files": files}


def _data(interpolation: str) -> Data:
    return Data(name="shards", size=48, interpolation=interpolation, **PIXELS)  # type: ignore[arg-type]


def _evaluated(split: ImageSplit, interpolation: str) -> torch.Tensor:
    data = _data(interpolation)
    phase = Timeline.of(Recipe("any", data=data, train=Train(global_batch=2)), 8).phases[0]
    evaluator = ImageEvaluator(data, Evaluate(per_rank_batch=64), phase, split, 0, 1, CPU, 1)
    return torch.cat([batch.images for batch in evaluator])


@pytest.mark.parametrize("kind", ["shards", "files"])
def test_evaluation_resizes_as_preprocess_does(splits: dict[str, ImageSplit], kind: str) -> None:
    images = {name: _evaluated(splits[kind], name) for name in BOTH}
    files, settings = splits["files"], {"size": (48, 48), "crop_pct": Evaluate().center_crop, **PIXELS}
    for name, other in zip(BOTH, BOTH[::-1], strict=True):
        ready = Preprocess(settings | {"interpolation": name})
        assert f"interpolation={name}" in repr(ready)
        expected = torch.stack([ready(Image.open(files.where(number))) for number in range(len(files))])
        distance, from_other = ((images[key] - expected).abs().mean() for key in (name, other))
        assert distance < 0.8 * from_other  # the codec decodes both
    assert torch.equal(_evaluated(splits[kind], "auto"), images["bilinear"])


@pytest.mark.parametrize("kind", ["shards", "files"])
def test_training_crops_are_resized_with_the_filter(splits: dict[str, ImageSplit], kind: str) -> None:
    batches = {}
    for interpolation in BOTH:
        recipe = Recipe("any", data=_data(interpolation), train=Train(global_batch=2))
        plan = Plan.of(recipe, len(splits[kind]))
        (batch,) = next(ImageLoader(recipe.data, {"": splits[kind]}, plan, CPU, 1).steps())
        batches[interpolation] = batch
    assert torch.equal(batches["bilinear"].ids, batches["bicubic"].ids)
    assert 0.3 < (batches["bilinear"].images - batches["bicubic"].images).abs().mean() < 20


@pytest.mark.parametrize("kind", ["shards", "files"])
def test_each_crop_can_have_a_filter_of_its_own(splits: dict[str, ImageSplit], kind: str) -> None:
    batches = []
    for interpolation, random in (("bilinear", False), ("bicubic", False), ("bilinear", True), ("bicubic", True)):
        data = replace(_data(interpolation), augment=Augment(random_interpolation=random))
        recipe = Recipe("any", data=data, train=Train(global_batch=6))
        loader = ImageLoader(data, {"": splits[kind]}, Plan.of(recipe, len(splits[kind])), CPU, 2)
        batches.append([micro[0] for micro, _ in zip(loader.steps(), range(4), strict=False)])
    bicubic = []
    for sharp, smooth, drawn, again in zip(batches[1], batches[0], batches[2], batches[3], strict=True):
        assert torch.equal(drawn.images, again.images)
        assert torch.equal(drawn.ids, sharp.ids)
        for image, one, other in zip(drawn.images, sharp.images, smooth.images, strict=True):
            bicubic.append(torch.equal(image, one))
            assert bicubic[-1] or torch.equal(image, other)
    assert 4 <= sum(bicubic) <= 20  # of 24


@pytest.mark.parametrize("size", [5, 20])
def test_sets_in_memory_are_resized_as_by_pillow(size: int) -> None:
    """Reduced and enlarged; they are not rounded to 8 bits, and Pillow also rounds between its two passes."""
    data = Data(name="digits", interpolation="bicubic")
    images = load(data)
    mean, std = statistics(data, images)
    batch = next(iter(ResidentEvaluator(data, images, size, 16, 0, 1, CPU)))
    levels = (batch.images * std.view(-1, 1, 1) + mean.view(-1, 1, 1)) * 255
    assert levels.min() > -0.01
    assert levels.max() < 255.01
    for ours, pixels in zip(levels[:, 0], images.val.images[:16, ..., 0], strict=True):
        halfway = Image.fromarray(pixels.numpy()).resize((size, 8), RESAMPLING["bicubic"])
        expected = halfway.resize((size, size), RESAMPLING["bicubic"])
        assert np.abs(ours.numpy() - np.asarray(expected)).max() < 1.5


def test_preprocessing_names_the_filter_and_evaluation_of_a_checkpoint_uses_it() -> None:
    for name, expected in {"auto": "bilinear", "bicubic": "bicubic"}.items():
        recipe = Recipe("any", data=Data(name="digits", interpolation=name), train=Train(global_batch=8))  # type: ignore[arg-type]
        found = open_source(recipe)
        settings = found.preprocessing(Timeline.of(recipe, found.num_train).phases[0])
        assert settings["interpolation"] == expected
    # the weights that "auto" followed are no longer known
    progress = {"recipe": to_tree(Recipe("any", data=Data(name="digits")))}
    progress["preprocessing"] = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic"}
    assert evaluation_recipe(progress, "checkpoint", []).data.resize_filter == "bicubic"
    assert (
        evaluation_recipe(progress, "checkpoint", ["--data.interpolation", "bilinear"]).data.resize_filter == "bilinear"
    )


def test_other_filters_are_refused() -> None:
    with raises("invalid-recipe") as caught:
        recipe_from_tree({"name": "any", "data": {"interpolation": "lanczos"}}, "recipe.yaml")
    assert "data.interpolation" in str(caught.value)
