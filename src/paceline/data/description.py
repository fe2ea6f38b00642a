"""dataset.json, the description of prepared data. It is untrusted: size, schema and names in it are checked.

`sha256` is a digest of everything else in it. `fingerprint` is a digest of the training data: classes, splits and,
through their checksums, all files. It does not depend on where or when the data was prepared.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from paceline.config.data import ARRAYS
from paceline.errors import UserError
from paceline.system.files import printable, size_text
from paceline.system.untrusted import read_regular

DESCRIPTION = "dataset.json"
FORMAT = 2
PREPARE_AGAIN = "Restore the files from a copy, or prepare the data again into another folder."
MAX_DESCRIPTION_BYTES = 64 << 20
"""Three times the dataset.json of ImageNet-21k in three variants."""
MAX_CLASSES = (1 << 16) - 1
MAX_REMARKS = 50_000
LISTS = ("index.npy", "names.txt")
LEFT_OUT = "left out: "
"""The start of the remark on a file that cannot be decoded."""
_MAX_SHARDS = 1 << 16
_MAX_ARRAY_BYTES = 1 << 34
_NOT_FINGERPRINTED = ("sha256", "fingerprint", "prepared", "remarks")
"""Keys that do not affect training."""


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.pcl"


def read_json(folder: Path) -> Any:
    """Return the content of a folder's dataset.json, unchecked. Raises OSError or ValueError if it cannot be read."""
    return parse_json(read_regular(folder / DESCRIPTION, MAX_DESCRIPTION_BYTES, folder))


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is too large, nested too deeply or not JSON."""
    if len(content) > MAX_DESCRIPTION_BYTES:
        raise ValueError(f"it is larger than {size_text(MAX_DESCRIPTION_BYTES)}")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sealed(description: dict[str, Any]) -> dict[str, Any]:
    """Return a description with its fingerprint and digest added, ready to be written."""
    stamped = {**description, "fingerprint": _fingerprint(description)}
    return {**stamped, "sha256": _digest(stamped)}


def checked(description: Any, kind: str, path: str, fix: str = PREPARE_AGAIN) -> dict[str, Any]:
    """Return the description if it is valid. Raises a UserError that ends in `fix` otherwise."""
    if not isinstance(description, dict) or description.get("kind", description.get("name")) != kind:
        raise UserError(
            "data-kind-mismatch", f"{path} does not describe prepared data of kind {kind}. {fix}", path=path
        )
    if (found := description.get("format", 1)) != FORMAT:
        newer = isinstance(found, int) and found > FORMAT
        fix = "Upgrade paceline." if newer else fix
        message = f"{path} has format {found!r:.20}, but this version of paceline reads format {FORMAT}. {fix}"
        raise UserError("dataset-format-newer" if newer else "dataset-format-outdated", message, path=path)
    if problem := _problem(description, kind):
        raise UserError("dataset-corrupt", f"{path} is corrupt ({problem}). {fix}", path=path)
    return description


def _digest(description: dict[str, Any], without: tuple[str, ...] = ("sha256",)) -> str:
    content = {key: value for key, value in description.items() if key not in without}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _fingerprint(description: dict[str, Any]) -> str:
    return _digest(description, _NOT_FINGERPRINTED)[:16]


def _problem(description: dict[str, Any], kind: str) -> str:
    """Return the first problem of a description, or an empty string."""
    model, find_contradiction = _KINDS[kind]
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
        return "its fingerprint does not match its classes, splits and files"
    return printable(find_contradiction(description))


# ---- schema ----

# neither pattern allows path traversal: _Name for names chosen by `paceline prepare`, _Id for class folders
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=255)]
_Id = Annotated[str, Field(pattern=r"^[^./\\\x00][^/\\\x00]*$", max_length=255)]
_Count = Annotated[int, Field(ge=0, lt=1 << 48)]
_Samples = Annotated[int, Field(ge=1, lt=1 << 28)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _FileEntry(_Strict):
    file: _Name
    bytes: _Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _ShardEntry(_FileEntry):
    samples: _Count


class _ListEntry(_FileEntry):
    bytes: Annotated[int, Field(ge=0, lt=1 << 33)]  # read into memory


class _SplitFiles(_Strict):
    bytes: _Count
    shards: Annotated[list[_ShardEntry], FailFast(), Field(min_length=1, max_length=_MAX_SHARDS)]
    lists: Annotated[list[_ListEntry], Field(min_length=len(LISTS), max_length=len(LISTS))]


class _VariantEntry(_Strict):
    splits: Annotated[dict[_Name, _SplitFiles], Field(max_length=16)]


class _ClassEntry(_Strict):
    id: _Id
    name: str


class _SplitEntry(_Strict):
    samples: _Samples
    left_out: _Count
    remarks: _Count
    per_class: Annotated[list[_Count], FailFast(), Field(min_length=2, max_length=MAX_CLASSES)]


class _Remark(_Strict):
    split: str
    file: str
    what: str


class _ShardsDescription(_Strict):
    name: _Name
    fingerprint: str
    classes: Annotated[list[_ClassEntry], FailFast(), Field(min_length=2, max_length=MAX_CLASSES)]
    splits: Annotated[dict[_Name, _SplitEntry], Field(min_length=1, max_length=16)]
    variants: Annotated[dict[_Name, _VariantEntry], Field(min_length=1, max_length=256)]
    remarks: Annotated[list[_Remark], FailFast(), Field(max_length=MAX_REMARKS)]


def _shards_contradiction(description: dict[str, Any]) -> str:
    ids = [entry["id"] for entry in description["classes"]]
    if duplicates := _duplicates(ids):
        return f"two classes have the id {duplicates[0]!r}"
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
                return f"{where}.shards are not numbered from {shard_name(0)}"
            if tuple(entry["file"] for entry in files["lists"]) != LISTS:
                return f"{where}.lists are not {' and '.join(LISTS)}"
            if sum(shard["samples"] for shard in files["shards"]) != description["splits"][name]["samples"]:
                return f"{where}.shards do not hold {description['splits'][name]['samples']} samples"
    return ""


class _ArraySplit(_Strict):
    samples: _Samples
    images: _FileEntry
    labels: _FileEntry


class _ArraysDescription(_Strict):
    fingerprint: str
    classes: Annotated[list[str], FailFast(), Field(min_length=2, max_length=256)]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=4096)]], Field(min_length=3, max_length=3)]
    splits: dict[Literal["train", "val"], _ArraySplit]


def _arrays_contradiction(description: dict[str, Any]) -> str:
    if duplicates := _duplicates(description["classes"]):
        return f"two classes have the name {duplicates[0]!r}"
    if description["splits"].keys() != {"train", "val"}:
        return "its splits are not train and val"
    height, width, channels = description["shape"]
    for split, entry in description["splits"].items():
        if entry["samples"] * height * width * channels > _MAX_ARRAY_BYTES:
            return f"splits.{split} takes more than {size_text(_MAX_ARRAY_BYTES)} of memory"
    return ""


def _duplicates(names: list[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


_KINDS: dict[str, tuple[type[_Strict], Callable[[dict[str, Any]], str]]] = {
    "shards": (_ShardsDescription, _shards_contradiction),
    **dict.fromkeys(ARRAYS, (_ArraysDescription, _arrays_contradiction)),
}
