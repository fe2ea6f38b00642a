"""`paceline predict` against a plain script with timm, torchvision and a DataLoader, on the same images and cores.

    python benchmarks/predict.py --images DIR_OR_TAR [--rounds 5]

A decode-bound model (mobilenetv3_small_050 at 64 px) and a real one (resnet18 at 224 px), both with random weights in
fp32, predict the same JPEG files and write the five most probable classes to a CSV file. Paceline also reads them as
prepared data. The script uses the number of workers that was fastest in its first turn, which does not count.
Contestants take turns in one run; reports medians, and ratios within a round. Without --images, files are generated.
"""

import argparse
import csv
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_data import extracted
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from turns import Group, peak_bytes, rounds

import paceline as pl
from paceline.inference.open_model import Usage
from paceline.inference.predictions import PredictionJob, predict_images
from paceline.system.host import limit_openmp_spinning

MODELS = {"mobilenetv3_small_050": (64, 1), "resnet18": (224, 16)}
"""Image size, and by how much fewer images the model predicts."""
CONTESTANTS = [(model, kind) for model in MODELS for kind in ("script, files", "paceline, files", "paceline, prepared")]
CLASSES, BATCH, CROP = 10, 128, 0.875
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def generate(folder: Path, count: int) -> None:
    """Write JPEG files of the size of ImageNet's, of noise at several scales."""
    rng = np.random.default_rng(0)
    for number in range(count):
        total = np.zeros((375, 500, 3))
        for scale in (1, 4, 16, 64):
            small = rng.normal(128, 12 * scale**0.5, (375 // scale + 2, 500 // scale + 2, 3)).clip(0, 255)
            total += np.asarray(Image.fromarray(small.astype(np.uint8)).resize((500, 375)), np.float64) / 4
        Image.fromarray(total.astype(np.uint8)).save(folder / f"{number:06d}.jpg", quality=92)


def make_data(options: argparse.Namespace, work: Path) -> None:
    """Link the files of every model into class folders, prepare them, and make a run on them."""
    (work / "files").mkdir(parents=True)
    if options.images:
        files = extracted(options.images, work)
    else:
        generate(work / "files", min(64, options.count))
        files = sorted((work / "files").iterdir())
    for model, (size, fewer) in MODELS.items():
        place = work / model
        for number in range(max(CLASSES, options.count // fewer)):
            for split in ("val", "train") if number < 2 * CLASSES else ("val",):
                folder = place / "tree" / split / f"class{number % CLASSES}"
                folder.mkdir(parents=True, exist_ok=True)
                os.link(files[number % len(files)], folder / f"{number:06d}.jpg")
        pl.prepare(place / "tree", place / "prepared")
        fields: dict[str, Any] = {"data": None, "data.path": str(place / "prepared"), "data.size": size, "model": None}
        fields |= {"model.name": model, "train.duration": "1ba", "train.global_batch": 8, "evaluate.every": "2ba"}
        fields |= {"evaluate.per_rank_batch": BATCH, "evaluate.crop_pct": CROP, "evaluate.tta": "none"}
        fields |= {"precision": "fp32", "device": "cpu", "log.tensorboard": False}
        pl.train("cifar10-resnet18", fields, name="run", runs=place, procs=1)


class Files(Dataset[torch.Tensor]):
    def __init__(self, paths: list[Path], transform: Callable[[Image.Image], torch.Tensor]):
        self.paths, self._transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        with Image.open(self.paths[number]) as image:
            return self._transform(image.convert("RGB"))


def script(name: str, size: int, paths: list[Path], out: Path) -> Callable[[int], None]:
    """Return the plain script, called with the number of workers."""
    from paceline.system.torchvision_compat import allow_torchvision

    allow_torchvision()
    import timm
    from torchvision import transforms

    steps = [transforms.Resize(int(size / CROP)), transforms.CenterCrop(size), transforms.ToTensor()]
    files = Files(paths, transforms.Compose([*steps, transforms.Normalize(_MEAN, _STD)]))

    @torch.inference_mode()
    def run(workers: int) -> None:
        model: Any = timm.create_model(name, num_classes=CLASSES).eval()
        model.to(memory_format=torch.channels_last)
        with out.open("w", newline="") as file:
            rows, number = csv.writer(file), 0
            for images in DataLoader(files, BATCH, num_workers=workers):
                found = model(images.to(memory_format=torch.channels_last)).softmax(1).topk(5)
                for values, classes in zip(found.values.tolist(), found.indices.tolist(), strict=True):
                    rows.writerow([files.paths[number], *classes, *values])
                    number += 1

    return run


def contestant(number: int, work: Path) -> None:
    """For every line on standard input, predict all images and print the time."""
    name, kind = CONTESTANTS[number]
    place, out = work / name, work / f"out-{number}.csv"
    paths = sorted((place / "tree" / "val").rglob("*.jpg"))
    sys.stdout, answers = sys.stderr, sys.stdout
    workers, plain = 0, script(name, MODELS[name][0], paths, out) if kind.startswith("script") else None
    images, split = ("prepared", "val") if kind.endswith("prepared") else ("tree/val", "")
    usage = Usage(precision="fp32")
    job = PredictionJob(place / "run", (str(place / images),), out=out, device="cpu", split=split, usage=usage)
    for turn, _ in enumerate(sys.stdin):
        if plain and not turn:
            torch.set_num_threads(os.cpu_count() or 1)
            workers = min(range(len(os.sched_getaffinity(0)) + 1), key=lambda each: _seconds(plain, each))
        seconds = _seconds(plain, workers) if plain else _seconds(predict_images, job)
        assert len(out.read_text().splitlines()) == len(paths) + (plain is None)
        print(json.dumps({"seconds": seconds, "sync": workers, "peak": peak_bytes()}), file=answers, flush=True)
    os._exit(0)


def _seconds(action: Callable[[Any], object], argument: Any) -> float:
    begin = time.perf_counter()
    action(argument)
    return time.perf_counter() - begin


def report(counts: list[int], turns: list[list[Any]]) -> None:
    for first in range(0, len(CONTESTANTS), 3):
        print(f"\n{CONTESTANTS[first][0]} at {MODELS[CONTESTANTS[first][0]][0]} px, images/s and ratio to the script")
        for number in range(first, first + 3):
            own, base = turns[number], turns[first]
            speed = statistics.median(counts[number] / turn.seconds for turn in own)
            ratio = statistics.median(other.seconds / turn.seconds for turn, other in zip(own, base, strict=True))
            kind = CONTESTANTS[number][1]
            workers = f"  ({own[0].sync:.0f} workers)" if kind.startswith("script") else ""
            print(f"  {kind:20}{speed:10,.0f}{ratio:9.2f}x{workers}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder or tar of JPEG images")
    parser.add_argument("--count", type=int, default=8000, help="images per turn of the decode-bound model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contestant", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant is not None:
        contestant(options.contestant, options.work)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        make_data(options, work)
        sys.argv += ["--work", str(work)]
        limit_openmp_spinning()  # as the command does; the script gets the same setting
        groups = [Group(number, 1, apart=True) for number in range(len(CONTESTANTS))]
        turns = rounds(groups, options.rounds)
        for group in groups:
            group.close()
    report([max(CLASSES, options.count // MODELS[model][1]) for model, _ in CONTESTANTS], turns)


if __name__ == "__main__":
    main()
