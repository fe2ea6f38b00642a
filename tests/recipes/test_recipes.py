"""Every shipped recipe loads, names its source, round-trips, trains and matches its publication."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file
from sample_images import tree

from paceline.cli.main import main
from paceline.config.io import dump_recipe, load_recipe, shipped
from paceline.config.model import Model
from paceline.config.timeline import Timeline
from paceline.config.tracking import github_link
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.models.factory import create
from paceline.optim.schedules import LrPlan, lr_at
from paceline.system.torchvision_compat import allow_torchvision
from paceline.track.records import RunFolder

NAMES = list(shipped())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_loads_and_round_trips(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.about.source
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    assert load_recipe(str(path)) == recipe


def test_recipes_are_listed_with_their_accuracy(capsys) -> None:
    assert main(["recipes"]) == 0
    head, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert head.split() == ["name", "model", "data", "duration", "published", "measured"]
    assert [line.split()[0] for line in lines] == NAMES
    for line in lines:
        recipe = load_recipe(line.split()[0])
        for figure, text in (("published", recipe.about.published), ("measured", str(recipe.about.measured))):
            shown = re.split(r" {2,}", line[head.index(figure) :])[0]
            assert (shown == "-") == (not text or text.startswith("none")), line
            assert shown == "-" or (text.startswith(shown) and "%" in shown), line
    rows = {line.split()[0]: line for line in lines}
    assert re.split(r" {2,}", rows["cifar10-airbench95"]) == [
        *("cifar10-airbench95", "airbench", "cifar10", "720ba", "95.01%", "-")
    ]
    assert "93.05% top-5" in rows["imagenet-rn50-imagenet18-4"]


def test_a_recipe_is_shown_with_its_source_and_commands(capsys, tmp_path: Path) -> None:
    for name in NAMES:
        assert main(["recipes", name]) == 0
        shown = capsys.readouterr().out
        about = load_recipe(name).about
        figures = (about.published or "-", str(about.measured) or "not measured", f"paceline train {name}")
        for text in (about.source, *map(github_link, about.code), *about.deviations, *figures):
            assert text in shown
        if name == "imagenet-rn50-imagenet18-4":
            assert " imagenet --train TAR --val TAR --devkit TAR --short-side 160 352 --original\n" in shown
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: digits\n")
    assert main(["recipes", str(tmp_path / "mine.yaml")]) == 0
    assert re.search("^published +-$", capsys.readouterr().out, re.MULTILINE)
    assert main(["recipes", "digit"]) == 1
    assert "[recipe-not-found]" in capsys.readouterr().err


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Prepared images with every variant of the shipped recipes; they are small, so no variant resizes them."""
    folder = tmp_path_factory.mktemp("images")
    variants = [
        Variant(),
        *(Variant(max_side=side) for side in (400, 500)),
        *(Variant(short_side=s) for s in (160, 352)),
    ]
    prepare(source(tree(folder / "in", images=4), "imagenet"), folder / "out", variants, 2)
    return folder / "out"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_trains_two_steps(name: str, here, tmp_path: Path, images: Path) -> None:
    """On generated images of the same shape, from random weights or a file, so that nothing is downloaded."""
    recipe = load_recipe(name)
    weights = "random"
    if name.startswith("finetune-"):
        model = "test_vit" if recipe.model.name.startswith("vit") else "test_resnet"
        weights = str(tmp_path / "weights.safetensors")
        save_file(create(Model(name=model), 10, 3).state_dict(), weights)
        words, samples = ["--data", str(images), "--model.name", model, "--evaluate.size", "64"], 12
        words += ["--data.variant", "original"]
    elif recipe.data.name == "imagenet":
        words = ["--data.path", str(images), "--model.name", "resnet10t", "--evaluate.size", "64"]
        samples = 12
    else:
        channels, size = {"cifar10": (3, 32), "digits": (1, 8)}[recipe.data.name]
        shape = f"{{train_samples: 8, val_samples: 5, channels: {channels}, size: {size}}}"
        words = ["--data.name", "synthetic", "--data.synthetic", shape]
        samples = 5
    if recipe.model.name.startswith("vit") and weights == "random":
        words += ["--model.options", "{depth: 2, embed_dim: 96, num_heads: 3}"]
    for number, phase in enumerate(recipe.phases):
        words += [f"--phases.{number}.global_batch", "4"] if phase.global_batch else []
    words += ["--data.aug_repeats", "2"] if recipe.data.aug_repeats > 1 else []
    words += ["--train.global_batch", "4", "--train.grad_accumulation", "1", "--train.duration", "2ba"]
    words += [
        "--ramp.sizes",
        "[0, 0]",
        "--model.weights",
        weights,
        "--precision",
        "fp32",
        "--log.tensorboard",
        "false",
    ]
    answer = here("train", name, *words)
    assert answer.returncode == 0, answer.stderr
    summary = RunFolder(tmp_path / "runs" / name).read_summary()
    assert (summary["status"], summary["step"], summary["final"]["samples"]) == ("finished", 2, samples)


