"""A recipe of imagenet18 on generated shards and two ranks: its phases change sizes, batches and learning rates."""

from pathlib import Path

import yaml
from processes import run_ranks
from sample_images import tree

from paceline.config.io import load_recipe, to_tree
from paceline.config.timeline import Timeline
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source
from paceline.track.records import RunFolder

SAMPLES = 4 * 16


def _small(name: str) -> dict[str, object]:
    """Return a recipe with an eighth of the image size, 1/512 of the batch size and a small model."""
    tree = to_tree(load_recipe(name))
    for phase in tree["phases"]:
        phase["size"] //= 8
        phase["global_batch"] = max(4, (phase["global_batch"] or tree["train"]["global_batch"]) // 512)
    tree["train"]["global_batch"] = 8
    tree["model"] = {"name": "airbench", "options": {"widths": [8, 16], "norm": "group"}}
    tree["log"] = {"every": "1ba", "tensorboard": False}
    tree["evaluate"] |= {"every": "5ep", "per_rank_batch": 5}
    tree["checkpoint"]["every"] = "50ep"
    return tree | {"name": "small", "precision": "fp32"}


def test_sizes_batches_and_learning_rates_change_as_published(tmp_path: Path) -> None:
    variants = [Variant(), Variant(short_side=160), Variant(short_side=352)]
    prepare(source(tree(tmp_path / "in", classes=4, images=16), "imagenet"), tmp_path / "out", variants, 2)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(_small("imagenet-rn50-imagenet18-1")))
    answer = run_ranks(tmp_path, 2, "train", path, "--data.path", tmp_path / "out")
    assert "0 - 5" in answer.stderr
    assert "36 px rectangular" in answer.stderr
    recipe = load_recipe(str(path))
    timeline = Timeline.of(recipe, SAMPLES)
    records = list(RunFolder(tmp_path / "runs" / "small").records())
    trained = {record["step"]: record for record in records if record["kind"] == "train"}
    assert len(trained) == timeline.total
    for phase, given in zip(timeline.phases, recipe.phases, strict=True):
        first, last = trained[phase.begin + 1], trained[phase.end]
        assert (first["phase"], last["phase"]) == (phase.number, phase.number)
        assert first["lr"] == given.lr[0]
        slope = (given.lr[-1] - given.lr[0]) / (phase.end - phase.begin)
        assert abs(last["lr"] - (given.lr[-1] - slope)) < 1e-6
        assert {first["images"], last["images"]} == {phase.global_batch}
    evaluated = [record for record in records if record["kind"] == "eval"]
    assert {record["samples"] for record in evaluated} == {SAMPLES}
    # evaluating the same weights on one process has the same result, also with rectangular batches
    alone = run_ranks(tmp_path, 1, "evaluate", tmp_path / "runs" / "small", "--checkpoint", "last")
    assert f"({evaluated[-1]['correct']} of {SAMPLES})" in alone.stdout
