"""The images that a model is used on: files, folders, glob patterns, lists of names, and prepared data."""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.data import arrays, cache
from paceline.data.description import DESCRIPTION
from paceline.data.images import ImageFiles, ImageSplit, UnlabeledFiles
from paceline.data.kinds import kind_of
from paceline.data.listing import EXTENSIONS, files_below
from paceline.data.sets import ImageSet, TensorSplit
from paceline.data.shards import Dataset
from paceline.data.splits import SPLITS
from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.remote import is_remote

_MAX_NAMES = 4 << 30  # bytes of a list of names


@dataclass(frozen=True)
class ImagePart:
    """Images that are read in the same way, in order."""

    images: ImageSplit | ImageSet
    """In memory: those of its `val` split."""
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)


def find_images(
    words: Sequence[str],
    listed: Sequence[str] = (),
    split: str = "",
    variant: str = "",
    default_variants: tuple[str, str] = ("", ""),
) -> list[ImagePart]:
    """Return the images of files, folders, patterns and prepared data, then the listed files, in this order.

    `split`: of prepared data, by default all of them. `variant`: of prepared data; `default_variants`: for the
    evaluation of a model and for its training, of data that has several, if none is given.
    """
    parts: list[ImagePart] = []
    files: list[str] = []
    for word in words:
        if (place := _prepared(word)) is None:
            files += image_files(word)
            continue
        if files:
            parts.append(ImagePart(UnlabeledFiles(files), files))
            files = []
        parts += _parts(*place, split, variant, default_variants)
    files += listed
    if files:
        parts.append(ImagePart(UnlabeledFiles(files), files))
    if all(isinstance(part.images, ImageFiles) for part in parts):
        for option, value in (("--split", split), ("--variant", variant)):
            if value:
                message = f"{option} {value} applies to prepared data only, and there is none. Omit it."
                raise UserError("option-not-applicable", message, option=option)
    if not sum(map(len, parts)):
        where = ", ".join(map(printable, words)) or "the list of names"
        raise UserError("no-images", f"no image is found in {where}. Give images, folders, patterns or prepared data.")
    return parts


def read_names(content: bytes) -> list[str]:
    """Return file names, one per line, or separated by null characters."""
    separator = b"\0" if b"\0" in content else b"\n"
    return [os.fsdecode(name.removesuffix(b"\r")) for name in content.split(separator) if name.strip()]


def read_list_of_names(path: Path) -> list[str]:
    """Return the names in a file."""
    try:
        with path.open("rb") as file:
            return read_names(file.read(_MAX_NAMES))
    except OSError as error:
        message = f"--files-from {path} is not readable ({error.strerror}). Give a file with one name per line."
        raise UserError("list-unreadable", message, path=path) from None


def digest(parts: Sequence[ImagePart]) -> str:
    """Return a checksum of all names, by which ranks notice that they see different files."""
    found = hashlib.sha256()
    for part in parts:
        for name in part.names:
            found.update(os.fsencode(name) + b"\0")
    return found.hexdigest()


def image_files(word: str) -> list[str]:
    """Return the file of that name, all images below that folder, or the images that match a pattern."""
    if os.path.isdir(word):
        return _checked(list(_below(word)), word)
    if os.path.exists(word):
        return [word]
    if not glob.has_magic(word):
        message = f"{word} does not exist. Give images, folders, quoted patterns, prepared data or - (standard input)."
        raise UserError("input-not-found", message, path=word)
    found: list[str] = []
    for match in sorted(glob.glob(word, recursive=True)):
        if os.path.isfile(match):
            found.append(match)
        elif "**" not in word:  # which matches what is below the folder as well
            found += _below(match)
    return _checked([name for name in found if Path(name).suffix.lower() in EXTENSIONS], word)


def _below(folder: str) -> Iterator[str]:
    yield from sorted(str(path) for path in files_below(Path(folder)) if path.suffix.lower() in EXTENSIONS)


def _checked(found: list[str], word: str) -> list[str]:
    if not found:
        endings = ", ".join(sorted(EXTENSIONS))
        message = f"{word} contains no images. Images are files that end in {endings}; name others one by one."
        raise UserError("no-images", message, path=word)
    return found


def _prepared(word: str) -> tuple[str, str, str] | None:
    """Return folder, variant and split of prepared data, the last two if the path names them; None for other paths."""
    path = Path(word)
    if is_remote(word) or (path / DESCRIPTION).is_file():
        return word, "", ""
    if (path / "index.npy").is_file() and len(path.resolve().parents) > 1:
        folder = path.resolve().parents[1]
        if (folder / DESCRIPTION).is_file():
            return str(folder), path.resolve().parent.name, path.resolve().name
    return None


def _parts(
    place: str, own_variant: str, own_split: str, split: str, variant: str, default_variants: tuple[str, str]
) -> Iterator[ImagePart]:
    wanted = own_split or split
    if kind_of(place) != "shards":
        yield from _arrays(Path(place), wanted)
        return
    chosen, dataset = own_variant or variant, cache.described(place)
    if not chosen and len(dataset.variants) > 1:  # other data may have only one, which the model was not trained on
        chosen = dataset.choose_for_evaluation(*default_variants)
    names = [wanted] if wanted else [name for name in SPLITS if name in dataset.description["splits"]]
    dataset = Dataset.open(cache.local(place, chosen, names))
    for name in names:
        found = dataset.split(name, chosen)
        yield ImagePart(found, found.names)


def _arrays(folder: Path, split: str) -> Iterator[ImagePart]:
    description, found = arrays.read(folder, kind_of(str(folder)))
    if split and split not in found:
        message = f"{folder} has no split {split!r}. It has {', '.join(found)}."
        raise UserError("unknown-split", message, split=split)
    for name in [split] if split else list(found):
        pixels, labels = found[name]
        images = TensorSplit(torch.from_numpy(pixels), torch.from_numpy(labels).long())
        classes = tuple(description["classes"])
        yield ImagePart(
            ImageSet(description["name"], classes, images, images, description["fingerprint"]),
            [f"{name}/{number}" for number in range(len(images))],
        )
