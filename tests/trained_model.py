"""A small trained model and its images, for tests of its use."""

from pathlib import Path

import numpy as np
from PIL import Image
from sample_images import jpeg

import paceline as pl
from paceline.data.prepare.convert import Variant
from paceline.data.prepare.pack import prepare
from paceline.data.prepare.sources import tree as source

COLORS = {"blue": (50, 50, 200), "green": (50, 200, 50), "red": (200, 50, 50)}
CPU = ("--device", "cpu", "--precision", "fp32")


def colored(color: str, number: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.normal(COLORS[color], 50, (*size, 3)).clip(0, 255).astype(np.uint8))


def train_model(folder: Path, **overrides: object) -> Path:
    """Write images to FOLDER/images, prepare them in FOLDER/prepared, and return a run that has learned the colors."""
    for split, count in (("train", 16), ("val", 9)):
        for color in COLORS:
            place = folder / "images" / split / color
            place.mkdir(parents=True)
            for number in range(count):
                image = colored(color, number + 100 * (split == "val"), (24, 18 + number))
                (place / f"{number}.jpg").write_bytes(jpeg(image, quality=95))
    prepare(source(folder / "images", "folder"), folder / "prepared", [Variant()], 1)
    fields = {
        "data": None,
        "data.path": str(folder / "prepared"),
        "data.size": 16,
        "model": None,
        "model.name": "airbench",
        "model.options": {"widths": [8, 16], "norm": "group"},
        "train.global_batch": 12,
        "train.duration": "12ba",
        "optim.lr": 0.3,
        "optim.schedule.warmup": "3ba",
        "evaluate.every": "12ba",
        "evaluate.per_rank_batch": 4,
        "log.tensorboard": False,
        "precision": "fp32",
        "device": "cpu",
    }
    run = pl.train("cifar10-resnet18", fields | overrides, name="colors", runs=folder / "runs", in_process=True)
    return run.path
