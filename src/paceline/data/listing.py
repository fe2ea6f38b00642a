"""Image folders and lists: their files by split, with labels."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.lists import read_list
from paceline.errors import UserError
from paceline.system.logs import log

_ENDINGS = "jpg jpeg jpe jfif png bmp gif webp avif tif tiff ppm pgm"
EXTENSIONS = frozenset(f".{ending}" for ending in _ENDINGS.split())

LabeledFile = tuple[int, Path]


@dataclass(frozen=True)
class Listing:
    """The files of an image folder by split, with their labels."""

    ids: list[str]
    train: list[LabeledFile]
    val: list[LabeledFile]

    @property
    def splits(self) -> dict[str, list[LabeledFile]]:
        return {"train": self.train, "val": self.val}


def list_validation_images(root: Path) -> Listing:
    """Return images for evaluation only: the validation split if there is one, else all images."""
    if root.is_file():
        rows = [row for row in read_list(root) if row[0] != "train"] or read_list(root)
        ids = sorted({label for _, label, _ in rows})
        return Listing(ids, [], [(ids.index(label), file) for _, label, file in rows])
    parts = (root / name for name in ("val", "validation", "test", "train"))
    folder = next((path for path in parts if path.is_dir()), root)
    ids = _class_names(folder)
    if not (files := _files(folder, ids, 0)):
        raise UserError("no-images", f"{folder} contains no images. It must contain one folder per class.", path=folder)
    return Listing(ids, [], files)


def list_images(root: Path, val_fraction: float = 0.0, limit_per_class: int = 0) -> Listing:
    """Return the files of DIR/train/CLASS and DIR/val/CLASS, of DIR/CLASS split by `val_fraction`, or of a list."""
    if root.is_file():
        return _listed(root, val_fraction, limit_per_class)
    if not root.is_dir():
        raise UserError("source-not-found", f"{root} does not exist on this machine.", path=root)
    has_splits = (root / "train").is_dir()
    train_root = root / "train" if has_splits else root
    candidates = (root / part for part in ("val", "validation", "test"))
    val_root = next((path for path in candidates if has_splits and path.is_dir()), None)
    ids = _class_names(train_root)
    if len(ids) < 2:
        message = f"{train_root} contains {len(ids)} class folders. It must contain one folder per class, at least two."
        raise UserError("too-few-classes", message, path=train_root)
    train = _files(train_root, ids, limit_per_class)
    if empty := [id_ for label, id_ in enumerate(ids) if label not in {label for label, _ in train}]:
        endings = ", ".join(sorted(EXTENSIONS))
        raise UserError(
            "empty-classes",
            f"{train_root}: {len(empty)} class folders contain no images ({', '.join(empty[:5])}). Remove them. "
            f"Images are files that end in {endings}.",
            path=train_root,
            classes=empty,
        )
    if val_root:
        if val_fraction:
            raise _has_validation(root)
        if unknown := sorted(set(_class_names(val_root)) - set(ids)):
            names = ", ".join(unknown[:5])
            message = f"{val_root} has classes that {train_root} does not have: {names}. Remove or rename them."
            raise UserError("unknown-classes", message, path=val_root, classes=unknown)
        if missing := sorted(set(ids) - set(_class_names(val_root))):
            log.warning("%s has no folder for %s: these classes are not validated", val_root, ", ".join(missing[:5]))
        val = _files(val_root, [id_ for id_ in ids if id_ not in missing], limit_per_class)
        val = [(ids.index(path.relative_to(val_root).parts[0]), path) for _, path in val]
    else:
        train, val = _divided(train, val_fraction, root)
    for split, files in (("train", train), ("val", val)):
        if not files:
            fix = (
                "Use another --val-fraction, or more images."
                if val_fraction
                else f"Add images to one folder per class in {val_root}."
            )
            raise UserError("empty-split", f"{root} has no images for {split}. {fix}", path=root, split=split)
    return Listing(ids, train, val)


def _listed(path: Path, val_fraction: float, limit_per_class: int) -> Listing:
    rows = read_list(path)
    ids = sorted({label for _, label, _ in rows})
    if len(ids) < 2:
        message = f"{path} has {len(ids)} class{'es' * (len(ids) != 1)}. A classifier needs at least two."
        raise UserError("too-few-classes", message, path=path)
    numbers = {id_: number for number, id_ in enumerate(ids)}
    splits: dict[str, list[LabeledFile]] = {"": [], "train": [], "val": []}
    seen: Counter[tuple[str, str]] = Counter()
    for split, label, file in rows:
        seen[split, label] += 1
        if not limit_per_class or seen[split, label] <= limit_per_class:
            splits[split].append((numbers[label], file))
    train, val = splits["train"], splits["val"]
    if splits[""]:
        train, val = _divided(sorted(splits[""]), val_fraction, path)
    elif val_fraction:
        raise _has_validation(path)
    if empty := [id_ for number, id_ in enumerate(ids) if number not in {number for number, _ in train}]:
        names = ", ".join(empty[:5])
        message = f"{path} has no training images of {names}. Add some, or remove these classes."
        raise UserError("empty-classes", message, path=path, classes=empty)
    if not val:
        message = f"{path} has no images for val. Set some rows of the split column to val."
        raise UserError("empty-split", message, path=path, split="val")
    return Listing(ids, train, val)


def _has_validation(place: Path) -> UserError:
    message = f"--val-fraction does not apply: {place} already has a validation split. Omit the option."
    return UserError("val-split-exists", message, path=place)


def _class_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(root: Path, ids: list[str], limit: int) -> list[LabeledFile]:
    files = []
    for label, id_ in enumerate(ids):
        found = sorted(path for path in _below(root / id_) if path.suffix.lower() in EXTENSIONS and path.is_file())
        files += [(label, path) for path in found[: limit or None]]
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder. Raises if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        message = f"{error.filename} is not readable ({error.strerror}). Change its permissions, or remove it."
        raise UserError("folder-unreadable", message, path=error.filename)

    seen = set()
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        if (real := os.path.realpath(place)) in seen:  # links may form a cycle
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(place) / name for name in names)


def listing_fingerprint(files: Listing, root: Path) -> str:
    """Return a digest of classes, file names and sizes. Reading all files would take longer than an epoch."""
    digest = hashlib.sha256(json.dumps(files.ids).encode())
    for split, entries in files.splits.items():
        for label, path in entries:
            line = f"{split} {label} {relative_name(path, root)} {path.stat().st_size}\n"
            digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def relative_name(path: Path, root: Path) -> str:
    """Return the path of a file relative to its folder or list."""
    return os.path.relpath(path, root if root.is_dir() else root.parent)


def _divided(files: list[LabeledFile], fraction: float, place: Path) -> tuple[list[LabeledFile], list[LabeledFile]]:
    """Return (train, val), with the same fraction of every class in val, spread evenly over its files."""
    if not fraction:
        raise UserError(
            "no-val-split",
            f"{place} has no validation split. Use a fraction of the images: run "
            f'"paceline prepare folder {place} --val-fraction 0.1 --out DIR".',
            path=place,
        )
    if not 0 < fraction < 1:
        raise UserError("invalid-val-fraction", f"--val-fraction {fraction:g} is not between 0 and 1. Use e.g. 0.1.")
    train: list[LabeledFile] = []
    val: list[LabeledFile] = []
    seen: dict[int, int] = {}
    for label, path in files:
        number = seen[label] = seen.get(label, -1) + 1
        chosen = int((number + 1) * fraction + 1e-9) > int(number * fraction + 1e-9)
        (val if chosen else train).append((label, path))
    return train, val
