"""The three official archives of ImageNet, read as streams: nothing is unpacked to disk."""

import io
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from paceline.data.classes import Class
from paceline.data.pillow import MAX_BYTES
from paceline.data.prepare.isolated import Isolated
from paceline.data.prepare.raw import RawDataset, Sample
from paceline.data.prepare.sources import tree
from paceline.data.prepare.tars import archive, opened, size_of
from paceline.data.splits import AS_GIVEN, Division
from paceline.errors import UserError
from paceline.system.remote import is_remote, redacted
from paceline.system.untrusted import Unreadable
from paceline.system.wording import counted

_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
_MAX_DEVKIT = 1 << 24  # bytes per file; the originals have less than 1 MB
_SAME_RELEASE = "Use archives of the same release."
_VALIDATION_NAME = re.compile(r"ILSVRC2012_val_([0-9]{1,9})\.\w+")


def from_archives(train: str, val: str, devkit: str, limit_per_class: int = 0) -> RawDataset:
    """Return a source with classes in the usual order (by WordNet id) and validation labels from the devkit."""
    classes, truth = _devkit(devkit)
    labels = {entry.id: label for label, entry in enumerate(classes)}
    limit = limit_per_class
    for samples in (_train(train, labels, limit), _val(val, truth, limit)):
        next(samples, None)  # detect a wrong archive before anything is written
    return RawDataset(
        name="imagenet",
        classes=classes,
        splits={  # the smaller one first, so that its problems show early
            "val": partial(_val, val, truth, limit),
            "train": partial(_train, train, labels, limit),
        },
        sizes={"train": None, "val": None if limit else len(truth)},
        bytes={"train": size_of(train), "val": size_of(val)},
        identity={
            "train": _identity(train),
            "val": _identity(val),
            "devkit": _identity(devkit),
            "limit_per_class": limit,
        },
        parallel=False,
    )


def from_tree(root: Path, devkit: str, limit_per_class: int = 0, division: Division = AS_GIVEN) -> RawDataset:
    """Return a source that reads an image folder, with class names from the devkit if there is one."""
    readable = {entry.id: entry.name for entry in _devkit(devkit)[0]} if devkit else {}
    return tree(root, "imagenet", division, limit_per_class, readable)


def _identity(place: str) -> list[Any]:
    return [redacted(place) if is_remote(place) else Path(place).name, size_of(place)]


def _devkit(place: str) -> tuple[list[Class], list[int]]:
    """Return the classes, and the labels of the validation images in order."""
    found: dict[str, bytes] = {}
    with opened(place) as stream:
        for member in archive(stream, place):
            if member.name in ("meta.mat", _TRUTH):
                found[member.name] = member.read(_MAX_DEVKIT)
    for needed in ("meta.mat", _TRUTH):
        if needed not in found:
            message = f"--devkit {place} does not contain {needed}. Use ILSVRC2012_devkit_t12.tar.gz."
            raise UserError("wrong-archive", message, option="--devkit", path=place)
    try:
        with Isolated(synsets) as read:
            _, rows = read(found["meta.mat"])
    except Unreadable as error:
        message = f"--devkit {place}: meta.mat is not readable ({error}). Download the devkit again."
        raise UserError("devkit-corrupt", message, path=place) from None
    leaves = {number: (id_, name) for number, id_, name in rows}
    order = sorted(leaves.values())
    labels = {number: order.index(leaf) for number, leaf in leaves.items()}
    try:
        truth = [labels[int(line)] for line in found[_TRUTH].split()]
    except (KeyError, ValueError):
        message = f"--devkit {place}: {_TRUTH} has classes that meta.mat does not have. Download the devkit again."
        raise UserError("devkit-corrupt", message, path=place) from None
    return [Class(id_, name) for id_, name in order], truth


def synsets(content: bytes) -> tuple[list[bytes], list[tuple[int, str, str]]]:
    """Return ILSVRC2012_ID, WordNet id and first name of every class that has images, for Isolated."""
    from scipy.io import loadmat

    rows = loadmat(io.BytesIO(content), squeeze_me=True)["synsets"]
    return [], [
        (int(row["ILSVRC2012_ID"]), str(row["WNID"]), str(row["words"]).split(",")[0])
        for row in rows
        if int(row["num_children"]) == 0
    ]


def _train(place: str, labels: dict[str, int], limit: int) -> Iterator[Sample]:
    seen: set[str] = set()
    with opened(place) as stream:
        for class_archive in archive(stream, place):
            name = class_archive.name
            id_ = name.removesuffix(".tar")
            if id_ == name:
                message = f"--train {place} contains {name} instead of one tar per class. Use ILSVRC2012_img_train.tar."
                raise UserError("wrong-archive", message, option="--train", path=place)
            if id_ not in labels:
                message = f"--train {place} contains {name}, a class that the devkit does not have. {_SAME_RELEASE}"
                raise UserError("devkit-mismatch", message, option="--train", path=place)
            seen.add(id_)
            for number, image in enumerate(archive(class_archive.file, f"{place}/{name}")):
                if limit and number >= limit:
                    break
                yield Sample(labels[id_], f"train/{id_}/{image.name}", image.size, partial(image.read, MAX_BYTES))
    if missing := sorted(labels.keys() - seen):
        classes, names = counted(len(missing), "class", "classes"), ", ".join(missing[:3])
        message = f"--train {place} lacks {classes} of the devkit ({names} ...). {_SAME_RELEASE}"
        raise UserError("devkit-mismatch", message, option="--train", path=place)


def _val(place: str, truth: list[int], limit: int) -> Iterator[Sample]:
    counts: dict[int, int] = {}
    numbers: set[int] = set()
    with opened(place) as stream:
        for image in archive(stream, place):
            number = _number(image.name, place)
            if number > len(truth):
                message = f"--val {place} contains {image.name}, but the devkit has {len(truth)} validation images."
                raise UserError("devkit-mismatch", f"{message} {_SAME_RELEASE}", option="--val", path=place)
            numbers.add(number)
            label = truth[number - 1]
            counts[label] = counts.get(label, 0) + 1
            if not limit or counts[label] <= limit:
                yield Sample(label, f"val/{image.name}", image.size, partial(image.read, MAX_BYTES))
    if len(numbers) != len(truth):
        message = (
            f"--val {place} contains {counted(len(numbers), 'image')}, but the devkit has {len(truth)}. {_SAME_RELEASE}"
        )
        raise UserError("devkit-mismatch", message, option="--val", path=place)


def _number(name: str, place: str) -> int:
    """ILSVRC2012_val_00000001.JPEG -> 1."""
    found = _VALIDATION_NAME.fullmatch(name)
    if not found or int(found[1]) < 1:
        message = f"--val {place} contains {name}, which is not a validation image. Use ILSVRC2012_img_val.tar."
        raise UserError("wrong-archive", message, option="--val", path=place)
    return int(found[1])
