"""The files that the documents assume: runs, prepared data, images, archives and logs, all of them small."""

import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

import datasets
import numpy as np
import pyarrow
from imagenet_archives import write_archives
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file
from sample_images import tree

from paceline.cli.main import main
from paceline.config.model import Model
from paceline.data import arrays
from paceline.models import factory

STEPS = 2
_RECIPE = f"""name: digits
base: digits
precision: fp32
model: {{options: {{widths: [8, 16], norm: group}}}}
train: {{duration: {STEPS}ba, global_batch: 16}}
"""
_IMAGES = ("--data", "null", "--data.path", "data/images", "--data.size", "32")
_LOG = """# global_batch: 1024
Epoch: [0][1251/1252]\tTime  6.123 ( 6.500)\tData  5.50 ( 5.930)\tLoss 4.1e+00 (5.2e+00)\tAcc@1  20.00 ( 12.00)
 * Acc@1 35.120 Acc@5 60.500
"""


def make(folder: Path) -> None:
    """Write what the documents assume to the working directory, which is `folder`."""
    tree(Path("TREE"))
    images = tree(Path("IMAGES"), images=10, splits=("",))
    files = enumerate(sorted(images.glob("*/*")))
    rows = [f"{path},{path.parent.name},{'train' if number % 10 else 'val'}" for number, path in files]
    Path("LIST.csv").write_text("\n".join(["path,label,split", *rows]))
    _write_sources(rows)
    write_archives(folder)
    Path("other-program.log").write_text(_LOG)
    Path("recipe.yaml").write_text(_RECIPE)
    Image.new("L", (8, 8)).save("digit.png")
    fractions = ("--val-fraction", "0.1", "--test-fraction", "0.1")
    _run("prepare", "folder", images, "--out", "data/images", *fractions, "--max-side", "48")
    for name in ("imagenet", "mine", "photos"):
        shutil.copytree("data/images", f"data/{name}")
    _write_cifar10(Path("data/cifar10"))
    save_file(factory.create(Model(name="resnet18"), 10, 3).state_dict(), "imagenet-rn18.safetensors")
    _run("train", "recipe.yaml")
    _run("train", "recipe.yaml", "--name", "flowers", *_IMAGES)


def provide(workspace: Path, folder: Path, runs: Iterable[str]) -> None:
    """Link what commands only read to a folder, and copy a run under each of these names, since runs are resumed."""
    (folder / "data").mkdir()
    for path in (*workspace.glob("*"), *workspace.glob("data/*")):
        if path.name not in ("data", "runs"):
            (folder / path.relative_to(workspace)).symlink_to(path)
    for name in set(runs):
        kind = "flowers" if name == "flowers" else "digits"
        shutil.copytree(workspace / "runs" / kind, folder / "runs" / name)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def _write_sources(rows: list[str]) -> None:
    """Write the other sources that can be prepared, from the rows of LIST.csv and from TREE."""
    listed = [dict(zip(("path", "label", "split"), row.split(","), strict=True)) for row in rows]
    Path("LIST.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    parquet.write_table(pyarrow.Table.from_pylist(listed), "LIST.parquet")
    Path("LIST.txt").write_text("\n".join(f"{row['path']} {row['label']}" for row in listed))
    with tarfile.open("TREE.tar", "w") as archive:
        archive.add("TREE")
    Path("SHARDS").mkdir()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    tables = {}
    for split in ("train", "val"):
        files = sorted(Path("TREE", split).rglob("*.JPEG"))
        for number in range(2):
            with tarfile.open(f"SHARDS/{split}-{number}.tar", "w") as archive:
                for index, path in enumerate(files[number::2]):
                    archive.add(path, f"{index}.jpg")
                    label = tarfile.TarInfo(f"{index}.txt")
                    label.size = len(path.parent.name)
                    archive.addfile(label, io.BytesIO(path.parent.name.encode()))
        images = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
        table = {"image": images, "label": [path.parent.name for path in files]}
        tables[split] = datasets.Dataset.from_dict(table, features)
    datasets.DatasetDict(tables).save_to_disk("SAVED")


def _write_cifar10(folder: Path) -> None:
    rng = np.random.default_rng(0)
    pairs = {
        split: (rng.integers(0, 256, (number, 32, 32, 3), np.uint8), np.arange(number, dtype=np.uint8) % 10)
        for split, number in (("train", 512), ("val", 20))
    }
    folder.mkdir()
    arrays.write(folder, "cifar10", [str(label) for label in range(10)], pairs, {})
