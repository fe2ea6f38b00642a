"""Image folders and lists: their files by split, with labels."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.assign import LabeledRow, assign, empty_split, in_order
from paceline.data.classes import class_names
from paceline.data.lists import read_list
from paceline.data.splits import (
    ALL,
    AS_GIVEN,
    SPLITS,
    TRAIN,
    VAL,
    Division,
    LabeledFile,
    default_split,
    named_splits,
    split_named,
)
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.wording import counted

_ENDINGS = "jpg jpeg jpe jfif png bmp gif webp avif tif tiff ppm pgm"
EXTENSIONS = frozenset(f".{ending}" for ending in _ENDINGS.split())


@dataclass(frozen=True)
class Listing:
    """The files of an image folder by split, with their labels."""

    ids: list[str]
    splits: dict[str, list[LabeledFile]]
    """Train and val; test, if there is one."""


def list_one_split(root: Path, split: str = "") -> Listing:
    """Return images for evaluation only: those of a split, by default val, else test, else train, else all images.

    All other splits are empty. Images of a folder or list without splits are the split `all`.
    """
    if root.is_file():
        rows = read_list(root)
        present = {row[0] for row in rows} & {*SPLITS}
        wanted = split or default_split(present)
        rows = [row for row in rows if row[0] == ("" if wanted == ALL else wanted)]
        names = class_names(sorted({label for _, label, _ in rows}), root)
        ids = in_order(names.values())
    else:
        folders = split_folders(root)
        present = {*folders}
        wanted = split or default_split(present)
        folder = root if wanted == ALL else folders.get(wanted)
        names = class_names(_class_names(folder), root) if folder else {}
        ids = list(names.values())
        rows = _files(folder, "", names) if folder else []
    if wanted not in {*present, ALL}:
        known = [name for name in SPLITS if name in present]
        fix = f"Choose {' or '.join(known)}" if known else "Leave --split out to evaluate all of its images"
        raise UserError("unknown-split", f"{root} has no {split} split. {fix}.", path=root, split=split)
    if not rows:
        raise empty_split(root, "evaluation" if wanted == ALL else wanted)
    numbers = {label: ids.index(name) for label, name in names.items()}
    return Listing(ids, {TRAIN: [], VAL: []} | {wanted: [(numbers[label], file) for _, label, file in rows]})


def list_images(root: Path, division: Division = AS_GIVEN, limit_per_class: int = 0) -> Listing:
    """Return the files of DIR/SPLIT/CLASS, or of a list; those without a split are divided."""
    ids, rows = list_rows(root)
    return Listing(*assign(rows, root, lambda path: relative_name(path, root), division, limit_per_class, ids))


def list_rows(root: Path) -> tuple[list[str], list[LabeledRow[Path]]]:
    """Return the classes of an image folder in order (empty for a list), and its files with split and label."""
    if root.is_file():
        return [], read_list(root)
    if not root.is_dir():
        raise UserError("source-not-found", f"{root} does not exist on this machine. Check the path.", path=root)
    folders = split_folders(root)
    if TRAIN not in folders and not _only_splits(root, folders):
        folders = {"": root}
    elif others := sorted(set(_class_names(root)) - {folder.name for folder in folders.values()}):
        log.warning("%s: these folders are not splits and are ignored: %s", root, ", ".join(others[:10]))
    ids = sorted({name for folder in folders.values() for name in _class_names(folder)})
    if len(ids) < 2:
        place = next(iter(folders.values()))
        message = (
            f"{place} contains {counted(len(ids), 'class folder')}. It must contain one folder per class, at least two."
        )
        raise UserError("too-few-classes", message, path=place)
    return ids, [row for split, folder in folders.items() for row in _files(folder, split, _class_names(folder))]


def split_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split that has one."""
    names = _class_names(root)
    if not all(map(split_named, names)):  # a class may be called train
        names = [name for name in names if _class_names(root / name)]
    found = named_splits(names, root)
    return {split: root / found[split] for split in SPLITS if split in found}


def _only_splits(root: Path, folders: dict[str, Path]) -> bool:
    """Whether a folder contains nothing but splits with class folders."""
    names = {folder.name for folder in folders.values() if _class_names(folder)}
    return bool(names) and names == set(_class_names(root))


def _class_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _files(root: Path, split: str, ids: Iterable[str]) -> list[LabeledRow[Path]]:
    rows, others, unusable = list[LabeledRow[Path]](), list[str](), list[str]()
    for id_ in ids:
        for path in sorted(files_below(root / id_)):
            is_image = path.suffix.lower() in EXTENSIONS
            if is_image and path.is_file():
                rows.append((split, id_, path))
            elif not path.name.startswith("."):
                (unusable if is_image else others).append(relative_name(path, root))
    warn_of_others(root, others)
    warn_of_others(root, unusable, "(broken links, or not regular files)")
    return rows


def warn_of_others(place: object, names: list[str], which: str = "without an image extension (.jpg, .png ...)") -> None:
    """Warn about files that are ignored."""
    if names:
        log.warning("%s: ignored %s %s, e.g. %s", place, counted(len(names), "file"), which, names[0])


def files_below(folder: Path) -> Iterator[Path]:
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
