"""evaluate.variant: the variant of prepared images that is used for validation."""

import logging
from pathlib import Path

import pytest
import torch
from conftest import complaint, raises
from sample_images import tree
from servers import FileServer

from paceline.config.io import load_recipe
from paceline.config.recipe import Recipe
from paceline.config.timeline import Timeline
from paceline.data.load.batch import Batch
from paceline.data.load.source import fetch, open_source
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.data.unlabeled import find_images
from paceline.system import remote
from paceline.track.records import RunFolder

CPU = torch.device("cpu")
MODEL = ("--model.options", "{widths: [8, 16], norm: group}", "--device", "cpu", "--precision", "fp32")
SHORT = ("--data.augment", "null", "--train.global_batch", "6", "--train.duration", "2ba", "--log.tensorboard", "false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Prepared images with and without the original ones."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, variants in (("both", [Variant(), Variant(max_side=32)]), ("small", [Variant(max_side=32)])):
        splits = ("train", "val", "test")
        prepare(source(tree(folder / f"{name}-in", splits=splits), "folder"), folder / name, variants, 1)
    return folder


def _recipe(place: object, *words: str) -> Recipe:
    given = ("--data.name", "shards", "--data.path", str(place), "--data.size", "24", *SHORT)
    return load_recipe("digits", [*given, *words])


def _images(recipe: Recipe, split: str = "val", step: int = 0, **how: bool) -> torch.Tensor:
    found = open_source(recipe, split=split if how else "", **how)
    phase = Timeline.of(recipe, found.num_train).phase_at(step)
    batches: list[Batch] = list(found.evaluator(phase, 0, 1, CPU, split=split))  # type: ignore[arg-type]
    return torch.cat([batch.images for batch in batches])


@pytest.mark.parametrize("split", ["val", "test"])
def test_original_images_are_the_default(folder: Path, split: str) -> None:
    small, both = ("--data.variant", "max-32-q90"), folder / "both"
    original = _images(_recipe(both, "--data.variant", "original"), split)
    resized = _images(_recipe(both, *small, "--evaluate.variant", "max-32-q90"), split)
    assert not torch.equal(original, resized)
    assert torch.equal(_images(_recipe(both, *small), split), original)
    assert torch.equal(_images(_recipe(both, *small), split, only_evaluate=True), original)
    assert torch.equal(_images(_recipe(both, *small, "--evaluate.variant", "training"), split), resized)
    assert torch.equal(_images(_recipe(folder / "small"), split), resized)
    # the images that are trained on stay those of data.variant
    assert torch.equal(
        _images(_recipe(both), "train", only_evaluate=True), _images(_recipe(both, *small), "train", only_evaluate=True)
    )


def test_without_original_images_the_log_says_what_is_validated_on(folder: Path, caplog) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        open_source(_recipe(folder / "small"))
    assert "max-32-q90" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "paceline"):
        open_source(_recipe(folder / "small", "--evaluate.variant", "training"))
        open_source(_recipe(folder / "both", "--data.variant", "max-32-q90"))
    assert not caplog.text


def test_the_variant_is_part_of_the_fingerprint(folder: Path) -> None:
    one, other, last = (
        open_source(_recipe(folder / "both", "--data.variant", "max-32-q90", "--evaluate.variant", variant))
        for variant in ("", "original", "training")
    )
    assert one.fingerprint == other.fingerprint == f"{last.fingerprint}+original"
    assert one.variants == ("max-32-q90", "original")


def test_phases_may_be_validated_on_what_they_train_on(folder: Path) -> None:
    phases = "[{epochs: [0, 1], variant: max-32-q90}, {epochs: [1, 2], variant: original}]"
    words = ("--phases", phases, "--train.duration", "2ep")
    first, last = (_images(_recipe(folder / "both", *words, "--evaluate.variant", "training"), step=n) for n in (0, 3))
    assert not torch.equal(first, last)
    assert torch.equal(_images(_recipe(folder / "both", *words)), last)


