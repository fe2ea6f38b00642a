"""Splits and labels from the names in a sorted tree: CLASS/IMAGE or SPLIT/CLASS/IMAGE."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from paceline.data.listing import EXTENSIONS, warn_of_others
from paceline.data.splits import TRAIN, named_splits, split_named
from paceline.errors import UserError
from paceline.system.wording import counted


def sort_tree(names: Sequence[str], place: str, top_folder: bool = False) -> list[tuple[str, str, str]]:
    """Return name, split and label of every image. `top_folder`: folders around the whole tree are ignored."""
    images = [name for name in names if is_image(name) and not _is_hidden(name)]
    warn_of_others(place, [name for name in names if not is_image(name) and not _is_hidden(name)])
    parts = [PurePosixPath(name).parts for name in images]
    around = _around(parts) if top_folder else 0
    parts = [path[around:] for path in parts]
    only_splits = bool(parts) and all(split_named(path[0]) for path in parts)
    folders = 2 if only_splits else 1  # a class may be called train
    if loose := [name for name, path in zip(images, parts, strict=True) if len(path) <= folders]:
        message = f"{place} contains {counted(len(loose), 'image')} outside of class folders, e.g. {loose[0]}."
        fix = "Sort them as CLASS/IMAGE or SPLIT/CLASS/IMAGE."
        raise UserError("image-without-class", f"{message} {fix}", path=place, names=loose[:10])
    has_splits = TRAIN in named_splits(sorted({path[0] for path in parts if len(path) > 2}), place) or only_splits
    found = []
    for name, path in zip(images, parts, strict=True):
        if not has_splits:
            found.append((name, "", path[0]))
        elif len(path) > 2 and (split := split_named(path[0])):
            found.append((name, split, path[1]))
    if has_splits:
        kept = {name for name, _, _ in found}
        others = [name for name in images if name not in kept]
        warn_of_others(place, others, "outside of train, val and test")
    return found


def is_image(name: str) -> bool:
    """Whether a name ends like that of an image."""
    return PurePosixPath(name).suffix.lower() in EXTENSIONS


def _is_hidden(name: str) -> bool:
    return name.endswith("/") or any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)


def _around(paths: list[tuple[str, ...]]) -> int:
    """Return the number of folders that all images share, apart from splits and classes."""
    count = 0
    while paths and all(len(path) > count + 2 and path[count] == paths[0][count] for path in paths):
        if split_named(paths[0][count]):
            break
        count += 1
    return count
