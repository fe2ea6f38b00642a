"""WebDataset shards: tars in which the files of a sample share a name, e.g. 0001.jpg and 0001.cls."""

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from paceline.data.prepare.raw import RawImage, SourceImages
from paceline.data.prepare.readers.tar import TARS, contents, members
from paceline.data.prepare.tars import Member
from paceline.data.splits import SPLIT_NAMES, named_splits, split_named
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.remote import is_remote, redacted
from paceline.system.wording import counted

_IMAGES = ("jpg", "jpeg", "png", "webp")
_LABELS = ("cls", "json", "txt")  # the first one that a sample has
_JSON_KEYS = ("label", "cls", "class", "class_name")
_MAX_LABEL_FILE = 1 << 20
_MAX_LABEL = 255
_REPLACEMENT = "\ufffd"  # of bytes that are not UTF-8
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_NAMES)})(?![a-z])")


def webdataset(source: str, label_column: str = "") -> SourceImages:
    """Return the images of shards: a pattern such as train-{000..009}.tar or *.tar, or a folder that contains them.

    `label_column`: the key of the label in .json files.
    """
    shards = _shards(source)
    splits = _splits(shards, redacted(source))
    entries: list[RawImage] = []
    bounds = [0]
    for shard in shards:
        log.info("listing %s", redacted(shard))
        entries += _samples(shard, splits[shard], label_column)
        bounds.append(len(entries))
    if not entries:
        message = f"{redacted(source)} contains no images ({', '.join(_IMAGES)}) in {counted(len(shards), 'shard')}."
        raise UserError("source-empty", f"{message} Check the pattern.", path=source)
    return SourceImages(entries, stream=partial(_stream, shards, entries, bounds))


def shard_folder(path: Path) -> bool:
    """Whether a folder contains tars, also in folders named like splits."""
    found = [*path.glob("*"), *(inner for name in path.glob("*") if split_named(name.name) for inner in name.glob("*"))]
    return any(file.name.lower().endswith(TARS) and file.is_file() for file in found)


def expand(pattern: str) -> list[str]:
    """Return what a shell would make of {000..009} and {a,b}."""
    found = _BRACES.search(pattern)
    if not found:
        return [pattern]
    numbers = _RANGE.fullmatch(found[1])
    if numbers:
        first, last = numbers.groups()
        words = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    else:
        words = found[1].split(",")
    ends = [f"{pattern[: found.start()]}{word}{pattern[found.end() :]}" for word in words]
    return list(dict.fromkeys(name for end in ends for name in expand(end)))  # inner braces repeat what is beside them


def _shards(source: str) -> list[str]:
    if Path(source).is_dir():
        files = (path for path in Path(source).rglob("*") if path.name.lower().endswith(TARS) and path.is_file())
        found = sorted(map(str, files))
    elif Path(source).exists() or is_remote(source):
        found = [source] if Path(source).exists() else expand(source)
    else:
        found = [path for pattern in expand(source) for path in sorted(glob.glob(pattern)) or [pattern]]
    missing = [shard for shard in found if not is_remote(shard) and not Path(shard).is_file()]
    if missing or not found:
        shown = f": {', '.join(missing[:5])} ({len(missing)} in total)" if missing else ""
        message = f"{source} names shards that do not exist{shown}. Check the pattern."
        raise UserError("source-not-found", message, path=source)
    return found


def _splits(shards: Sequence[str], source: str) -> dict[str, str]:
    """Return the split that the name of each shard, or of its folder below the common one, contains."""
    common = os.path.commonpath([os.path.dirname(shard) or "." for shard in shards]) if len(shards) > 1 else ""
    found = {}
    for shard in shards:
        place = redacted(shard).rpartition("/")[2]  # without the query string of a URL
        if common and not is_remote(shard):
            place = os.path.relpath(shard, common)
        words = [word for part in place.lower().split(os.sep)[::-1] for word in _SPLIT.findall(part)]
        found[shard] = words[0] if words else ""
    named_splits(dict.fromkeys(found.values()), source)
    return {shard: split_named(word) for shard, word in found.items()}


def _samples(shard: str, split: str, label_key: str) -> Iterator[RawImage]:
    images: dict[str, Member] = {}
    labels: dict[str, dict[str, str]] = {}
    for member in members(shard):
        key, extension = _key(member)
        if extension in _IMAGES:
            if key in images:
                message = f"{redacted(shard)} has two images named {key}: {images[key].path} and {member.path}."
                raise UserError("duplicate-images", f"{message} Keep one of them.", path=shard)
            images[key] = member
        elif extension in _LABELS:
            text = member.read(_MAX_LABEL_FILE).decode("utf-8", "replace").strip()
            label = _json_label(text, label_key) if extension == "json" else text
            labels.setdefault(key, {})[extension] = _checked(label, member) if label else ""
    for key, member in images.items():
        found = labels.get(key, {})
        label = next((found[kind] for kind in _LABELS if found.get(kind)), "")
        if not label:
            names = " or ".join([label_key] if label_key else _JSON_KEYS[:3])
            message = f"{redacted(shard)}: {member.path} has no label. Add {key}.cls, {key}.txt, or {key}.json with "
            raise UserError("sample-without-label", f"{message}{names} (--label-column names the key).", path=shard)
        yield RawImage(f"{_short(shard)}/{member.path}", label, split=split, size=member.size)


def _short(shard: str) -> str:
    return "/".join(redacted(shard).replace(os.sep, "/").split("/")[-2:])


def _key(member: Member) -> tuple[str, str]:
    """Return the part of a path before the first dot of the file name, and what follows the dot."""
    folder, slash, name = member.path.rpartition("/")
    stem, _, extension = name.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _json_label(text: str, key: str) -> str:
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(values, dict):
        values = next((values[name] for name in ([key] if key else _JSON_KEYS) if name in values), None)
    return str(values).strip() if isinstance(values, str | int) and not isinstance(values, bool) else ""


def _checked(label: str, member: Member) -> str:
    if len(label) > _MAX_LABEL or "\n" in label or _REPLACEMENT in label:
        message = f"{member.place}: {member.path} is not a label ({label!r:.40}). Write the name of a class in UTF-8."
        raise UserError("label-invalid", message, path=member.place)
    return str(int(label)) if label.isascii() and label.isdecimal() else label


def _stream(
    shards: Sequence[str], entries: Sequence[RawImage], bounds: Sequence[int], wanted: Sequence[int]
) -> Iterator[Callable[[], bytes]]:
    for shard, first, end in zip(shards, bounds, bounds[1:], strict=False):
        names = {entries[number].name.removeprefix(f"{_short(shard)}/") for number in wanted if first <= number < end}
        if names:  # the other shards are not read again
            yield from contents(shard, (member for member in members(shard) if _key(member)[1] in _IMAGES), names)
