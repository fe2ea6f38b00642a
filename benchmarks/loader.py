"""Paceline's loader against others on the same images: images per CPU second on one core, and images/s on all cores.

    python benchmarks/loader.py --images DIR_OR_TAR [--out loader-benchmark] [--rounds 5]

Every loader applies RandomResizedCrop and flip in batches of 256 from a warm page cache. Each measurement runs in its
own process, pinned to its cores. Loaders alternate round by round, so that noise affects all of them. Reports medians
over rounds; ratios are within a round. Loaders that are not installed are skipped and listed.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

BATCH = 256
COPIES = 8  # per image, so that an epoch has several batches
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BASELINE = "torchvision, float"
FFCV_JPEG_SHARES = {"all JPEG": 1.0, "half raw": 0.5}


# ---- loaders: each yields batches forever ----


def ours(work: Path, size: int, threads: int, variant: str, path: str) -> Iterator[Any]:
    os.environ["PACELINE_CODEC_PATH"] = path
    import torch

    from paceline.config.data import Augment, Data
    from paceline.config.recipe import Recipe, Train
    from paceline.data.load.loader import ImageLoader
    from paceline.data.load.order import Plan
    from paceline.data.shards import Dataset

    data = Data(name="shards", size=size, augment=Augment(flip="random"))
    split = Dataset.open(work / "shards").split("train", variant)
    plan = Plan.of(Recipe("loader", data=data, train=Train(global_batch=BATCH)), len(split))
    loader = ImageLoader(data, {"": split}, plan, torch.device("cpu"), threads)
    return (pixels for _, pixels in loader.pixels())


def torchvision(work: Path, size: int, threads: int, as_float: bool) -> Iterator[Any]:
    import torch
    from torch.utils.data import DataLoader

    from paceline.system.torchvision_compat import allow_torchvision

    allow_torchvision()
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    torch.set_num_threads(1)
    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)] if as_float else [transforms.PILToTensor()]
    images = ImageFolder(str(work / "tree"), transforms.Compose(steps))
    workers = 0 if threads == 1 else threads
    return _forever(
        DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0)
    )


def timm(work: Path, size: int, threads: int) -> Iterator[Any]:
    import torch

    from paceline.system.torchvision_compat import allow_torchvision

    allow_torchvision()
    from timm.data import create_dataset, create_loader

    torch.set_num_threads(1)
    images = create_dataset("", root=str(work / "tree"))
    workers = 0 if threads == 1 else threads
    return _forever(
        create_loader(
            images,
            (3, size, size),
            BATCH,
            is_training=True,
            use_prefetcher=False,
            num_workers=workers,
            persistent_workers=workers > 0,
            color_jitter=0.0,
            interpolation="bilinear",
        )
    )


def webdataset(work: Path, size: int, threads: int) -> Iterator[Any]:
    import torch
    import webdataset as wds

    from paceline.system.torchvision_compat import allow_torchvision

    allow_torchvision()
    from torchvision import transforms

    torch.set_num_threads(1)
    steps = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    archives = [str(path) for path in sorted(work.glob("images-*.tar"))]
    images = wds.WebDataset(archives, shardshuffle=False).shuffle(500).decode("pil").to_tuple("jpg", "cls")
    images = images.map_tuple(transforms.Compose(steps), int).batched(BATCH, partial=False)
    workers = 0 if threads == 1 else min(threads, len(archives))
    return _forever(wds.WebLoader(images, batch_size=None, num_workers=workers))


def dali(work: Path, size: int, threads: int, antialias: bool) -> Iterator[Any]:
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        encoded, _ = fn.readers.file(file_root=str(work / "tree"), random_shuffle=True)
        images = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB, random_area=[0.08, 1.0])
        images = fn.resize(images, size=(size, size), interp_type=types.INTERP_LINEAR, antialias=antialias)
        return fn.flip(images, horizontal=fn.random.coin_flip())

    pipe = pipeline()
    pipe.build()
    while True:
        yield pipe.run()


def ffcv(work: Path, size: int, threads: int, file: str) -> Iterator[Any]:
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    image = [RandomResizedCropRGBImageDecoder((size, size)), RandomHorizontalFlip(), ToTensor(), ToTorchImage()]
    settings = {"num_workers": threads, "order": OrderOption.RANDOM, "os_cache": True, "drop_last": True}
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()]}
    return _forever(Loader(str(work / file), BATCH, **settings, pipelines=pipelines))


def raw(work: Path, size: int, threads: int) -> Iterator[Any]:
    """Raw pixels, max 400 px, from mmap, cropped and resized by Pillow: the difference to others is decoding."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from PIL import Image

    from paceline.config.data import Augment
    from paceline.data.load.crops import random_boxes

    index = np.load(work / "raw.npy")
    pixels = np.memmap(work / "raw.bin", np.uint8, "r")
    pool, chance = ThreadPoolExecutor(threads), np.random.default_rng(0)
    batch = np.empty((BATCH, size, size, 3), np.uint8)

    def one(position: int, number: int, box: Any) -> None:
        offset, width, height = index[number]
        image = pixels[offset : offset + 3 * width * height].reshape(height, width, 3)
        x, y, w, h, mirrored = box
        part = Image.fromarray(image[y : y + h, x : x + w]).resize((size, size), Image.Resampling.BILINEAR)
        result = np.asarray(part)
        batch[position] = result[:, ::-1] if mirrored else result

    for step in range(1 << 30):
        ids = chance.integers(0, len(index), BATCH)
        boxes = random_boxes(Augment(flip="random"), 0, step)(index[ids][:, 1:], ids)
        list(pool.map(one, range(BATCH), ids.tolist(), boxes))
        yield batch