def test_unknown_variants_are_refused(folder: Path, here) -> None:
    with raises("unknown-variant") as caught:
        open_source(_recipe(folder / "both", "--data.variant", "original", "--evaluate.variant", "max-9"))
    assert "evaluate.variant" in str(caught.value)
    words = ("--data.name", "shards", "--data.path", folder / "both", "--data.variant", "original", *SHORT)
    assert "[unknown-variant]" in complaint(here("plan", "digits", *words, "--evaluate.variant", "max-9"))


def test_a_variant_of_images_that_are_not_prepared_is_warned_about(folder: Path, here) -> None:
    words = ("--evaluate.variant", "training", "--data.size", "16", *MODEL, *SHORT)
    for name, variant, is_unused in (
        ("small-in", "max-32-q90", True),
        ("small-in", "original", False),
        ("small", "max-32-q90", False),
    ):
        data = ("--data", folder / name, "--data.variant", variant)
        answer = here("train", "digits", *data, *words)
        assert answer.returncode == 0, answer.stderr
        assert ("variant max-32-q90 has no effect" in answer.stderr) == is_unused
    answer = here("evaluate", "runs/digits", "--data", folder / "small-in", "--evaluate.variant", "max-32-q90")
    assert "variant max-32-q90 has no effect" in answer.stderr


def test_plan_names_the_variant(folder: Path, here) -> None:
    words = ("--data.name", "shards", "--data.path", folder / "both", "--data.variant", "max-32-q90", *SHORT)
    for more, shown in (((), "max-32-q90  original"), (("--evaluate.variant", "training"), "max-32-q90  max-32-q90")):
        assert shown in here("plan", "digits", *words, *more).stdout
    without_data = here("plan", "imagenet-rn50-ffcv-16ep", "--evaluate.variant", "")
    assert "max-500-q90  original, else max-500-q90" in without_data.stdout, without_data.stderr


def test_only_what_is_evaluated_is_downloaded(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    with FileServer(folder).running() as server:
        recipe = _recipe(f"{server.address}/both", "--data.variant", "max-32-q90")

        def shards() -> list[str]:
            return sorted(path.removeprefix("/both/") for path, _ in server.asked if path.endswith(".pcl"))

        _images(recipe, "test", only_evaluate=True)
        assert shards() == ["original/test/shard-00000.pcl"]
        fetch(recipe)
        names = ("max-32-q90/train", "original/test", "original/val")
        assert shards() == [f"{name}/shard-00000.pcl" for name in names]
        assert len(open_source(recipe).variants) == 2


def test_predictions_read_what_an_evaluation_reads(folder: Path) -> None:
    def chosen(place: str, *variants: str) -> str:
        (part, *_) = find_images([str(folder / place)], split="val", default_variants=variants)  # type: ignore[arg-type]
        return part.images.folder.parent.name  # type: ignore[union-attr]

    assert chosen("both", "", "max-32-q90") == "original"
    assert chosen("both", "max-32-q90", "max-32-q90") == "max-32-q90"
    assert chosen("small", "original", "original") == "max-32-q90"


def test_a_run_says_what_it_was_validated_on(folder: Path, here, tmp_path: Path) -> None:
    words = (
        "--data.name",
        "shards",
        "--data.path",
        folder / "both",
        "--data.variant",
        "max-32-q90",
        "--data.size",
        "24",
    )
    answer = here("train", "digits", *words, *SHORT, *MODEL)
    assert answer.returncode == 0, answer.stderr
    assert "validated on original" in answer.stderr
    run = tmp_path / "runs" / "digits"
    summary = RunFolder(run).read_summary()
    assert summary["data"]["val_variants"] == ["original"]
    evaluated = here("evaluate", run)
    assert f"({summary['final']['correct']} of 12)" in evaluated.stdout
    assert "(val split, variant original)" in evaluated.stdout