IMAGENET = 1_281_167
# from the published code and papers, for each phase: first step, image size, global batch, first and last learning rate
PUBLISHED = {
    "imagenet-rn50-imagenet18-1": [
        (0, 128, 4096, 1.0, 2.0),
        (5 * 312, 128, 4096, 1.0, 1.0),
        (14 * 312, 224, 1792, 0.4375, 0.4375),
        (14 * 312 + 2 * 714, 224, 1792, 0.04375, 0.04375),
        (14 * 312 + 13 * 714, 224, 1792, 0.004375, 0.004375),
        (14 * 312 + 18 * 714, 288, 1024, 0.0025, 0.0025),
        (14 * 312 + 18 * 714 + 1251, 288, 1024, 0.00025, 0.00025),
    ],
    "imagenet-rn50-imagenet18-2": [
        (0, 128, 4096, 1.5, 3.0),
        (6 * 312, 128, 8192, 3.0, 3.0),
        (6 * 312 + 5 * 156, 128, 8192, 3.0, 1.5),
        (6 * 312 + 7 * 156, 224, 3584, 1.3125, 1.3125),
        (6 * 312 + 7 * 156 + 3 * 357, 224, 3584, 1.3125, 0.13125),
        (6 * 312 + 7 * 156 + 10 * 357, 224, 3584, 0.13125, 0.013125),
        (6 * 312 + 7 * 156 + 15 * 357, 288, 2048, 0.0075, 0.00075),
    ],
    "imagenet-rn50-imagenet18-4": [
        (0, 128, 8192, 2.0, 4.0),
        (6 * 156, 128, 16384, 4.0, 4.0),
        (6 * 156 + 5 * 78, 128, 16384, 4.0, 2.0),
        (6 * 156 + 7 * 78, 224, 7168, 1.75, 1.75),
        (6 * 156 + 7 * 78 + 3 * 178, 224, 7168, 1.75, 0.175),
        (6 * 156 + 7 * 78 + 10 * 178, 224, 7168, 0.175, 0.0175),
        (6 * 156 + 7 * 78 + 15 * 178, 288, 4096, 0.01, 0.001),
    ],
    "imagenet-rn50-imagenet18-16": [
        (0, 128, 8192, 1.88, 3.76),
        (6 * 156, 128, 16384, 3.76, 3.76),
        (6 * 156 + 10 * 78, 224, 8192, 1.88, 1.88),
        (9 * 156 + 10 * 78, 224, 24576, 0.564, 0.564),
        (9 * 156 + 10 * 78 + 12 * 52, 224, 24576, 0.0564, 0.0564),
        (9 * 156 + 10 * 78 + 18 * 52, 288, 16384, 0.0376, 0.0376),
        (9 * 156 + 11 * 78 + 18 * 52, 288, 16384, 0.00376, 0.00376),
    ],
    "imagenet-rn50-imagenet18-8": [
        (0, 128, 8192, 1.88, 3.76),
        (6 * 156, 128, 16384, 3.76, 3.76),
        (6 * 156 + 5 * 78, 128, 16384, 3.76, 1.88),
        (6 * 156 + 8 * 78, 224, 8192, 1.88, 1.88),
        (9 * 156 + 8 * 78, 224, 14336, 1.88, 0.329),
        (9 * 156 + 8 * 78 + 6 * 89, 224, 14336, 0.329, 0.0329),
        (9 * 156 + 8 * 78 + 12 * 89, 288, 8192, 0.0188, 0.00188),
    ],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_phases_match_the_published_ones(name: str) -> None:
    recipe = load_recipe(name)
    timeline = Timeline.of(recipe, IMAGENET)
    plan = LrPlan.of(recipe.optim, timeline)
    found = [(phase.begin, phase.size, phase.global_batch, *(phase.lr or ())) for phase in timeline.phases]
    assert found == PUBLISHED[name]
    for phase in timeline.phases:
        assert lr_at(phase.begin, plan) == phase.lr[0]
        assert lr_at(phase.end - 1, plan) == pytest.approx(phase.lr[1], rel=0.05)


@pytest.mark.parametrize("epochs", [16, 24, 32, 40, 56, 88])
def test_ffcv_resolutions_and_learning_rates(epochs: int) -> None:
    """FFCV interpolates sizes with np.interp, rounded to multiples of 32, and uses a triangular learning rate."""
    recipe = load_recipe(f"imagenet-rn50-ffcv-{epochs}ep")
    timeline = Timeline.of(recipe, IMAGENET)
    plan = LrPlan.of(recipe.optim, timeline)
    for epoch in range(epochs):
        published = int(np.round(np.interp(epoch, recipe.ramp.epochs, recipe.ramp.sizes) / 32)) * 32
        assert timeline.phase_at(epoch * 312).size == published
        assert lr_at(epoch * 312, plan) == pytest.approx(np.interp(epoch, [0, 2, epochs], [1.7e-4, 1.7, 0]))
    assert timeline.total == epochs * 312


# steps per epoch, and (epoch, learning rate) pairs
EDGES = {
    "imagenet-rn50-torchvision-v1": (5004, [(0, 0.1), (29.9, 0.1), (30, 0.01), (60, 0.001), (89.9, 0.001)]),
    "imagenet-rn50-torchvision-v2": (1251, [(0, 0.005), (5, 0.5), (302, 0.25066), (599.9, 3.4848e-6)]),
    # timm's CosineLRScheduler: the cosine is that of 100 epochs, the warmup replaces its first 5
    "imagenet-rn50-a3": (625, [(0, 1e-4), (4.9, 6.42e-3), (5, 7.9508e-3), (50.5, 4.0005e-3), (99.9, 2.9734e-6)]),
    "imagenet-rn18-ffcv-16ep": (1251, [(0, 0.5e-4), (2, 0.5), (9, 0.25), (16, 0.0)]),
    "imagenet-rn18-ffcv-88ep": (1251, [(0, 0.5e-4), (2, 0.5), (45, 0.25), (88, 0.0)]),
}


@pytest.mark.parametrize("name", EDGES)
def test_learning_rates_at_the_published_edges(name: str) -> None:
    per_epoch, edges = EDGES[name]
    recipe = load_recipe(name)
    timeline = Timeline.of(recipe, IMAGENET)
    plan = LrPlan.of(recipe.optim, timeline)
    assert timeline.phases[0].steps_per_epoch == per_epoch
    for epoch, lr in edges:
        assert lr_at(round(epoch * per_epoch), plan) == pytest.approx(lr, rel=1e-3, abs=1e-9)


def _rates(name: str, samples: int) -> tuple[Timeline, LrPlan]:
    recipe = load_recipe(name)
    timeline = Timeline.of(recipe, samples)
    return timeline, LrPlan.of(recipe.optim, timeline)


def test_full_fine_tuning_follows_the_rule_of_bit() -> None:
    """bit_hyperrule.py for fewer than 20,000 images, with a quarter of the batch: four times the steps."""
    timeline, plan = _rates("finetune-full", 5000)
    assert timeline.total == 4 * 500
    assert load_recipe("finetune-full").train.global_batch == 512 / 4
    for step, lr in ((0, 0), (50, 0.0015), (100, 0.003), (199, 0.003), (201, 3e-4), (301, 3e-5), (499, 3e-6)):
        assert lr_at(4 * step, plan) == pytest.approx(lr / 4)


def test_vit_fine_tuning_follows_mae() -> None:
    """adjust_learning_rate of MAE with blr 5e-4: linear warmup of 5 epochs, half a cosine down to 1e-6."""
    timeline, plan = _rates("finetune-vit-layer-decay", 12_800)
    recipe, peak = load_recipe("finetune-vit-layer-decay"), 5e-4 * 128 / 256
    for epoch in (0, 2.5, 5, 50, 99.5):
        decayed = 1e-6 + (peak - 1e-6) * 0.5 * (1 + np.cos(np.pi * (epoch - 5) / 95))
        assert lr_at(round(epoch * 100), plan) == pytest.approx(peak * epoch / 5 if epoch < 5 else decayed)
    assert timeline.total == 100 * 100
    assert (recipe.optim.layer_decay, recipe.optim.weight_decay, recipe.model.drop_path) == (0.65, 0.05, 0.1)
    assert (recipe.train.mixup, recipe.train.cutmix, recipe.data.augment.random_erasing) == (0.8, 1.0, 0.25)
    assert recipe.data.augment.random_erasing_mode == "pixel"


@pytest.mark.parametrize(
    ("name", "policy"),
    [("imagenet-rn50-a3", "rand-m6-mstd0.5-inc1"), ("finetune-vit-layer-decay", "rand-m9-mstd0.5-inc1")],
)
def test_randaugment_is_that_which_the_source_names(name: str, policy: str) -> None:
    allow_torchvision()
    from timm.data.auto_augment import rand_augment_transform

    theirs, augment = rand_augment_transform(policy, {}), load_recipe(name).data.augment
    operation = theirs.ops[0]
    assert augment.policy == "timm-randaugment"
    assert (augment.num_ops, augment.op_probability) == (theirs.num_layers, operation.prob)
    assert (augment.magnitude, augment.magnitude_std) == (operation.magnitude, operation.magnitude_std)
    assert augment.increasing == any(each.name == "SolarizeIncreasing" for each in theirs.ops)


def test_linear_fine_tuning_follows_the_tutorial() -> None:
    """SGD 0.001 for batches of 4, a tenth every 7 of 25 epochs; here with 4 times the batch."""
    timeline, plan = _rates("finetune-linear", 1600)
    for epoch, factor in ((0, 1), (6.9, 1), (7, 0.1), (14, 0.01), (24, 0.001)):
        assert lr_at(round(epoch * 100), plan) == pytest.approx(4 * 0.001 * factor)
    assert timeline.total == 25 * 100
    assert load_recipe("finetune-linear").model.freeze == ("backbone",)


def test_the_list_shows_all_recipes(paceline) -> None:
    answer = paceline("recipes", env={"COLUMNS": "200", "PATH": "/usr/bin"})
    assert answer.returncode == 0, answer.stderr
    assert [name for name in NAMES if name not in answer.stdout] == []
    assert "published" in answer.stdout


def test_help_shows_the_values_of_the_recipe(paceline) -> None:
    answer = paceline("train", "digits", "--help", env={"COLUMNS": "200", "PATH": "/usr/bin"})
    assert answer.returncode == 0, answer.stderr
    line = next(line for line in answer.stdout.splitlines() if line.lstrip().startswith("--train.global_batch"))
    assert "128" in line
    assert "Images per optimizer step over all ranks together" in line
