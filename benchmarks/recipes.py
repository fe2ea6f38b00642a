"""Small versions of the ImageNet recipes on ImageNet files, trained by the engine and by plain loops.

    python benchmarks/recipes.py --images DIR_OR_TAR [--recipes imagenet-rn50-a3 ...] [--seeds 3] [--longer 2]

The plain loops are written from the recipes' sources: torch's optimizers and schedulers, and torchvision's or timm's
networks, crops and augmentation. Both contestants have the same images and nothing else in common: neither initial
weights nor random numbers. Images and batches are smaller than the recipe's, networks narrower, and trainings shorter
(proxies.py). The classes are groups of files with neighboring names; every fifth file is for validation.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from loader_data import extracted
from plain_images import Folder
from proxies import IMAGENET, Curve, Proxy, distances, longer, prepare, shrink, train, train_plainly

_DEFAULT = (
    "imagenet-rn50-imagenet18-1",
    "imagenet-rn18-ffcv-16ep",
    "imagenet-rn50-torchvision-v1",
    "imagenet-rn50-torchvision-v2",
    "imagenet-rn50-a3",
    "imagenet-rn18-2ep",
    "imagenet-rn18-2ep-cosine",
)
"""One recipe of each family."""


def tree_of(source: Path, work: Path, classes: int) -> Path:
    """Write split/class/file with the images of a folder or tar."""
    files = extracted(source, work)
    for number, path in enumerate(files):
        split, label = "val" if number % 5 == 4 else "train", number * classes // len(files)
        folder = work / "tree" / split / f"n{label:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(path, folder / path.name.replace(path.suffix, ".JPEG"))
    return work / "tree"


def row(proxy: Proxy, ours: list[Curve], plain: list[Curve]) -> str:
    """Return a row of the table: both figures, and their difference in standard errors."""
    apart = distances(ours, plain)
    cells = [proxy.recipe, f"{len(ours[0].losses)}"]
    for place in ("last third", "validation"):
        means = [np.mean([_figure(curve, place) for curve in curves]) for curves in (ours, plain)]
        cells += [*(f"{mean:.3f}" for mean in means), f"{apart[place][0] / apart[place][1]:+.1f}"]
    cells += [f"{100 * np.mean([curve.top1 for curve in curves]):.1f}%" for curves in (ours, plain)]
    return " | ".join(cells)


def _figure(curve: Curve, place: str) -> float:
    return curve.val_loss if place == "validation" else float(np.array_split(np.array(curve.losses), 3)[2].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder or tar of JPEG images")
    parser.add_argument("--recipes", nargs="+", default=_DEFAULT, choices=[proxy.recipe for proxy in IMAGENET])
    parser.add_argument("--classes", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--longer", type=int, default=1, help="epochs of a proxy are this many times as many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PACELINE_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tree = tree_of(options.images, work, options.classes)
        data, images = prepare(tree, work / "prepared", sides=4), Folder(tree)
        print("recipe | steps | loss: engine | plain | SE | validation: engine | plain | SE | top-1: engine | plain")
        for proxy in (longer(proxy, options.longer) for proxy in IMAGENET if proxy.recipe in options.recipes):
            seeds, ours, plain = range(options.seeds), [], []
            for seed in seeds:  # they take turns
                ours.append(train(shrink(proxy, {"data.path": str(data)}, seed), work / "runs"))
                plain.append(train_plainly(proxy, images, seed))
            print(row(proxy, ours, plain), flush=True)


if __name__ == "__main__":
    main()
