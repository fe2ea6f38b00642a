"""Classes: their names, and their match by id or name so that a model can be evaluated on other data."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.system.files import printable
from paceline.system.logs import log
from paceline.system.wording import counted

_SHOWN = 10
_NOT_TEXT = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's categories of control characters, lone surrogates, and separators of lines and paragraphs."""


@dataclass(frozen=True)
class Class:
    id: str
    """Unique: the folder name, or the WordNet id of ImageNet."""
    name: str
    """Human-readable; two classes may have the same one."""


def class_names(
    labels: Iterable[str], place: object, example: Callable[[str], str] = lambda label: ""
) -> dict[str, str]:
    """Return the name of the class of every label: without surrounding spaces, in Unicode's composed form.

    Raises for names that are not plain text, and for labels that differ only in spaces or composition. `example`
    returns an image of a label.
    """
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    for label in labels:
        name = names[label] = _normalized(label.strip())
        if problem := not_text(name):
            where = f" (e.g. of {printable(found)})" if (found := example(label)) else ""
            message = f"{place} has a class named {label!r:.60}{where}, which {problem}. Rename it."
            raise UserError("class-name-invalid", message, path=place, name=label)
        if (other := first.setdefault(name, label)) != label:
            message = (
                f"{place} has the classes {other!a:.80} and {label!a:.80}, whose names differ only in surrounding "
                "spaces or in how Unicode encodes accents. Rename one of them, or merge them."
            )
            raise UserError("duplicate-classes", message, path=place, classes=[other, label])
    _warn_of_case(first, place)
    return names


def _warn_of_case(names: Iterable[str], place: object) -> None:
    seen: dict[str, str] = {}
    for name in sorted(names):
        if (other := seen.setdefault(name.casefold(), name)) != name:
            log.warning(
                "%s has the classes %s and %s, whose names differ only in case. If they mean the same, merge them.",
                *(place, printable(other), printable(name)),
            )


def not_text(name: str) -> str:
    """Return why a name of a class cannot be used, or an empty string."""
    if not name:
        return "is empty"
    kinds = {unicodedata.category(character) for character in name}
    if "Cs" in kinds:
        return "is not valid Unicode"
    return "contains a line break or another control character" if kinds.intersection(_NOT_TEXT) else ""


def match(model: Sequence[Class], data: Sequence[Class], origin: object, place: object) -> list[int]:
    """Return the model's index of every class of the data, matched by id, else by name. Raises on unknown classes."""
    by_id = {_normalized(entry.id): number for number, entry in enumerate(model)}
    times = Counter(_normalized(entry.name) for entry in model)
    by_name = {name: number for number, entry in enumerate(model) if times[name := _normalized(entry.name)] == 1}
    found = [by_id.get(_normalized(entry.id), by_name.get(_normalized(entry.name), -1)) for entry in data]
    unknown = [entry.id for entry, number in zip(data, found, strict=True) if number < 0]
    sides = f"The model has {_listed(model)}; the data has {_listed(data)}."
    if unknown:
        raise UserError(
            "unknown-classes",
            f"{place} has {counted(len(unknown), 'class', 'classes')} that the model of {origin} does not have. "
            f"{sides} Rename the classes of the data to match the model.",
            classes=unknown,
        )
    if len(set(found)) < len(found):
        raise UserError(
            "duplicate-classes",
            f"{place} has two classes that match the same class of the model of {origin}. {sides} "
            "Rename the classes of the data to match the model.",
        )
    return found


def _normalized(name: str) -> str:
    """Operating systems encode accented letters as one code point or as two."""
    return unicodedata.normalize("NFC", name)


def _listed(classes: Sequence[Class]) -> str:
    shown = ", ".join(
        entry.name if entry.name == entry.id else f"{entry.id} ({entry.name})" for entry in classes[:_SHOWN]
    )
    return f"{len(classes)} ({printable(shown)}{', ...' if len(classes) > _SHOWN else ''})"