def _forever(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


Maker = Callable[[Path, int, int], Iterator[Any]]


def contestants() -> dict[str, tuple[str, Maker]]:
    """Return by name the module that a loader needs, and how to start it."""
    found: dict[str, tuple[str, Maker]] = {
        BASELINE: ("torchvision", partial(torchvision, as_float=True)),
        "torchvision, uint8": ("torchvision", partial(torchvision, as_float=False)),
        "timm": ("timm", timm),
        "webdataset": ("webdataset", webdataset),
        "DALI (CPU), antialiased": ("nvidia.dali", partial(dali, antialias=True)),
        "DALI (CPU), fast": ("nvidia.dali", partial(dali, antialias=False)),
        **{f"FFCV, max 500, {kind}": ("ffcv", _beton(kind)) for kind in FFCV_JPEG_SHARES},
        "raw pixels, max 400": ("PIL", raw),
    }
    from paceline.data.codec import paths

    for path in reversed(paths()):
        for variant in ("original", "max-500-q90", "max-400-q90"):
            found[f"paceline, {variant}, {path}"] = ("paceline", _bound(variant, path))
    return found


def _beton(kind: str) -> Maker:
    return lambda work, size, threads: ffcv(work, size, threads, f"{kind}.beton")


def _bound(variant: str, path: str) -> Maker:
    return lambda work, size, threads: ours(work, size, threads, variant, path)


# ---- the data of each loader ----


def prepare(source: Path, work: Path, wanted: set[str]) -> int:
    """Write the tree, shards, tars and raw pixels that loaders read. Returns the number of images."""
    tree = work / "tree"
    if not tree.exists():
        files = extracted(source, work)
        for number, path in enumerate(files):
            folder = tree / f"class{number % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            for copy in range(COPIES):
                os.link(path, folder / f"{number:06d}-{copy}.jpg")
    files = sorted(tree.rglob("*.jpg"))
    from paceline.data.prepare import pack, sources
    from paceline.data.prepare.convert import Variant

    variants = [Variant(), Variant(max_side=500), Variant(max_side=400)]
    pack.prepare(
        sources.tree(tree, "benchmark", val_fraction=0.01),
        work / "shards",
        variants,
        os.cpu_count() or 1,
    )
    if "webdataset" in wanted and not list(work.glob("images-*.tar")):
        _write_tars(files, work)
    for kind, share in FFCV_JPEG_SHARES.items():
        if f"FFCV, max 500, {kind}" in wanted and not (work / f"{kind}.beton").exists():
            _write_ffcv(tree, work / f"{kind}.beton", share)
    if "raw pixels, max 400" in wanted and not (work / "raw.npy").exists():
        _write_raw(files, work)
    return len(files)


def extracted(source: Path, work: Path) -> list[Path]:
    if source.is_dir():
        copies = work / "files"
        copies.mkdir(exist_ok=True)
        found = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
        return [Path(shutil.copy(path, copies / f"{number:06d}.jpg")) for number, path in enumerate(found)]
    with tarfile.open(source) as archive:
        archive.extractall(work / "files", filter="data")
    return sorted(path for path in (work / "files").rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))


def _write_tars(files: list[Path], work: Path) -> None:
    import io

    for part in range(os.cpu_count() or 1):
        with tarfile.open(work / f"images-{part}.tar", "w", dereference=True) as archive:
            for path in files[part :: os.cpu_count() or 1]:
                archive.add(path, f"{path.stem}.jpg")
                label = tarfile.TarInfo(f"{path.stem}.cls")
                content = path.parent.name.removeprefix("class").encode()
                label.size = len(content)
                archive.addfile(label, io.BytesIO(content))


def _write_ffcv(tree: Path, out: Path, jpeg_share: float) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    from paceline.system.torchvision_compat import allow_torchvision

    allow_torchvision()
    from torchvision.datasets import ImageFolder

    image = RGBImageField("proportion", max_resolution=500, jpeg_quality=90, compress_probability=jpeg_share)
    writer = DatasetWriter(str(out), {"image": image, "label": IntField()})
    writer.from_indexed_dataset(ImageFolder(str(tree)))


def _write_raw(files: list[Path], work: Path) -> None:
    import numpy as np
    from PIL import Image

    rows, offset = [], 0
    with (work / "raw.bin").open("wb") as out:
        for path in files:
            image = Image.open(path).convert("RGB")
            image.thumbnail((400, 400))
            rows.append((offset, image.width, image.height))
            offset += out.write(image.tobytes())
    np.save(work / "raw.npy", np.array(rows, np.int64))


# ---- measuring ----


