"""Make run folders with known figures, in the engine's format."""

import json
from pathlib import Path
from typing import Any

import yaml

from paceline.config.data import dataset_name
from paceline.config.io import load_recipe, to_tree


def make_run(
    root: Path,
    name: str,
    *words: str,
    ranks: int = 1,
    steps: int = 40,
    seconds: dict[str, Any] | None = None,
    status: str = "finished",
    every: int = 10,
    eval_seconds: float = 0.1,
    checkpoint_seconds: float = 0.01,
    top1: tuple[float, float] = (0.6, 0.9),
    memory: list[int] | None = None,
) -> Path:
    """Write a run folder and return its path.

    `seconds` per step by part: one number, or a list with one per rank; `top1`: validation accuracy before the first
    step and after the last; `memory`: peak bytes per rank.
    """
    folder = root / name
    (folder / "telemetry").mkdir(parents=True)
    recipe = load_recipe("digits", words)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(to_tree(recipe)))
    hosts = [f"host-{rank // 2}" for rank in range(ranks)]
    start = {"started": "2026-01-01T00:00:00+00:00", "command": ["paceline", "train", "digits"], "ranks": ranks}
    start |= {"host_of_rank": hosts, "precision": "fp32", "data": "d1", "packages": {"paceline": "1", "torch": "2"}}
    start["hardware"] = {"cpu": "cpu", "cores": 8, "device": "cpu", "threads_per_process": 1}
    (folder / "environment.json").write_text(json.dumps({"starts": [start]}))
    split = {"data": 0.001, "compute": 0.1, "sync": 0.0 if ranks == 1 else 0.005, "optimizer": 0.002} | (seconds or {})
    records: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        per_rank = {
            part: [every * each for each in (value if isinstance(value, list) else [value] * ranks)]
            for part, value in split.items()
        }
        position = {"step": step, "epoch": step / 11, "phase": 0}
        train = position | {"kind": "train", "steps": every, "loss": 2.0 - step / steps, "top1": 0.5, "lr": 0.1}
        train |= {"images": 128 * every, "seconds": {part: sum(each) / ranks for part, each in per_rank.items()}}
        train["images_per_second"] = train["images"] / sum(train["seconds"].values())
        train["memory_per_rank"] = memory or [10**9] * ranks
        if ranks > 1:
            train["seconds_per_rank"] = per_rank
        evaluated = position | {
            "kind": "eval",
            "top1": top1[0] + (top1[1] - top1[0]) * step / steps,
            "top5": 0.99,
            "loss": 0.5,
        }
        evaluated |= {"samples": 360, "correct": 300, "seconds": eval_seconds}
        records += [train, evaluated, position | {"kind": "checkpoint", "seconds": checkpoint_seconds}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    samples = [{"kind": "host", "time": 0.0, "gpus": []}]
    samples += [
        {"kind": "sample", "time": 1.0 + second, "cpu_percent": 50.0, "memory_bytes": 10**9} for second in range(5)
    ]
    (folder / "telemetry" / "host-0.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    summary = {"status": status, "global_batch": 128, "parameters": 25_000_000}
    summary["data"] = _data(dataset_name(recipe.data.name, recipe.data.path))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _data(name: str) -> dict[str, Any]:
    return {"name": name, "fingerprint": "d1", "classes": 10, "train_images": 1437}
