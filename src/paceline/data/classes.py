"""Classes, matched by id or name so that a model can be evaluated on other data."""

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UserError
from paceline.system.files import printable

_SHOWN = 10


@dataclass(frozen=True)
class Class:
    id: str
    """Unique: the folder name, or the WordNet id of ImageNet."""
    name: str
    """Human-readable; two classes may have the same one."""


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
            f"{place} has {len(unknown)} class{'es' * (len(unknown) > 1)} that the model of {origin} does not have. "
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
