"""What `paceline prepare` reads: the images of a source, which become one stream of samples per split."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.data.assign import assign
from paceline.data.classes import Class, not_text
from paceline.data.splits import AS_GIVEN, Division
from paceline.errors import UserError
from paceline.system.wording import counted

UNKNOWN_SIZE = -1


def _in_archive() -> bytes:
    raise AssertionError("images of archives are read as a stream")


@dataclass(frozen=True)
class RawImage:
    """One image of a source: its name, which is unique, its label, and a function that returns the encoded file."""

    name: str
    """Shown in messages; --group-by searches it."""
    label: str
    """The name of its class."""
    read: Callable[[], bytes] = _in_archive
    """Called once, by any thread. OSError: the image is left out and listed."""
    split: str = ""
    """train, val or test; empty: --val-fraction and --test-fraction divide these images."""
    size: int = UNKNOWN_SIZE
    """In bytes."""


@dataclass(frozen=True)
class SourceImages:
    """The images of a source, in an order that does not change."""

    entries: Sequence[RawImage]
    classes: Sequence[str] = ()
    """Their order; empty: numbers by value, others by name."""
    stream: Callable[[Sequence[int]], Iterator[Callable[[], bytes]]] | None = None
    """Archives: yields the content of the images at these ascending positions."""


@dataclass(frozen=True)
class Sample:
    """One image file. `read` is called once, and in order for archives."""

    label: int
    name: str
    size: int
    """In bytes."""
    read: Callable[[], bytes]


@dataclass(frozen=True)
class RawDataset:
    """A dataset to prepare. It can be read repeatedly, in the same order."""

    name: str
    classes: list[Class]
    splits: dict[str, Callable[[], Iterator[Sample]]]
    sizes: dict[str, int | None]
    """Number of samples per split, if known in advance."""
    bytes: dict[str, int | None]
    identity: dict[str, Any] = field(default_factory=dict)
    """Identifies the source, so that a resumed preparation does not mix two."""
    parallel: bool = True
    """Whether samples can be read in any order, by several threads."""


def raw_dataset(
    images: SourceImages,
    place: str,
    name: str,
    division: Division = AS_GIVEN,
    limit_per_class: int = 0,
    readable: Mapping[str, str] | None = None,
) -> RawDataset:
    """Return a dataset of images, divided into splits. `readable`: names of classes by label."""
    entries = images.entries
    _check_names(entries, place)
    rows = ((entry.split, entry.label, number) for number, entry in enumerate(entries))
    labels, splits = assign(
        rows,
        place,
        lambda number: entries[number].name,
        division,
        limit_per_class,
        images.classes,
        only_evaluate=True,
    )
    if images.stream:
        splits = {split: sorted(part, key=lambda pair: pair[1]) for split, part in splits.items()}
    sizes = {split: [entries[number].size for _, number in part] for split, part in splits.items()}
    return RawDataset(
        name=name,
        classes=_classes(labels, readable or {}, place),
        splits={split: _reader(images, part) for split, part in splits.items()},
        sizes={split: len(part) for split, part in splits.items()},
        bytes={split: None if UNKNOWN_SIZE in found else sum(found) for split, found in sizes.items()},
        identity={
            "source": place,
            "images": {split: len(part) for split, part in splits.items()},
            "names_and_sizes": _digest(images, labels, splits),
            **vars(division),
            "limit_per_class": limit_per_class,
        },
        parallel=images.stream is None,
    )


def _check_names(entries: Iterable[RawImage], place: str) -> None:
    times = Counter(entry.name for entry in entries)
    if twice := [name for name, count in times.items() if count > 1]:
        message = f"{place} lists {counted(len(twice), 'image')} more than once, e.g. {twice[0]}. Keep one image each."
        raise UserError("duplicate-images", message, path=place, names=twice[:10])


def _classes(labels: list[str], readable: Mapping[str, str], place: str) -> list[Class]:
    """Return the classes, with IDs that are valid as names of folders."""
    for label, name in readable.items():
        if problem := not_text(name):
            message = f"{place}: the name of class {label}, {name!r:.60}, {problem}. Rename it."
            raise UserError("class-name-invalid", message, path=place, name=name)
    ids = [re.sub(r"^\.|[/\\\x00]", "_", label)[:255] for label in labels]
    if twice := [id_ for id_, count in Counter(ids).items() if count > 1]:
        message = (
            f"{place} has classes whose names differ only in slashes, in a leading dot or after 255 characters: "
            f"{', '.join(twice[:5])}. Rename them."
        )
        raise UserError("duplicate-classes", message, path=place)
    return [Class(id_, readable.get(label, label)) for id_, label in zip(ids, labels, strict=True)]


def _digest(images: SourceImages, labels: list[str], splits: Mapping[str, list[tuple[int, int]]]) -> str:
    digest = hashlib.sha256(repr(labels).encode(errors="surrogateescape"))
    for split, part in splits.items():
        for label, number in part:
            entry = images.entries[number]
            digest.update(f"{split} {label} {entry.name} {entry.size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _reader(images: SourceImages, part: list[tuple[int, int]]) -> Callable[[], Iterator[Sample]]:
    def samples() -> Iterator[Sample]:
        entries = [images.entries[number] for _, number in part]
        reads = images.stream([number for _, number in part]) if images.stream else (entry.read for entry in entries)
        for (label, _), entry, read in zip(part, entries, reads, strict=True):
            yield Sample(label, entry.name, max(entry.size, 0), read)

    return samples
