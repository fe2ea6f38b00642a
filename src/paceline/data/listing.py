"""Image folders and lists: their files by split, with labels."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.data.lists import read_list
from paceline.data.splits import AS_GIVEN, SPLITS, TEST, TRAIN, VAL, Division, LabeledFile, divide
from paceline.errors import UserError
from paceline.system.logs import log

_ENDINGS = "jpg jpeg jpe jfif png bmp gif webp avif tif tiff ppm pgm"
EXTENSIONS = frozenset(f".{ending}" for ending in _ENDINGS.split())

_FOLDERS = {TRAIN: ("train",), VAL: ("val", "validation"), TEST: ("test",)}


@dataclass(frozen=True)
class Listing:
    """The files of an image folder by split, with their labels."""

    ids: list[str]
    splits: dict[str, list[LabeledFile]]
    """Train and val; test, if there is one."""


def list_one_split(root: Path, split: str = "") -> Listing:
    """Return images for evaluation only: those of a split, by default val, else test, else train, else all images."""
    if root.is_file():
        rows = read_list(root)
        present = [name for name in (VAL, TEST, TRAIN) if any(row[0] == name for row in rows)]
        wanted = split or (present[0] if present else "")
        rows = [row for row in rows if row[0] == wanted]
        ids = sorted({label for _, label, _ in rows})
        files = [(ids.index(label), file) for _, label, file in rows]
    else:
        folders = _split_folders(root)
        first = next((folders[name] for name in (VAL, TEST, TRAIN) if name in folders), root)
        folder = folders.get(split) if split else first
        ids = _class_names(folder) if folder else []
        files = _files(folder, ids, 0) if folder else []
    if not files:
        raise _empty(root, split or VAL)
    return Listing(ids, {TRAIN: [], VAL: []} | {split or VAL: files})


def list_images(root: Path, division: Division = AS_GIVEN, limit_per_class: int = 0) -> Listing:
    """Return the files of DIR/SPLIT/CLASS, or of a list; those without a split are divided."""
    division.check()
    if root.is_file():
        ids, given, rest = _listed(root, limit_per_class)
    elif root.is_dir():
        ids, given, rest = _in_folders(root, limit_per_class)
    else:
        raise UserError("source-not-found", f"{root} does not exist on this machine.", path=root)
    splits = _completed(given, rest, division, root)
    _check_classes(ids, splits, root)
    return Listing(ids, {split: splits[split] for split in SPLITS if splits[split] or split != TEST})


def _in_folders(root: Path, limit: int) -> tuple[list[str], dict[str, list[LabeledFile]], list[LabeledFile]]:
    """Return classes, the files of each split that has a folder, and all files if there are no splits."""
    folders = _split_folders(root) if (root / TRAIN).is_dir() else {}
    train_root = folders.get(TRAIN, root)
    ids = _class_names(train_root)
    if len(ids) < 2:
        message = f"{train_root} contains {len(ids)} class folders. It must contain one folder per class, at least two."
        raise UserError("too-few-classes", message, path=train_root)
    if not folders:
        return ids, {}, _files(root, ids, limit)
    splits = {}
    for split, folder in folders.items():
        names = _class_names(folder)
        if unknown := sorted(set(names) - set(ids)):
            shown = ", ".join(unknown[:5])
            message = f"{folder} has classes that {train_root} does not have: {shown}. Remove or rename them."
            raise UserError("unknown-classes", message, path=folder, classes=unknown)
        numbers = [ids.index(name) for name in names]
        splits[split] = [(numbers[number], path) for number, path in _files(folder, names, limit)]
    return ids, splits, []


def _listed(path: Path, limit: int) -> tuple[list[str], dict[str, list[LabeledFile]], list[LabeledFile]]:
    rows = read_list(path)
    ids = sorted({label for _, label, _ in rows})
    if len(ids) < 2:
        message = f"{path} has {len(ids)} class{'es' * (len(ids) != 1)}. A classifier needs at least two."
        raise UserError("too-few-classes", message, path=path)
    numbers = {id_: number for number, id_ in enumerate(ids)}
    splits: dict[str, list[LabeledFile]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for split, label, file in rows:
        seen[split, label] += 1
        if not limit or seen[split, label] <= limit:
            splits.setdefault(split, []).append((numbers[label], file))
    return ids, splits, sorted(splits.pop("", []))


def _completed(
    given: dict[str, list[LabeledFile]], rest: list[LabeledFile], division: Division, root: Path
) -> dict[str, list[LabeledFile]]:
    """Return all splits: those that exist, and those that are divided from the rest or from the training images."""
    wanted = {VAL: division.val_fraction, TEST: division.test_fraction}
    for split, fraction in wanted.items():
        if fraction and split in given:
            message = f"--{split}-fraction does not apply: {root} already has a {split} split. Omit the option."
            raise UserError("split-exists", message, path=root, split=split)
    if VAL not in given and not division.val_fraction:
        raise UserError(
            "no-val-split",
            f"{root} has no validation split, by which the best checkpoint is chosen. Use a fraction of the images: "
            f'run "paceline prepare folder {root} --val-fraction 0.1 --out DIR".',
            path=root,
        )
    if any(wanted.values()):
        divided = divide(rest or given.get(TRAIN, []), division, lambda path: relative_name(path, root))
        given = given | {split: divided[split] for split in SPLITS if split == TRAIN or wanted[split]}
    return {split: given.get(split, []) for split in SPLITS}


def _check_classes(ids: list[str], splits: dict[str, list[LabeledFile]], root: Path) -> None:
    """Refuse empty splits and classes without training images; warn about classes that are not evaluated."""
    for split, files in splits.items():
        present = {label for label, _ in files}
        absent = [id_ for label, id_ in enumerate(ids) if label not in present]
        names = ", ".join(absent[:5]) + (", ..." if absent[5:] else "")
        if not files and split != TEST:
            raise _empty(root, split)
        if absent and split == TRAIN:
            raise UserError(
                "empty-classes",
                f"{root} has no training images of {names}. Add some, or remove these classes. "
                f"Images are files that end in {', '.join(sorted(EXTENSIONS))}.",
                path=root,
                classes=absent,
            )
        if absent and files:
            log.warning("%s: the %s split has no images of %s", root, split, names)


def _empty(root: Path, split: str) -> UserError:
    fix = "Use another fraction, add images, or fix the split column of a list."
    return UserError("empty-split", f"{root} has no images for {split}. {fix}", path=root, split=split)


def _split_folders(root: Path) -> dict[str, Path]:
    """Return the folder of each split that has one."""
    return {split: root / name for split, names in _FOLDERS.items() for name in names[::-1] if (root / name).is_dir()}


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
