"""The readers of `paceline prepare`: each one lists the images of a kind of source.

A reader is a function `(source, **options)` that returns `SourceImages`; a registered one may return any iterable of
`RawImage`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from paceline import extensions
from paceline.data.lists import SUFFIXES
from paceline.data.prepare.raw import RawImage, SourceImages
from paceline.data.prepare.readers.files import folder, listed
from paceline.data.prepare.readers.hugging_face import hugging_face, is_saved_dataset
from paceline.data.prepare.readers.tar import TARS, tar
from paceline.data.prepare.readers.webdataset import shard_folder, webdataset
from paceline.data.splits import SPLITS
from paceline.errors import USER_CODE_ERRORS, UserError, raised
from paceline.extensions import Extension
from paceline.system.remote import is_remote, redacted

READERS: dict[str, Callable[..., SourceImages]] = {
    "folder": folder,
    "list": listed,
    "tar": tar,
    "webdataset": webdataset,
    "hf": hugging_face,
}
_PATTERN = re.compile(r"[*?\[{]")


def detect(source: str) -> str:
    """Return the name of the reader for a source."""
    path, name = Path(source), redacted(source).lower()  # without the query string of a URL
    if source.startswith("hf:") or is_saved_dataset(path):
        return "hf"
    if not path.exists() and _PATTERN.search(name):
        return "webdataset"
    if name.endswith(TARS):
        return "tar"
    if name.endswith(SUFFIXES) and not is_remote(source):
        return "list"
    if source.startswith("s3://") or path.is_dir():
        return "webdataset" if path.is_dir() and shard_folder(path) else "folder"
    known = "hf:NAME, s3://BUCKET/PREFIX, cifar10, cifar100 or imagenet"
    if path.is_file() or is_remote(source):
        forms = f"a list ({', '.join(SUFFIXES)}) nor a tar ({', '.join(TARS)})"
        message = f"{source} is neither {forms}. Give one of them, a folder, {known}; or name a reader before it."
        raise UserError("unknown-source-kind", message, path=source)
    close = get_close_matches(source, [*extensions.BUILT_IN["reader"], *extensions.names("reader")], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    message = f"{source} does not exist on this machine.{hint} Give a folder, a list, a tar, {known}."
    raise UserError("source-not-found", message, path=source)


def read(reader: str, source: str, options: Mapping[str, Any]) -> SourceImages:
    """Return the images of a source."""
    if extension := extensions.find("reader", reader):
        return _registered(extension, source, options)
    if reader not in READERS:
        raise extensions.unknown("reader", "reader", reader, READERS)
    if unknown := sorted(options.keys() - inspect.signature(READERS[reader]).parameters.keys()):
        option = f"--{unknown[0].replace('_', '-')}"
        message = f"{option} does not apply to the reader {reader}, which reads {source}. Omit it."
        raise UserError("option-not-applicable", message, option=option)
    return READERS[reader](source, **options)


def with_split(images: SourceImages, split: str) -> SourceImages:
    """Return images that all belong to one split."""
    return replace(images, entries=[replace(entry, split=split) for entry in images.entries])


def _registered(extension: Extension, source: str, options: Mapping[str, Any]) -> SourceImages:
    found = extension(source, **options)
    if not isinstance(found, Iterable):
        raise extension.error(f"returns {type(found).__name__}, not images")
    try:
        entries = list(found)
    except UserError:
        raise
    except USER_CODE_ERRORS as error:
        raise extension.error(raised(error)) from error
    for number, entry in enumerate(entries):
        if not isinstance(entry, RawImage) or not all(isinstance(text, str) for text in (entry.name, entry.label)):
            raise extension.error(f"has {entry!r:.80} at index {number}, not a RawImage with a name and a label")
        if not entry.label or entry.split not in ("", *SPLITS):
            problem = f"the split {entry.split!r}" if entry.label else "an empty label"
            raise extension.error(f"has {problem} at index {number} ({entry.name})")
    classes = tuple(map(str, getattr(found, "classes", ())))
    if unknown := {entry.label for entry in entries} - set(classes) if classes else None:
        raise extension.error(f"has the label {min(unknown)!r}, which is not in its classes")
    return SourceImages([replace(entry, read=partial(_content, extension, entry)) for entry in entries], classes)


def _content(extension: Extension, entry: RawImage) -> bytes:
    try:
        content = entry.read()
    except (OSError, UserError):
        raise
    except USER_CODE_ERRORS as error:
        raise extension.error(f"{raised(error)} at {entry.name}") from error
    if not isinstance(content, bytes):
        raise extension.error(f"has {type(content).__name__} as the content of {entry.name}, not bytes")
    return content
