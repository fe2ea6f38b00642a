"""Pretrained weights bring their preprocessing, unless the recipe sets it."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from conftest import raises
from safetensors.torch import save_file
from sample_images import tree

from paceline.config.io import load_recipe
from paceline.config.model import Model
from paceline.config.recipe import Recipe
from paceline.data.load.batch import shortest_decimals
from paceline.models.factory import create
from paceline.models.preprocessing import resolve
from paceline.track.records import RunFolder

CLIP = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28]}


def _recipe(*words: object) -> Recipe:
    return load_recipe("finetune-full", [str(word) for word in ("--data.name", "folder", *words)])


def _values(recipe: Recipe) -> tuple[Any, ...]:
    data, evaluate = recipe.data, recipe.evaluate
    return data.size, evaluate.size, evaluate.crop_pct, data.interpolation, data.mean[:1], data.std[:1]


def test_the_preprocessing_of_timm_is_used() -> None:
    resolved, notes = resolve(_recipe("--model.name", "convnext_tiny.fb_in1k"))
    assert _values(resolved) == (224, 288, 1.0, "bicubic", (0.485,), (0.229,))
    assert "timm's convnext_tiny.fb_in1k" in notes[0]
    assert "data.interpolation=bicubic" in notes[0]
    vit, _ = resolve(_recipe("--model.name", "vit_tiny_patch16_224.augreg_in21k"))
    assert _values(vit) == (224, 0, 0.9, "bicubic", (0.5,), (0.5,))
    assert resolve(resolved) == (resolved, [])  # as a resumed run does


def test_random_weights_change_nothing() -> None:
    recipe = _recipe("--model.weights", "random")
    assert resolve(recipe) == (recipe, [])
    assert recipe.evaluate.center_crop == 0.875


def test_fields_of_the_recipe_win() -> None:
    recipe = _recipe("--model.name", "convnext_tiny.fb_in1k", "--data.size", 128, "--evaluate.crop_pct", 0.5)
    resolved, _ = resolve(recipe)
    assert _values(resolved) == (128, 0, 0.5, "bicubic", (0.485,), (0.229,))
    normalized = ("--data.mean", "[0.1, 0.1, 0.1]", "--data.std", "[1, 1, 1]", "--data.interpolation", "bilinear")
    resolved, _ = resolve(_recipe("--model.name", "convnext_tiny.fb_in1k", *normalized))
    assert _values(resolved) == (224, 288, 1.0, "bilinear", (0.1,), (1.0,))
    resolved, _ = resolve(_recipe("--model.name", "convnext_tiny.fb_in1k", "--evaluate.size", 256))
    assert _values(resolved)[:3] == (224, 256, 0.875)
    phases = ("--phases", "[{epochs: [0, 1000], size: 96}]")
    resolved, _ = resolve(_recipe("--model.name", "convnext_tiny.fb_in1k", *phases))
    assert resolved.evaluate.size == 0  # that of the phase


def test_a_vit_for_another_size_gets_images_of_that_size() -> None:
    words = ("--model.name", "vit_tiny_patch16_224", "--model.options", "{img_size: 96}")
    assert resolve(_recipe(*words))[0].data.size == 96


def test_datasets_in_memory_keep_their_channels_and_have_no_crop() -> None:
    model = ("--model.name", "test_resnet", "--data", "null", "--data.name")
    cifar, _ = resolve(_recipe(*model, "cifar10"))
    assert _values(cifar) == (160, 0, 0.0, "bilinear", (0.5,), (0.5,))
    digits, notes = resolve(_recipe(*model, "digits"))
    assert (digits.data.mean, digits.data.size) == ((), 160)
    assert "1 channel" in notes[1]


def test_unsupported_crop_modes_are_said() -> None:
    _, notes = resolve(_recipe("--model.name", "coatnet_rmlp_2_rw_384.sw_in12k_ft_in1k"))
    assert any("crop_mode=squash" in note for note in notes)


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    return create(Model(name="test_resnet"), 10, 3).state_dict()


def test_a_file_without_metadata_has_the_preprocessing_of_its_model(tmp_path: Path, weights: Any) -> None:
    save_file(weights, tmp_path / "plain.safetensors")
    words = ("--model.name", "test_resnet", "--model.weights", tmp_path / "plain.safetensors")
    resolved, notes = resolve(_recipe(*words))
    assert _values(resolved) == (160, 0, 0.95, "bilinear", (0.5,), (0.5,))
    assert "names none" in notes[0]


def test_an_exported_file_has_its_own_preprocessing(tmp_path: Path, weights: Any) -> None:
    use = {"preprocessing": {"size": [64, 64], "crop_pct": 0.8, "interpolation": "bicubic", **CLIP}}
    path = tmp_path / "exported.safetensors"
    save_file(weights, path, {"paceline": json.dumps(use)})
    words = ("--model.name", "test_resnet", "--model.weights", path)
    resolved, notes = resolve(_recipe(*words))
    assert _values(resolved) == (64, 0, 0.8, "bicubic", (0.48,), (0.27,))
    assert str(path) in notes[0]
    for key, value in (("size", [64, "x"]), ("crop_pct", 7), ("mean", ["a"]), ("std", [0, 0, 0])):
        wrong = {"preprocessing": use["preprocessing"] | {key: value}}
        save_file(weights, path, {"paceline": json.dumps(wrong)})
        with raises("invalid-preprocessing"):
            resolve(_recipe(*words))


def test_folders_of_the_hub_have_their_own_preprocessing(tmp_path: Path) -> None:
    donor = timm.create_model("test_resnet", num_classes=10)
    timm.models.save_for_hf(donor, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"] |= CLIP | {"input_size": [3, 96, 96]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for words in (
        ("--model.name", f"local-dir:{tmp_path}"),
        ("--model.name", "test_resnet", "--model.weights", tmp_path),
        ("--model.name", "test_resnet", "--model.weights", tmp_path / "model.safetensors"),
    ):
        resolved, _ = resolve(_recipe(*words))
        assert (resolved.data.size, resolved.data.mean) == (96, (0.48, 0.46, 0.41))
        model = create(resolved.model, 7, 3)
        assert torch.equal(model.conv1[0].weight, donor.conv1[0].weight)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with raises("weights-not-found"):
        create(Model(name="test_resnet", weights=str(tmp_path)), 10, 3)
    for text in (
        None,
        "{",
        "[]",
        '{"architecture": "nothing"}',
        '{"architecture": "test_resnet", "pretrained_cfg": 3}',
    ):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with raises("model-folder-invalid"):
            create(Model(name=f"local-dir:{tmp_path}"), 10, 3)


def test_weights_of_a_vit_are_resampled_for_another_size(tmp_path: Path) -> None:
    save_file(create(Model(name="test_vit"), 10, 3).state_dict(), tmp_path / "vit.safetensors")
    config = Model(name="test_vit", weights=str(tmp_path / "vit.safetensors"), options={"img_size": 96})
    assert create(config, 10, 3)(torch.zeros(1, 3, 96, 96)).shape == (1, 10)
    headless = {name: tensor for name, tensor in create(config, 10, 3).state_dict().items() if "head" not in name}
    save_file(headless, tmp_path / "headless.safetensors")  # as self-supervised weights are
    create(Model(name="test_vit", weights=str(tmp_path / "headless.safetensors"), options={"img_size": 96}), 10, 3)


def test_a_run_records_the_values_and_resumes_with_them(here, tmp_path: Path, weights: Any) -> None:
    tree(tmp_path / "images", images=4)
    save_file(weights, tmp_path / "w.safetensors")
    words = ["--model.name", "test_resnet", "--model.weights", tmp_path / "w.safetensors", "--data.size", 32]
    words += ["--precision", "fp32", "--device", "cpu", "--log.tensorboard", "false", "--train.global_batch", 4]
    words += ["--train.duration", "1ba", "--optim.schedule", "{name: constant, points: []}"]
    answer = here("train", "finetune-full", "--data", tmp_path / "images", *words)
    assert answer.returncode == 0, answer.stderr
    run = tmp_path / "runs" / "finetune-full"
    recipe = load_recipe(str(run / "recipe.yaml"))
    assert _values(recipe) == (32, 0, 0.95, "bilinear", (0.5,), (0.5,))
    assert "preprocessing of timm's test_resnet" in (run / "log.txt").read_text()
    save_file(weights, tmp_path / "w.safetensors", {"paceline": json.dumps({"preprocessing": {"crop_pct": 0.1}})})
    answer = here("train", "--resume", run, "--train.duration", "2ba")
    assert answer.returncode == 0, answer.stderr
    assert load_recipe(str(run / "recipe.yaml")).evaluate == recipe.evaluate
    assert RunFolder(run).read_summary()["step"] == 2
    answer = here("evaluate", run)
    assert answer.returncode == 0, answer.stderr


def test_a_vit_of_a_fixed_size_says_how_to_change_it(here, tmp_path: Path) -> None:
    tree(tmp_path / "images", images=2)
    words = ("--model.name", "vit_tiny_patch16_224", "--model.options", "{depth: 1}", "--model.weights", "random")
    small = ("--data.size", 64, "--train.global_batch", 4, "--train.duration", "1ba", "--precision", "fp32")
    answer = here("train", "finetune-full", "--data", tmp_path / "images", *words, *small)
    assert answer.returncode == 1
    assert "--model.options '{img_size: 64}'" in answer.stderr
    assert "data.size to 224" in answer.stderr


def test_metadata_has_the_shortest_decimals_of_the_channels() -> None:
    values = torch.tensor([0.485, 0.1, 1 / 3])
    shortest = shortest_decimals(values)
    assert shortest[:2] == [0.485, 0.1]
    assert torch.equal(torch.tensor(shortest), values)
