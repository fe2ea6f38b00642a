"""The data that loader.py compares loaders on, in the format of each."""

import io
import os
import shutil
import tarfile
from pathlib import Path

from loader_contestants import FFCV_JPEG_SHARES

COPIES = 8  # per image, so that an epoch has several batches


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
    from paceline.data.splits import Division

    variants = [Variant(), Variant(max_side=500), Variant(max_side=400)]
    pack.prepare(
        sources.tree(tree, "benchmark", Division(val_fraction=0.01)),
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
