"""Sources of images to prepare: image folders, lists and archives, as one stream of samples per split."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from paceline.data.classes import Class
from paceline.data.listing import list_images, listing_fingerprint, relative_name
from paceline.data.splits import AS_GIVEN, Division, LabeledFile
from paceline.errors import UserError
from paceline.system import remote


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


def tree(
    root: Path,
    name: str,
    division: Division = AS_GIVEN,
    limit_per_class: int = 0,
    readable: dict[str, str] | None = None,
) -> RawDataset:
    """Return a source that reads an image folder or a list. `readable`: names of classes by id."""
    files = list_images(root, division, limit_per_class)
    return RawDataset(
        name=name,
        classes=[Class(id_, (readable or {}).get(id_, id_)) for id_ in files.ids],
        splits={split: _reader(entries, root) for split, entries in files.splits.items()},
        sizes={split: len(entries) for split, entries in files.splits.items()},
        bytes={split: sum(path.stat().st_size for _, path in entries) for split, entries in files.splits.items()},
        identity={
            "folder": str(root.resolve()),
            "files": {split: len(entries) for split, entries in files.splits.items()},
            "names_and_sizes": listing_fingerprint(files, root),
            **vars(division),
            "limit_per_class": limit_per_class,
        },
    )


def _reader(files: list[LabeledFile], root: Path) -> Callable[[], Iterator[Sample]]:
    def samples() -> Iterator[Sample]:
        for label, path in files:
            yield Sample(label, relative_name(path, root), path.stat().st_size, path.read_bytes)

    return samples


# ---- archives ----


@contextlib.contextmanager
def opened(place: str) -> Iterator[IO[bytes]]:
    """Open a local file, or an https:// or s3:// URL, as a stream of bytes."""
    if remote.is_remote(place):
        with remote.opened(place) as stream:
            yield stream
        return
    size_of(place)
    with Path(place).open("rb") as file:
        yield file


def size_of(place: str) -> int:
    """Return the size of a file or URL in bytes. Raises if it does not exist."""
    if remote.is_remote(place):
        return remote.size(place)
    path = Path(place)
    if not path.is_file():
        raise UserError("source-not-found", f"{place} does not exist.", path=place)
    return path.stat().st_size
