"""dataset.json. It can come from a stranger: it is bounded, checked, and names in it cannot lead out of its folder.

`sha256` in it is a digest of everything else that it says. `fingerprint` is one of what is trained on: classes, splits
and, through their checksums, every file; it is the same wherever the same data was prepared.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from paceline.errors import UserError
from paceline.system.files import printable, size_text
from paceline.system.untrusted import read_regular

DESCRIPTION = "dataset.json"
FORMAT = 2
ANEW = "remove the folder and prepare the data again"
MOST_BYTES = 64 << 20
"""Of dataset.json: three times what ImageNet-21k in three variants takes."""
MOST_CLASSES = (1 << 16) - 1
MOST_REMARKS = 50_000
LISTS = ("index.npy", "names.txt")
_MOST_SHARDS = 1 << 16
_MOST_ARRAY_BYTES = 1 << 34
_STORY = ("sha256", "fingerprint", "prepared", "remarks")
"""What does not decide what is trained on."""


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.pcl"


def read_json(folder: Path) -> Any:
    """What dataset.json of a folder holds, unchecked; OSError or ValueError where that cannot be told."""
    return parse_json(read_regular(folder / DESCRIPTION, MOST_BYTES, folder))


def parse_json(content: bytes) -> Any:
    if len(content) > MOST_BYTES:
        raise ValueError(f"it is larger than {size_text(MOST_BYTES)}")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(description: dict[str, Any]) -> dict[str, Any]:
    """A description with its fingerprint and its digest, as it is written."""
    stamped = {**description, "fingerprint": _fingerprint(description)}
    return {**stamped, "sha256": _digest(stamped)}


def checked(description: Any, kind: str, path: str, cure: str = ANEW) -> dict[str, Any]:
    """A description in which nothing is wrong; an error with the cure for any other."""
    if not isinstance(description, dict) or description.get("kind", description.get("name")) != kind:
        raise UserError(f"{path} does not describe prepared data of the kind {kind}; {cure}")
    if (found := description.get("format", 1)) != FORMAT:
        cure = "upgrade paceline" if isinstance(found, int) and found > FORMAT else cure
        raise UserError(f"{path} has format {found!r:.20}; this version reads format {FORMAT}: {cure}")
    if wrong := _problem(description, kind):
        raise UserError(f"{path} is corrupt ({wrong}); {cure}")
    return description


def _digest(description: dict[str, Any], without: tuple[str, ...] = ("sha256",)) -> str:
    content = {key: value for key, value in description.items() if key not in without}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprint(description: dict[str, Any]) -> str:
    return _digest(description, _STORY)[:16]


def _problem(description: dict[str, Any], kind: str) -> str:
    """What is wrong with a description, in a line; empty where nothing is."""
    model, contradiction = _KINDS[kind]
    try:
        if description.get("sha256") != _digest(description):
            return "its content does not match its sha256"
        model.model_validate(description)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return printable(f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}")
    except RecursionError:
        return "it is nested too deeply"
    if description["fingerprint"] != _fingerprint(description):
        return "its fingerprint is not that of its classes, splits and files"
    return printable(contradiction(description))


# ---- what it may hold ----

# names that stay inside the folder they are joined to: what `paceline prepare` chooses, and what people call classes
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=255)]
_Id = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$", max_length=255)]
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]
_Samples = Annotated[int, Field(ge=1, lt=1 << 28)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _File(_Strict):
    file: _Name
    bytes: _Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Shard(_File):
    samples: _Count


class _List(_File):
    bytes: Annotated[int, Field(ge=0, lt=1 << 33)]  # it is read as a whole


class _Files(_Strict):
    bytes: _Count
    shards: Annotated[list[_Shard], FailFast(), Field(min_length=1, max_length=_MOST_SHARDS)]
    lists: Annotated[list[_List], Field(min_length=len(LISTS), max_length=len(LISTS))]


class _Variant(_Strict):
    splits: Annotated[dict[_Name, _Files], Field(max_length=16)]


class _Class(_Strict):
    id: _Id
    name: str


class _Split(_Strict):
    samples: _Samples
    left_out: _Count
    remarks: _Count
    per_class: Annotated[list[_Count], FailFast(), Field(min_length=2, max_length=MOST_CLASSES)]


class _Remark(_Strict):
    split: str
    file: str
    what: str


class _Shards(_Strict):
    name: _Name
    fingerprint: str
    classes: Annotated[list[_Class], FailFast(), Field(min_length=2, max_length=MOST_CLASSES)]
    splits: Annotated[dict[_Name, _Split], Field(min_length=1, max_length=16)]
    variants: Annotated[dict[_Name, _Variant], Field(min_length=1, max_length=256)]
    remarks: Annotated[list[_Remark], FailFast(), Field(max_length=MOST_REMARKS)]


def _shards_contradiction(description: dict[str, Any]) -> str:
    ids = [entry["id"] for entry in description["classes"]]
    if twice := _twice(ids):
        return f"two classes have the id {twice[0]!r}"
    for name, split in description["splits"].items():
        if len(split["per_class"]) != len(ids) or sum(split["per_class"]) != split["samples"]:
            return f"splits.{name}.per_class does not add up to {split['samples']} samples of {len(ids)} classes"
    for variant, entry in description["variants"].items():
        if entry["splits"].keys() != description["splits"].keys():
            return f"variants.{variant} does not have the splits {', '.join(description['splits'])}"
        for name, files in entry["splits"].items():
            where = f"variants.{variant}.splits.{name}"
            names = [shard["file"] for shard in files["shards"]]
            if names != [shard_name(number) for number in range(len(names))]:
                return f"{where}.shards are not {shard_name(0)} and the following"
            if tuple(entry["file"] for entry in files["lists"]) != LISTS:
                return f"{where}.lists are not {' and '.join(LISTS)}"
            if sum(shard["samples"] for shard in files["shards"]) != description["splits"][name]["samples"]:
                return f"{where}.shards do not hold {description['splits'][name]['samples']} samples"
    return ""


class _ArraySplit(_Strict):
    samples: _Samples
    images: _File
    labels: _File


class _Arrays(_Strict):
    fingerprint: str
    classes: Annotated[list[str], FailFast(), Field(min_length=2, max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=3, max_length=3)]
    splits: dict[Literal["train", "val"], _ArraySplit]


def _arrays_contradiction(description: dict[str, Any]) -> str:
    if twice := _twice(description["classes"]):
        return f"two classes have the name {twice[0]!r}"
    if description["splits"].keys() != {"train", "val"}:
        return "its splits are not train and val"
    height, width, channels = description["shape"]
    for split, entry in description["splits"].items():
        if entry["samples"] * height * width * channels > _MOST_ARRAY_BYTES:
            return f"splits.{split} takes more than {size_text(_MOST_ARRAY_BYTES)} of memory"
    return ""


def _twice(names: list[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


_KINDS: dict[str, tuple[type[_Strict], Callable[[dict[str, Any]], str]]] = {
    "shards": (_Shards, _shards_contradiction),
    "cifar10": (_Arrays, _arrays_contradiction),
}
