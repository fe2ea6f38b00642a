"""What kind of data a path holds: prepared shards or arrays, an image folder, or a list. The path decides."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from paceline.config.data import BUILT_IN, Data
from paceline.config.recipe import Recipe
from paceline.data.description import ANEW, DESCRIPTION, read_json
from paceline.data.prepare.lists import SUFFIXES
from paceline.data.prepare.sources import EXTENSIONS
from paceline.data.shards import default_folder
from paceline.errors import UserError
from paceline.system.remote import is_remote

_WORDS = {"shards": "prepared images", "folder": "an image folder", "list": "a list of images"}
_LOOKED_AT = 1000  # files of a class folder, until one of them is an image


def resolve(recipe: Recipe) -> Recipe:
    """The recipe with its data.name filled in from data.path; a name that contradicts the path is refused."""
    return replace(recipe, data=_resolved(recipe.data))


def _resolved(data: Data) -> Data:
    if data.name in BUILT_IN:
        return data
    if data.path.startswith("~"):  # in YAML no shell has expanded it
        data = replace(data, path=str(Path(data.path).expanduser()))
    place = data.path or str(default_folder(data.name))
    if not is_remote(place) and not Path(place).exists():
        raise UserError(_missing(data, place))
    found = kind_of(place)
    if data.name and found != {"imagenet": "shards"}.get(data.name, data.name):
        wanted = _WORDS.get(data.name, f"prepared {data.name}")
        raise UserError(
            f"data.path={place!r} is {_WORDS.get(found, f'prepared {found}')}, not {wanted} (data.name={data.name}); "
            f"to train on it, set data.name to {found}"
        )
    return replace(data, name=data.name or found)  # type: ignore[arg-type]


def _missing(data: Data, place: str) -> str:
    if data.name in ("cifar10", "imagenet"):
        out = f" --out {place}" if data.path else ""
        return f"{place}: no prepared {data.name} here; run `paceline prepare {data.name}{out}`, or correct data.path"
    return (
        f"data.path={place!r} does not exist (looked for {Path(place).absolute()}); correct it, or prepare images "
        f"there: paceline prepare folder IMAGES --out {place}"
    )


def kind_of(place: str) -> str:
    """shards, cifar10, folder or list; an error for anything else that exists."""
    path = Path(place)
    if is_remote(place):
        return "shards"
    if path.is_file():
        if path.suffix.lower() in SUFFIXES:
            return "list"
        raise UserError(f"data.path={place!r} is a file, but not a list of images ({', '.join(SUFFIXES)})")
    if (path / DESCRIPTION).is_file():
        return _prepared(path)
    if not path.is_dir():
        raise UserError(f"data.path={place!r} is neither a file nor a folder")
    folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if (path / "train").is_dir() or any(_has_images(folder) for folder in folders):
        return "folder"
    raise UserError(
        f"data.path={place!r} holds neither prepared data ({DESCRIPTION}) nor a folder of images for each class; "
        "see `paceline prepare --help`"
    )


def _prepared(folder: Path) -> str:
    path = folder / DESCRIPTION
    try:
        description = read_json(folder)
        kind = description.get("kind") or description["name"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not readable ({error}); {ANEW}") from None
    if kind not in ("shards", "cifar10"):
        raise UserError(f"{path} describes {kind!r:.40}, which is not prepared data; see `paceline prepare --help`")
    return str(kind)


def _has_images(folder: Path) -> bool:
    return any(path.suffix.lower() in EXTENSIONS for path in islice(folder.rglob("*"), _LOOKED_AT))
