"""From a folder of images to a model in use: prepare, fine-tune, see what it gets wrong, predict, export.

    python examples/fine_tune.py                          # crops of two sample images; minutes on two cores
    python examples/fine_tune.py --images IMAGES --model convnext_tiny --weights convnext_tiny.safetensors

IMAGES has a folder per class. Every step is a command, and is printed before it runs, so that you can repeat it with
other options. Without --images, the script crops the two sample images of scikit-learn. Without --weights, it first
trains the network to predict how the training images are rotated, and fine-tunes these weights.
"""

import argparse
import csv
import itertools
import shlex
import subprocess
import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_image

REGIONS = {
    "flower": ("flower.jpg", (175, 90, 440, 350)),
    "leaves": ("flower.jpg", (450, 0, 640, 380)),
    "sky": ("china.jpg", (330, 0, 640, 190)),
    "temple": ("china.jpg", (95, 70, 320, 370)),
    "trees": ("china.jpg", (370, 290, 640, 427)),
}
"""Class, sample image, and region that shows the class: left, top, right and bottom in pixels."""
CELL, SIDE, STRIDE = 60, 48, 6
"""In pixels. Crops are taken within the cells of a grid, so that those of different cells do not overlap."""
SMALL = {
    "data.size": "64",
    "train.duration": "10ep",
    "train.global_batch": "32",
    "evaluate.every": "2ep",
    "optim.lr": "0.02",
    "optim.schedule.name": "cosine",
    "optim.schedule.points": "[]",
}
"""Settings for a small network and small images; the recipe is for larger ones."""


def main() -> None:
    options = _options()
    out = options.out
    images = options.images or write_crops(out / "images")
    # crops that overlap stay in one split
    group = [] if options.images else ["--group-by", r"\w+/cell-\d+-\d+"]
    small = [] if options.images else [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    chosen = ["--model.name", options.model, *small, *options.training]
    data, run = out / "data", out / "runs" / "fine-tuned"
    paceline("prepare", images, "--out", data, "--val-fraction", "0.2", "--test-fraction", "0.2", *group)
    paceline("data", data, "--duplicates")
    weights = options.weights or pretrain(data, out, chosen)
    paceline(
        *("train", "finetune-full", "--name", run.name, "--runs", run.parent),
        *("--data", data, "--model.weights", weights, *chosen),
    )
    paceline("evaluate", run, "--split", "test", "--details")
    paceline("report", run, "--out", out / "report.html")
    paceline("predict", run, images, "--precision", "fp32", "--out", out / "predictions.csv")
    paceline("export", run, "--to", out / "model.onnx")
    paceline("predict", out / "model.onnx", images, "--out", out / "predictions-onnx.csv")
    compare(out / "predictions.csv", out / "predictions-onnx.csv")
    print(f"Open {out / 'report.html'}, and classify images of your own with: paceline serve {run}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder per class (default: crops of two sample images)")
    parser.add_argument("--model", default="test_resnet", help="a timm model (default: test_resnet, a tiny one)")
    parser.add_argument("--weights", help="file or folder with pretrained weights, or pretrained (default: see above)")
    parser.add_argument("--out", type=Path, default=Path("fine-tune"), help="new folder for all files")
    options, options.training = parser.parse_known_args()  # other options are fields of the recipe
    try:
        options.out.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"--out {options.out} exists already. Choose another folder.")
    return options


def paceline(*words: object) -> None:
    """Print a command and run it; end the script if it fails."""
    command = ["paceline", *map(str, words)]
    print(f"\n$ {shlex.join(command)}", flush=True)
    status = subprocess.run([sys.executable, "-m", *command], check=False).returncode
    if status:
        sys.exit(status)


def write_crops(folder: Path) -> Path:
    """Write square crops of the two sample images to a folder per class, and return the folder."""
    for name, (file, (left, top, right, bottom)) in REGIONS.items():
        (folder / name).mkdir(parents=True)
        image = Image.fromarray(load_sample_image(file))
        corners = itertools.product(range(left, right - CELL + 1, CELL), range(top, bottom - CELL + 1, CELL))
        offsets = range(0, CELL - SIDE + 1, STRIDE)
        for (x, y), across, down in itertools.product(corners, offsets, offsets):
            crop = image.crop((x + across, y + down, x + across + SIDE, y + down + SIDE))
            crop.save(folder / name / f"cell-{x}-{y}-{across}-{down}.jpg", quality=95)
    return folder


def pretrain(data: Path, out: Path, chosen: list[str]) -> Path:
    """Train a network to predict how the training images are rotated (Gidaris et al. 2018), and return its weights."""
    paceline("data", data, "--export", "jpeg", "--split", "train", "--out", out / "training-images")
    files = sorted((out / "training-images").rglob("*.jpg"))
    for angle in (0, 90, 180, 270):
        folder = out / "rotated" / str(angle)
        folder.mkdir(parents=True)
        for number, path in enumerate(files):
            with Image.open(path) as image:
                image.convert("RGB").rotate(angle).save(folder / f"{number}.jpg", quality=95)
    rotated, run, weights = out / "rotated-data", out / "runs" / "rotations", out / "rotations.safetensors"
    paceline("prepare", out / "rotated", "--out", rotated, "--val-fraction", "0.1")
    paceline(
        *("train", "finetune-full", "--name", run.name, "--runs", run.parent, "--data", rotated),
        *("--model.weights", "random", *chosen),
    )
    paceline("export", run, "--to", weights)
    return weights


def compare(first: Path, second: Path) -> None:
    """Print on how many images two files of predictions agree; end the script if not on all."""
    tables = [list(csv.DictReader(path.open(encoding="utf-8", newline=""))) for path in (first, second)]
    pairs = list(zip(*tables, strict=True))
    same = sum(one["path"] == other["path"] and one["class_1"] == other["class_1"] for one, other in pairs)
    print(f"\n{first} and {second}: same class for {same} of {len(pairs)} images")
    if same < len(pairs):
        sys.exit(1)


if __name__ == "__main__":
    main()
