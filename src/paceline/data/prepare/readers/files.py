"""Image folders, on this machine or in an object store, and lists of images."""

from functools import partial
from pathlib import Path

from paceline.data.assign import LabeledRow
from paceline.data.listing import list_rows, relative_name
from paceline.data.lists import read_list
from paceline.data.prepare.raw import RawImage, SourceImages
from paceline.data.prepare.readers.trees import sort_tree
from paceline.errors import UserError
from paceline.system import remote


def folder(source: str) -> SourceImages:
    """Return the images of DIR/CLASS or DIR/SPLIT/CLASS, also below an s3:// prefix, or of a list."""
    if remote.is_remote(source):
        return _prefix(source)
    classes, rows = list_rows(Path(source))
    return SourceImages(_entries(rows, Path(source)), classes)


def listed(source: str, image_column: str = "", label_column: str = "") -> SourceImages:
    """Return the images of a CSV, TSV, JSONL or Parquet list."""
    path = Path(source)
    if not path.is_file():
        raise UserError("source-not-found", f"{path} does not exist on this machine. Check the path.", path=path)
    return SourceImages(_entries(read_list(path, image_column, label_column), path))


def _entries(rows: list[LabeledRow[Path]], root: Path) -> list[RawImage]:
    return [
        RawImage(relative_name(path, root), label, path.read_bytes, split, path.stat().st_size)
        for split, label, path in rows
    ]


def _prefix(place: str) -> SourceImages:
    if not place.startswith("s3://"):
        message = f"{place} cannot be listed. Give a tar (https://.../IMAGES.tar) or an s3:// prefix."
        raise UserError("unknown-source-kind", message, url=place)
    remote.refuse_password("source", place)
    try:
        store = remote.ObjectStore(place)
        sizes = store.files()
    except UserError:
        raise
    except Exception as error:  # obstore's exceptions have no other common base
        reason = " ".join(str(error).split())[:200]
        message = f"{place} cannot be listed ({reason}). Check the URL and the AWS_* variables."
        raise UserError("url-unreadable", message, url=place, reason=reason) from None
    found = sort_tree(sorted(sizes), place)
    if not found:
        message = f"{place} contains no images in class folders. Check the prefix."
        raise UserError("source-not-found", message, url=place)
    return SourceImages(
        [RawImage(name, label, partial(_fetched, store, name), split, sizes[name]) for name, split, label in found],
        sorted({label for _, _, label in found}),
    )


def _fetched(store: remote.ObjectStore, name: str) -> bytes:
    with store.opened(name) as stream:
        return stream.read()
