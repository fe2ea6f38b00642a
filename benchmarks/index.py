"""Cost of an index of ImageNet's size: time to open it, and memory per rank with its decoding threads.

python benchmarks/index.py [--samples 1281167] [--ranks 2] [--threads 4]
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil


def write(folder: Path, samples: int) -> None:
    """Write a dataset of identical records."""
    from PIL import Image

    from paceline.data import codec
    from paceline.data.description import DESCRIPTION, FORMAT, sealed, shard_name
    from paceline.data.files import file_entry, write_array
    from paceline.data.index import INDEX

    jpeg = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(jpeg, "jpeg")
    record = codec.pack(jpeg.getvalue())
    split = folder / "original" / "train"
    split.mkdir(parents=True)
    (split / shard_name(0)).write_bytes(record + bytes(codec.OVERRUN))
    rows = np.zeros(samples, INDEX)
    rows["length"], rows["width"], rows["height"] = len(record), 64, 64
    rows["label"] = np.arange(samples) % 1000
    with (split / "index.npy").open("wb") as file:
        write_array(file, rows)
    (split / "names.txt").write_text("name\n" * samples)
    shard = split / shard_name(0)
    files = {
        "bytes": shard.stat().st_size,
        "shards": [file_entry(shard) | {"samples": samples}],
        "lists": [file_entry(split / name) for name in ("index.npy", "names.txt")],
    }
    counts = {"samples": samples, "left_out": 0, "remarks": 0, "per_class": np.bincount(rows["label"]).tolist()}
    description = {
        "kind": "shards",
        "format": FORMAT,
        "name": "index",
        "classes": [{"id": f"c{number}", "name": f"c{number}"} for number in range(1000)],
        "splits": {"train": counts},
        "variants": {"original": {"splits": {"train": files}}},
        "remarks": [],
    }
    (folder / DESCRIPTION).write_text(json.dumps(sealed(description)))


def rank(folder: Path, threads: int) -> None:
    """Open the dataset, load a few batches, and print time and memory."""
    import torch

    from paceline.config.data import Data
    from paceline.config.recipe import Recipe, Train
    from paceline.data.load.loader import ImageLoader
    from paceline.data.load.order import Plan
    from paceline.data.shards import Dataset

    def own_bytes() -> int:
        return psutil.Process().memory_full_info().uss

    before, begin = own_bytes(), time.perf_counter()
    split = Dataset.open(folder).split("train")
    plan = Plan.of(Recipe("index", data=Data(size=32), train=Train(global_batch=256)), len(split))
    loader = ImageLoader(Data(size=32), {"": split}, plan, torch.device("cpu"), threads)
    opened = time.perf_counter() - begin
    index = own_bytes() - before
    batches = loader.pixels()
    for _ in range(10):
        next(batches)
    print(json.dumps({"seconds": opened, "index": index, "all": own_bytes() - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.threads)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), options.samples)
        words = [sys.executable, __file__, "--rank", folder, "--threads", str(options.threads)]
        ranks = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(options.ranks)]
        results = [json.loads(process.communicate()[0]) for process in ranks]
    print(f"{options.samples:,} samples, {options.ranks} ranks x {options.threads} threads")
    for number, result in enumerate(results):
        print(
            f"  rank {number}: opened in {result['seconds'] * 1e3:.1f} ms; USS {result['index'] / 1e6:.1f} MB "
            f"for the index, {result['all'] / 1e6:.1f} MB with an epoch's order, threads and batches"
        )


if __name__ == "__main__":
    main()
