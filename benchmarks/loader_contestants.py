"""The loaders that loader.py compares: each yields batches forever."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

BATCH = 256
BASELINE = "torchvision, float"
FFCV_JPEG_SHARES = {"all JPEG": 1.0, "half raw": 0.5}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
    steps += [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)] if as_float else [transforms.PILToTensor()]
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
    steps += [transforms.ToTensor(), transforms.Normalize(_MEAN, _STD)]
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
