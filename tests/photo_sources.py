"""A small folder of photos, and helpers to read it and what is made of it through the readers of `prepare`."""

import io
import tarfile
from pathlib import Path

from sample_images import jpeg, sample_image

from paceline.data.prepare.sources import open_source
from paceline.data.splits import AS_GIVEN, Division

CLASSES = ("cat", "dog")
Found = dict[str, list[tuple[str, bytes]]]


def make_photos(root: Path) -> Path:
    """Two classes with eight and four images for training, and two and one for validation."""
    for split, number in (("train", 8), ("val", 2)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for image in range(number // (label + 1)):
                content = jpeg(sample_image(24, 20, 10 * label + image + number))
                (root / split / name / f"{image}.jpg").write_bytes(content)
    return root


def files_of(root: Path) -> Found:
    return {
        split: sorted((path.parent.name, path.read_bytes()) for path in (root / split).rglob("*.jpg"))
        for split in ("train", "val")
    }


def read_all(source: str | dict[str, str], reader: str = "", division: Division = AS_GIVEN, **options: str) -> Found:
    found = open_source(source, reader, options, division)
    names = [entry.name for entry in found.classes]
    return {
        split: sorted((names[sample.label], sample.read()) for sample in samples())
        for split, samples in found.splits.items()
    }


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
