"""Opens a source for `paceline prepare`: one for all splits, or one for each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.data.assign import in_order
from paceline.data.prepare.raw import RawDataset, SourceImages, raw_dataset
from paceline.data.prepare.readers import detect, read, with_split
from paceline.data.prepare.readers.files import folder
from paceline.data.splits import AS_GIVEN, SPLITS, Division
from paceline.errors import UserError
from paceline.system.remote import redacted
from paceline.system.wording import counted

_MAX_DIGITS = 9  # of a label that is the number of a line


def open_source(
    source: str | Mapping[str, str],
    reader: str,
    options: Mapping[str, Any],
    division: Division,
    limit_per_class: int = 0,
    class_names: Path | None = None,
) -> RawDataset:
    """Return the dataset of a source, or of one source per split. `reader`: empty to detect it."""
    division.check()
    places = {"": source} if isinstance(source, str) else {split: source[split] for split in SPLITS if split in source}
    readers = {split: reader or detect(place) for split, place in places.items()}
    parts = [_of_split(read(readers[split], place, options), split) for split, place in places.items()]
    images = parts[0] if len(parts) == 1 else _combined(parts)
    place = " and ".join(redacted(place) for place in places.values())
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", next(iter(readers.values()))).strip("_.-") or "images"
    found = raw_dataset(images, place, name, division, limit_per_class, _readable(class_names, images))
    found.identity.update(
        source={split: _resolved(place) for split, place in places.items()}, readers=readers, options=dict(options)
    )
    return found


def tree(
    root: Path,
    name: str,
    division: Division = AS_GIVEN,
    limit_per_class: int = 0,
    readable: Mapping[str, str] | None = None,
) -> RawDataset:
    """Return the dataset of an image folder or a list. `readable`: names of classes by ID."""
    found = raw_dataset(folder(str(root)), str(root), name, division, limit_per_class, readable)
    found.identity.update(source=_resolved(str(root)))
    return found


def _of_split(images: SourceImages, split: str) -> SourceImages:
    return with_split(images, split) if split else images


def _combined(parts: Sequence[SourceImages]) -> SourceImages:
    """Return the images of several sources as one; names are prefixed by their splits."""
    entries = [replace(entry, name=f"{entry.split}/{entry.name}") for part in parts for entry in part.entries]
    known = (part.classes or in_order({entry.label for entry in part.entries}) for part in parts)
    classes = dict.fromkeys(name for names in known for name in names)  # train comes first, and has all of them
    if not any(part.stream for part in parts):
        return SourceImages(entries, list(classes))

    def stream(wanted: Sequence[int]) -> Iterator[Any]:
        begin = 0
        for part in parts:
            chosen = [number - begin for number in wanted if begin <= number < begin + len(part.entries)]
            if chosen:
                yield from part.stream(chosen) if part.stream else (part.entries[number].read for number in chosen)
            begin += len(part.entries)

    return SourceImages(entries, list(classes), stream)


def _resolved(place: str) -> str:
    return str(Path(place).resolve()) if Path(place).exists() else redacted(place)


def _readable(path: Path | None, images: SourceImages) -> dict[str, str]:
    """Return the names of numbered classes from a file with one name per line; line 1 names class 0."""
    if path is None:
        return {}
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        message = f"--class-names {path} is not readable ({error}). Give a text file with one name per line."
        raise UserError("class-names-unreadable", message, path=path) from None
    labels = {entry.label for entry in images.entries}
    unnamed = sorted(label for label in labels if not _name_of(label, names))
    if unnamed:
        message = (
            f"--class-names {path} has {counted(len(names), 'name')}, but no name of class {unnamed[0]!r:.40}. Labels "
            "must be numbers that count the lines of the file from 0."
        )
        raise UserError("class-names-mismatch", message, path=path, classes=unnamed[:10])
    return {label: names[int(label)] for label in labels}


def _name_of(label: str, names: Sequence[str]) -> str:
    is_number = label.isdecimal() and len(label) <= _MAX_DIGITS
    return names[int(label)] if is_number and int(label) < len(names) else ""
