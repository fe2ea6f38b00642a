"""Numbers the classes of labeled images, and assigns every image to a split: the same rules for all sources."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from paceline.data.classes import class_names
from paceline.data.splits import AS_GIVEN, SPLITS, TEST, TRAIN, VAL, Division, Item, divide, no_split, shared_groups
from paceline.errors import UserError
from paceline.system.logs import log
from paceline.system.wording import counted

LabeledRow = tuple[str, str, Item]
"""Split (empty if not given), label and image."""
Splits = dict[str, list[tuple[int, Item]]]
_SHOWN = 5


def assign(
    rows: Iterable[LabeledRow[Item]],
    place: object,
    name_of: Callable[[Item], str],
    division: Division = AS_GIVEN,
    limit_per_class: int = 0,
    classes: Sequence[str] = (),
    only_evaluate: bool = False,
) -> tuple[list[str], Splits[Item]]:
    """Return the classes, and the numbered images of each split; those without a split are divided.

    `name_of` returns the relative path of an image, `classes` gives the order of classes. `only_evaluate`: there may be
    no training images, if all images have a split.
    """
    division.check()
    rows = list(rows)
    examples = {label: item for _, label, item in reversed(rows)}
    names = class_names(
        dict.fromkeys([*classes, *sorted(examples)]),
        place,
        lambda label: name_of(examples[label]) if label in examples else "",
    )
    ids = [names[label] for label in classes] or in_order(names.values())
    if len(ids) < 2:
        message = f"{place} has {counted(len(ids), 'class', 'classes')}. A classifier needs at least two."
        raise UserError("too-few-classes", message, path=place)
    numbers = {id_: number for number, id_ in enumerate(ids)}
    splits: Splits[Item] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for split, label, item in rows:
        seen[split, label] += 1
        if not limit_per_class or seen[split, label] <= limit_per_class:
            splits.setdefault(split, []).append((numbers[names[label]], item))
    rest = sorted(splits.pop("", []), key=lambda entry: (entry[0], name_of(entry[1])))
    if splits and not rest and TRAIN not in splits and division == AS_GIVEN:
        if not only_evaluate:
            raise no_split(place, TRAIN, splits)
        _warn_of_absent_classes(ids, splits, place)
        return ids, {split: splits[split] for split in SPLITS if split in splits}
    completed = _completed(splits, rest, division, place, name_of)
    _check_classes(ids, completed, place)
    return ids, {split: completed[split] for split in SPLITS if completed[split] or split != TEST}


def in_order(labels: Iterable[str]) -> list[str]:
    """Return labels in the order of their classes: numbers by value, others by name."""
    found = sorted(labels)
    return sorted(found, key=_value) if all(label.isascii() and label.isdecimal() for label in found) else found


def _value(label: str) -> tuple[int, str]:
    """Return a key that orders numbers by value; int() refuses those with thousands of digits."""
    digits = label.lstrip("0")
    return len(digits), digits


def _completed(
    given: Splits[Item], rest: list[tuple[int, Item]], division: Division, place: object, name_of: Callable[[Item], str]
) -> Splits[Item]:
    """Return all splits: those that exist, and those that are divided from the rest or from the training images."""
    wanted = {VAL: division.val_fraction, TEST: division.test_fraction}
    if rest and given:
        message = (
            f"{place} names the split of some images, but not of {len(rest):,}, e.g. {name_of(rest[0][1])}. "
            "Name it for all or for none."
        )
        raise UserError("splits-incomplete", message, path=place)
    for split, fraction in wanted.items():
        if fraction and split in given:
            message = f"--{split}-fraction does not apply: {place} already has a {split} split. Omit the option."
            raise UserError("split-exists", message, path=place, split=split)
    if VAL not in given and not division.val_fraction:
        raise UserError(
            "no-val-split",
            f"{place} has no validation split, by which the best checkpoint is chosen. Use a fraction of the images: "
            f'run "paceline prepare {place} --val-fraction 0.1 --out DIR". For images that are only evaluated, run '
            f'"paceline prepare --test {place} --out DIR".',
            path=place,
        )
    if any(wanted.values()):
        divided = divide(rest or given.get(TRAIN, []), division, name_of)
        for split in SPLITS:
            if not divided[split] and (split == TRAIN or wanted[split]):
                raise empty_split(place, split, division.group_by)
        kept = {split: files for split, files in given.items() if split != TRAIN}
        _warn_of_shared_groups(kept, divided, division, name_of)
        given = given | {split: divided[split] for split in SPLITS if split == TRAIN or wanted[split]}
    return {split: given.get(split, []) for split in SPLITS}


def _warn_of_shared_groups(
    given: Splits[Item], divided: Splits[Item], division: Division, name_of: Callable[[Item], str]
) -> None:
    """Warn of groups that a given split, which is not divided again, shares with the divided images."""
    if not division.group_by:
        return
    others = [name_of(item) for files in divided.values() for _, item in files]
    for split, files in given.items():
        if shared := shared_groups(others, (name_of(item) for _, item in files), division.group_by):
            log.warning(
                "the given %s split has images of %s that other splits have as well, e.g. %s. --group-by does not "
                "change given splits.",
                *(split, counted(len(shared), "group"), shared[0]),
            )


def _check_classes(ids: list[str], splits: Splits[Item], place: object) -> None:
    """Refuse empty splits and classes without training images; warn about classes that are not evaluated."""
    for split in (TRAIN, VAL):
        if not splits[split]:
            raise empty_split(place, split)
    if absent := _absent(ids, splits[TRAIN]):
        trained = {label for label, _ in splits[TRAIN]}
        others = [name for name in (VAL, TEST) if {label for label, _ in splits[name]} - trained]
        only = f", which only {' and '.join(others)} {'has' if len(others) == 1 else 'have'}" if others else ""
        raise UserError(
            "empty-classes",
            f"{place} has no training images of {_shown(absent)}{only}. Add some, or remove or rename these classes.",
            path=place,
            classes=absent,
        )
    _warn_of_absent_classes(ids, splits, place)


def _warn_of_absent_classes(ids: list[str], splits: Splits[Item], place: object) -> None:
    for split, files in splits.items():
        if files and (absent := _absent(ids, files)):
            log.warning("%s: the %s split has no images of %s", place, split, _shown(absent))


def _absent(ids: list[str], files: list[tuple[int, Item]]) -> list[str]:
    present = {label for label, _ in files}
    return [id_ for label, id_ in enumerate(ids) if label not in present]


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if names[_SHOWN:] else "")


def empty_split(place: object, split: str, group_by: str = "") -> UserError:
    """Return the error for a split without images. `group_by`: the expression that made groups of them."""
    fix = "Use another fraction, add images, or fix the split column of a list."
    if group_by:
        fix = f"Use a --group-by that makes smaller groups than {group_by!r}, or another fraction."
    return UserError("empty-split", f"{place} has no images for {split}. {fix}", path=place, split=split)
