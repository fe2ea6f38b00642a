"""Divides images into train, val and test: the same fraction of every class, and groups of images kept together."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paceline.errors import UserError

Item = TypeVar("Item", bound=Hashable)
LabeledFile = tuple[int, Path]
TRAIN, VAL, TEST = SPLITS = ("train", "val", "test")
ALL = "all"
"""What images without splits are evaluated as."""
SPLIT_NAMES = {
    "train": TRAIN,
    "training": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "test": TEST,
    "testing": TEST,
}
"""What folders, shards and tables call the splits, in lower case."""


def default_split(present: Collection[str]) -> str:
    """Return the split to evaluate if none is named."""
    return next((split for split in (VAL, TEST, TRAIN) if split in present), ALL)


def split_title(split: str) -> str:
    """Return how results name a split."""
    return "all images" if split == ALL else f"{split} split"


def split_named(name: str) -> str:
    """Return train, val or test for their usual names, and an empty string for others."""
    return SPLIT_NAMES.get(name.strip().lower(), "")


def named_splits(names: Iterable[str], place: object) -> dict[str, str]:
    """Return the name of each split that one of the names means. UserError if two mean the same one."""
    found: dict[str, str] = {}
    for name in names:
        if (split := split_named(name)) and found.setdefault(split, name) != name:
            both = " and ".join(sorted((found[split], name)))
            message = f"{place} has {both}, which both name the {split} split. Merge them, or rename one."
            raise UserError("duplicate-splits", message, path=place, split=split)
    return found


def no_split(place: object, split: str, known: Iterable[str]) -> UserError:
    """Return the error for training on data that lacks train or val."""
    problem = f"{place} has no {split} split, but only {' and '.join(known)}, so that it can only be evaluated."
    if split == VAL:
        fix = "Prepare its source again with --val-fraction 0.1, or set data.path to other data."
        return UserError("no-val-split", f"{problem} {fix}", path=place, split=split)
    fix = "Set data.path to data with training images."
    return UserError("no-train-split", f"{problem} {fix}", path=place, split=split)


@dataclass(frozen=True)
class Division:
    """How images that have no split are divided."""

    val_fraction: float = 0.0
    test_fraction: float = 0.0
    group_by: str = ""
    """Regular expression: images for which it finds the same text in their relative path stay together."""

    def check(self) -> None:
        """UserError if the options are invalid."""
        for option, fraction in (("--val-fraction", self.val_fraction), ("--test-fraction", self.test_fraction)):
            if fraction and not 0 < fraction < 1:
                code = f"invalid-{option.removeprefix('--')}"
                raise UserError(code, f"{option} {fraction:g} is not between 0 and 1. Use e.g. 0.1.", option=option)
        if (both := self.val_fraction + self.test_fraction) >= 1:
            message = (
                f"--val-fraction and --test-fraction add up to {both:g}. Use less, so that images to train on are left."
            )
            raise UserError("invalid-fractions", message)
        if self.group_by and not (self.val_fraction or self.test_fraction):
            message = "--group-by needs --val-fraction or --test-fraction. Add one of them, or omit --group-by."
            raise UserError("missing-option", message, option="--val-fraction")
        try:
            re.compile(self.group_by)
        except re.error as error:
            message = f"--group-by {self.group_by!r} is not a regular expression: {error}. Use e.g. '([^/]+)_[0-9]+'."
            raise UserError("invalid-group-by", message, option="--group-by") from None


AS_GIVEN = Division()
"""The splits that the images have already."""


def divide(
    files: list[tuple[int, Item]], division: Division, name_of: Callable[[Item], str]
) -> dict[str, list[tuple[int, Item]]]:
    """Return the files of each split, in their order. `name_of` returns the relative path of a file."""
    if division.group_by:
        return _by_group(files, division, name_of)
    splits: dict[str, list[tuple[int, Item]]] = {split: [] for split in SPLITS}
    seen: Counter[tuple[str, int]] = Counter()
    rest = division.val_fraction / (1 - division.test_fraction)
    for label, path in files:
        for split, fraction in ((TEST, division.test_fraction), (VAL, rest), (TRAIN, 1.0)):
            number = seen[split, label]
            seen[split, label] += 1
            if int((number + 1) * fraction + 1e-9) > int(number * fraction + 1e-9):  # spread evenly over the files
                splits[split].append((label, path))
                break
    return splits


def _by_group(
    files: list[tuple[int, Item]], division: Division, name_of: Callable[[Item], str]
) -> dict[str, list[tuple[int, Item]]]:
    """Assign the groups, largest first, each to the split that is the least full among those that it fits into.

    So val and test have large groups too. A group that fits nowhere goes to the split that misses most images of its
    classes and of all classes: if every class has few groups, no class alone misses enough of them in val or test, but
    all classes together do. Groups of one size come in a random order that only depends on their names: otherwise val
    and test would often have the last patients, days or cameras.
    """
    groups: dict[str, list[tuple[int, Item]]] = defaultdict(list)
    for label, path in files:
        groups[_group_of(name_of(path), division.group_by)].append((label, path))
    if len(groups) < 2:
        message = f"--group-by {division.group_by!r} finds the same text in all paths, so that they cannot be divided."
        raise UserError("one-group", f"{message} Choose another expression.", option="--group-by")
    fractions = {TEST: division.test_fraction, VAL: division.val_fraction}
    fractions[TRAIN] = 1 - sum(fractions.values())
    total = Counter(label for label, _ in files)
    missing = {(split, label): part * total[label] for split, part in fractions.items() for label in total}
    missing_in_all = {split: part * len(files) for split, part in fractions.items()}
    chosen: dict[Item, str] = {}
    trained: set[int] = set()
    for _, members in sorted(groups.items(), key=lambda group: (-len(group[1]), _shuffled(group[0]))):
        counts = Counter(label for label, _ in members)

        def need(split: str, counts: Counter[int] = counts) -> float:
            of_classes = sum(count * missing[split, label] / total[label] for label, count in counts.items())
            return of_classes + counts.total() * missing_in_all[split] / len(files)

        def is_room(split: str, counts: Counter[int] = counts) -> bool:
            return all(count <= missing[split, label] + 1e-9 for label, count in counts.items())

        if counts.keys() - trained:  # a class without training images could not be learned
            split = TRAIN
        elif fitting := [each for each in fractions if is_room(each)]:
            split = max(fitting, key=lambda each: need(each) / fractions[each])
        else:
            split = max((each for each in fractions if fractions[each]), key=need)
        trained |= counts.keys() if split == TRAIN else set()
        missing_in_all[split] -= len(members)
        for label, count in counts.items():
            missing[split, label] -= count
        chosen |= dict.fromkeys((path for _, path in members), split)
    return {split: [(label, path) for label, path in files if chosen[path] == split] for split in SPLITS}


def _shuffled(group: str) -> bytes:
    """Return a key that sorts groups in an order without a relation to their names."""
    return hashlib.sha256(group.encode(errors="surrogatepass")).digest()


def _group_of(name: str, expression: str) -> str:
    group = _group_in(name, expression)
    if group is None:
        message = f"--group-by {expression!r} finds nothing in {name}. It must match the path of every image."
        raise UserError("group-not-found", message, path=name)
    return group


def _group_in(name: str, expression: str) -> str | None:
    found = re.search(expression, name)
    if not found:
        return None
    return "\0".join(part or "" for part in found.groups()) if found.groups() else found.group()


def shared_groups(first: Iterable[str], second: Iterable[str], expression: str) -> list[str]:
    """Return the first path of each group in the second paths that the first paths have as well."""
    known = {_group_in(name, expression) for name in first}
    shared: dict[str, str] = {}
    for name in second:
        group = _group_in(name, expression)
        if group is not None and group in known:
            shared.setdefault(group, name)
    return list(shared.values())