def processor_seconds() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, kinds))


def measure(name: str, work: Path, size: int, cores: int, seconds: float) -> dict[str, float]:
    """Return images per second of wall time and of CPU time; called in a separate process."""
    available = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, available)
    batches = contestants()[name][1](work, size, cores)
    _draw(batches, seconds / 2)  # warm-up: start, compilation, page cache, buffers
    begin, used = time.perf_counter(), processor_seconds()
    images = _draw(batches, seconds)
    wall, processor = time.perf_counter() - begin, processor_seconds() - used
    return {"wall": images / wall, "processor": images / processor}


def _draw(batches: Iterator[Any], seconds: float) -> int:
    """Take batches for that many seconds. Returns the number of images."""
    begin, images = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        next(batches)
        images += BATCH
    return images


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder or tar of JPEG images")
    parser.add_argument("--out", type=Path, default=Path("loader-benchmark"), help="where data and results go")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 128])
    parser.add_argument("--only", nargs="+", default=[], help="only loaders whose names contain one of these words")
    parser.add_argument("--measure", nargs=3, metavar=("NAME", "SIZE", "CORES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = options.out / "data"
    if options.measure:
        name, size, cores = options.measure
        print(json.dumps(measure(name, work, int(size), int(cores), options.seconds)))
        os._exit(0)  # ends the workers of other loaders
    if not options.images:
        parser.error("--images DIR_OR_TAR is required")
    work.mkdir(parents=True, exist_ok=True)
    chosen: list[str] = []
    missing: list[str] = []
    for name, (module, _) in contestants().items():
        if options.only and name != BASELINE and not any(word in name for word in options.only):
            continue
        (chosen if _installed(module) else missing).append(name)
    for name in missing:
        print(f"skipped, not installed: {name}")
    print(f"{prepare(options.images, work, set(chosen))} images, {COPIES} copies of each file")
    results = _rounds(options, chosen)
    _report(results, options.out)


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _rounds(options: argparse.Namespace, chosen: list[str]) -> dict[str, dict[str, list[dict[str, float]]]]:
    everything = len(os.sched_getaffinity(0))
    settings = [(size, cores) for size in options.sizes for cores in sorted({1, everything})]
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    for number in range(options.rounds):
        for size, cores in settings:
            for name in chosen:
                words = [sys.executable, __file__, "--out", str(options.out), "--seconds", str(options.seconds)]
                words += ["--measure", name, str(size), str(cores)]
                answer = subprocess.run(words, capture_output=True, text=True, check=False)
                if answer.returncode:
                    print(f"{name} failed: {answer.stderr.strip().splitlines()[-1]}")
                    continue
                key = f"{size} px, {cores} core{'s' if cores > 1 else ''}"
                results.setdefault(key, {}).setdefault(name, []).append(json.loads(answer.stdout.splitlines()[-1]))
        print(f"round {number + 1} of {options.rounds}", flush=True)
    return results


def _report(results: dict[str, dict[str, list[dict[str, float]]]], out: Path) -> None:
    table: dict[str, dict[str, dict[str, float]]] = {}
    for key, rows in results.items():
        kind = "processor" if key.endswith("1 core") else "wall"
        print(f"\n{key}: images per {'CPU second' if kind == 'processor' else 'second'}, ratio to {BASELINE}")
        for name, rounds in rows.items():
            base = rows.get(BASELINE, rounds)
            ratios = [own[kind] / other[kind] for own, other in zip(rounds, base, strict=False)]
            figures = {
                "images_per_second": statistics.median(r[kind] for r in rounds),
                "ratio": statistics.median(ratios),
            }
            table.setdefault(key, {})[name] = figures
            print(f"  {name:36}{figures['images_per_second']:10,.0f}{figures['ratio']:9.2f}x")
    (out / "results.json").write_text(json.dumps({"table": table, "rounds": results}, indent=1) + "\n")
    print(f"\n{out / 'results.json'}, {_chart(table, out)}")


def _chart(table: dict[str, dict[str, dict[str, float]]], out: Path) -> str:
    """Write a bar chart with Pillow, which saves a dependency on a plotting library. Returns its path."""
    from PIL import Image, ImageDraw

    rows = [(key, name, row["ratio"]) for key, names in table.items() for name, row in names.items()]
    longest = max(ratio for _, _, ratio in rows)
    image = Image.new("RGB", (1000, 24 * (len(rows) + len(table)) + 20), "white")
    draw = ImageDraw.Draw(image)
    y, last = 10, ""
    for key, name, ratio in rows:
        if key != last:
            draw.text((10, y + 4), f"{key}: times {BASELINE}", fill="black")
            y, last = y + 24, key
        color = "#1f5fa8" if name.startswith("paceline") else "#9a9a9a"
        draw.rectangle((260, y + 3, 260 + int(660 * ratio / longest), y + 19), fill=color)
        draw.text((20, y + 4), name, fill="black")
        draw.text((268 + int(660 * ratio / longest), y + 4), f"{ratio:.1f}", fill="black")
        y += 24
    image.save(out / "results.png")
    return str(out / "results.png")


if __name__ == "__main__":
    main()
