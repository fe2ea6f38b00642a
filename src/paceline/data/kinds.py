"""Detects what data.path holds: prepared shards or arrays, an image folder, or a list."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from paceline import extensions
from paceline.config.data import ARRAYS, BUILT_IN, Data
from paceline.config.recipe import Recipe
from paceline.data.description import DESCRIPTION, PREPARE_AGAIN, read_json
from paceline.data.listing import EXTENSIONS, split_folders
from paceline.data.lists import SUFFIXES
from paceline.data.shards import default_folder
from paceline.data.splits import TRAIN
from paceline.errors import UserError
from paceline.system.remote import is_remote

_WORDS = {"shards": "prepared images", "folder": "an image folder", "list": "a list of images"}
_MAX_SCANNED = 1000  # entries of a folder that are searched for an image


def resolve(recipe: Recipe) -> Recipe:
    """Return the recipe with data.name detected from data.path. Raises if the given name contradicts the path."""
    return replace(recipe, data=_resolved(recipe.data))


def _resolved(data: Data) -> Data:
    if data.name in BUILT_IN or extensions.find("dataset", data.name):
        return data
    if data.path.startswith("~"):  # a path from YAML has not been expanded by a shell
        data = replace(data, path=str(Path(data.path).expanduser()))
    place = data.path or str(default_folder(data.name))
    if not is_remote(place) and not Path(place).exists():
        raise UserError("data-not-found", _missing(data, place), path=place)
    found = kind_of(place)
    if data.name and found != {"imagenet": "shards"}.get(data.name, data.name):
        wanted = _WORDS.get(data.name, f"prepared {data.name}")
        raise UserError(
            "data-kind-mismatch",
            f"data.path {place!r} is {_WORDS.get(found, f'prepared {found}')}, not {wanted} (data.name={data.name}). "
            f"Set data.name to {found} to train on it.",
            path=place,
            found=found,
        )
    return replace(data, name=data.name or found)


def _missing(data: Data, place: str) -> str:
    if data.name in (*ARRAYS, "imagenet"):
        out = f" --out {place}" if data.path else ""
        return f'{place} does not exist. Run "paceline prepare {data.name}{out}" first, or fix data.path.'
    return (
        f"data.path {place!r} does not exist (resolved to {Path(place).absolute()}). "
        f'Fix it, or run "paceline prepare SOURCE --out {place}" first.'
    )


def kind_of(place: str) -> str:
    """Return shards, cifar10, cifar100, folder or list. Raises for anything else."""
    path = Path(place)
    if is_remote(place):
        return "shards"
    if path.is_file():
        if path.suffix.lower() in SUFFIXES:
            return "list"
        raise UserError(
            "unknown-data-kind",
            f"data.path {place!r} is a file, but not a list of images ({', '.join(SUFFIXES)}). "
            "Set data.path to a list or a folder.",
            path=place,
        )
    if (path / DESCRIPTION).is_file():
        return _prepared(path)
    if not path.is_dir():
        raise UserError("unknown-data-kind", f"data.path {place!r} is neither a file nor a folder.", path=place)
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if TRAIN in split_folders(path) or any(_has_images(folder) for folder in folders):
        return "folder"
    raise UserError(
        "unknown-data-kind",
        f"data.path {place!r} contains neither prepared data ({DESCRIPTION}) nor one folder of images per class. "
        'See "paceline prepare --help".',
        path=place,
    )


def _prepared(folder: Path) -> str:
    path = folder / DESCRIPTION
    try:
        description = read_json(folder)
        kind = description.get("kind") or description["name"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError("dataset-unreadable", f"{path} is not readable ({error}). {PREPARE_AGAIN}", path=path) from None
    if kind not in ("shards", *ARRAYS):
        raise UserError(
            "unknown-data-kind",
            f'{path} describes data of kind {kind!r:.40}, not shards or CIFAR. See "paceline prepare --help".',
            path=path,
        )
    return str(kind)


def _has_images(folder: Path) -> bool:
    return any(path.suffix.lower() in EXTENSIONS for path in islice(folder.rglob("*"), _MAX_SCANNED))
