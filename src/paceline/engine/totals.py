"""Results and times of a run, computed from its records for summary.json."""

from datetime import UTC, datetime
from typing import Any

from paceline.config.data import dataset_name
from paceline.config.io import fingerprint
from paceline.data.load.source import evaluation_variants
from paceline.engine.build import Setup
from paceline.track.records import RunFolder, split_seconds


def _described(setup: Setup) -> dict[str, Any]:
    source, kind = setup.source, setup.recipe.data.name
    return {
        "name": dataset_name(kind, source.place) or source.name,
        "path": source.place,
        "fingerprint": source.fingerprint,
        "classes": len(source.classes),
        "train_images": source.num_train,
        "val_images": source.num_val,
        "test_images": source.num_test,
        "val_variants": evaluation_variants(source, setup.timeline),
    }


def totals(folder: RunFolder, setup: Setup) -> dict[str, Any]:
    """Return the results and times of a run."""
    records = folder.records()
    trained = [record for record in records if record["kind"] == "train"]
    evals = [record for record in records if record["kind"] == "eval"]
    evaluated = [record for record in evals if None not in (record["loss"], record["top1"])]
    seconds = split_seconds(trained)
    train_seconds = sum(seconds.values())
    seconds["evaluate"] = sum(record["seconds"] for record in evaluated)
    seconds["checkpoint"] = sum(record["seconds"] for record in records if record["kind"] == "checkpoint")
    images = sum(record["images"] for record in trained)
    metric = setup.recipe.checkpoint.best
    choose = min if metric == "loss" else max
    return {
        "updated": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": setup.recipe.name,
        "fingerprint": fingerprint(setup.recipe),
        "data": _described(setup),
        "ranks": setup.world.size,
        "global_batch": setup.layout.global_batch,
        "per_rank_batch": setup.layout.per_rank_batch,
        "accumulation": setup.layout.accumulation,
        "precision": setup.precision,
        "parameters": sum(p.numel() for p in setup.replica.module.parameters()),
        "images": images,
        "corrupt": trained[-1].get("corrupt", 0) if trained else 0,
        "train_seconds": train_seconds,
        "compile_seconds": sum(record.get("compile_seconds", 0.0) for record in trained),
        "recompilations": setup.compilation.recompilations,
        "seconds": seconds,
        "images_per_second": images / train_seconds if train_seconds else None,
        "final": evaluated[-1] if evaluated else None,
        "test": next((record for record in reversed(records) if record["kind"] == "test"), None),
        "best": choose(evaluated, key=lambda record: record[metric]) if evaluated else None,
    }
